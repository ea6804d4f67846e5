"""The ways of decoding that the demo compares, and the engine of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptivespec_vllm.demo.errors import DemoError

if TYPE_CHECKING:
    from vllm import LLM

    from adaptivespec_vllm.demo.model import DemoModel

STOCK_CHAIN = 2
"""Draft tokens of the stock chain: its best length for this model and head on a CPU."""
KAPPA = 0.2
KV_CACHE_BYTES = 256 * 2**20
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: what ``--arms`` calls it.
        title: what the table calls it.
        speculative: vLLM's speculative config without the head's path; ``None`` decodes plainly.
        lossless: the text must be that of plain decoding.
        chain: draft tokens a step where that is fixed; ``None`` where the engine reports what it drafted.

    """

    name: str
    title: str
    speculative: dict[str, Any] | None
    lossless: bool = True
    chain: int | None = None

    def engine(self, model: DemoModel) -> LLM:
        """A vLLM engine of this arm, in this process."""
        from vllm import LLM

        speculative = None if self.speculative is None else {**self.speculative, "model": str(model.head)}
        return LLM(
            model=str(model.model),
            speculative_config=speculative,
            # bf16 is slow and inexact on CPUs without bf16 arithmetic, and exactness is part of what is shown.
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            disable_log_stats=True,
        )


ARMS = {
    arm.name: arm
    for arm in (
        Arm("plain", "plain vLLM", None, chain=0),
        Arm(
            "stock",
            f"EAGLE-3 chain of {STOCK_CHAIN}",
            {"method": "eagle3", "num_speculative_tokens": STOCK_CHAIN},
            chain=STOCK_CHAIN,
        ),
        Arm("strict", "AdaptiveSpec strict", {"method": "adaptivespec"}),
        Arm(
            "margin",
            "AdaptiveSpec margin",
            {"method": "adaptivespec", "margin": {"kappa": KAPPA}},
            lossless=False,
        ),
    )
}


def choose(names: str) -> list[Arm]:
    """The arms of a comma-separated list, in the order of the list."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise DemoError(f"--arms: unknown arm {', '.join(unknown) or '(none given)'}", f"choose from {', '.join(ARMS)}")
    return [ARMS[name] for name in dict.fromkeys(wanted)]
