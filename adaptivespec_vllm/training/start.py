"""A head that exists already, as the beginning of another run of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from adaptivespec_vllm.config import ConfigError

if TYPE_CHECKING:
    from adaptivespec_vllm.training.network import Eagle3Network

_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class StartingHead:
    """Weights and draft vocabulary of a head that this package has exported in the EAGLE layout.

    Attributes:
        directory: where it was read.
        state: its tensors by name, ``float32``.
        ids: ``int64 [D]``, target ids of its draft vocabulary.

    """

    directory: Path
    state: dict[str, torch.Tensor]
    ids: torch.Tensor

    @classmethod
    def read(cls, directory: Path) -> StartingHead:
        """Read ``model.safetensors``.

        Raises:
            ConfigError: there is none, or it has no draft vocabulary.

        """
        try:
            tensors = load_file(directory / "model.safetensors")
            offsets = tensors["d2t"]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--start-from: {directory}: {error}") from error
        except KeyError:
            raise ConfigError(
                f"--start-from: {directory} has no tensor d2t; allowed: a head with a draft vocabulary"
            ) from None
        state = {name: tensor.float() for name, tensor in tensors.items() if name not in _MAPS}
        return cls(directory, state, offsets.long() + torch.arange(len(offsets)))

    def load_into(self, network: Eagle3Network) -> None:
        """Give the network these weights.

        Raises:
            ConfigError: the head has another structure than the one that is trained for this target.

        """
        try:
            network.load_state_dict(self.state)
        except RuntimeError as error:
            reason = "; ".join(line.strip() for line in str(error).splitlines()[1:])
            raise ConfigError(
                f"--start-from: {self.directory} does not fit this target: {reason}; "
                "allowed: the 'head' that an earlier run for the same target has written"
            ) from error
