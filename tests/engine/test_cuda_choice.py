"""What is chosen and refused for NVIDIA GPUs before a device is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine import spec_config
from adaptivespec_vllm.engine.v1 import cuda_worker
from adaptivespec_vllm.engine.v1.cuda_proposer import CUDATreeProposer
from adaptivespec_vllm.engine.v1.cuda_runner import CUDATreeModelRunner
from adaptivespec_vllm.engine.v1.runner import TreeModelRunner

OPTIONS = {"method": "adaptivespec", "model": "head"}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(device_type: str, rocm: bool = False) -> None:
        platform = SimpleNamespace(device_type=device_type, is_rocm=lambda: rocm, is_cpu=lambda: device_type == "cpu")
        monkeypatch.setattr(spec_config, "current_platform", platform)

    return choose


@pytest.mark.parametrize("name", ["flash", "triton", "xformers"])
def test_on_a_cpu_attention_is_our_op(on: Any, name: str) -> None:
    on("cpu")
    with pytest.raises(ConfigError, match=f"attention: got '{name}'; allowed on CPU: 'auto'"):
        spec_config.parse(OPTIONS | {"attention": name})
    assert spec_config.parse(OPTIONS | {"attention": "auto"})[0].attention == "auto"


def test_on_a_gpu_all_are_allowed_and_others_named(on: Any) -> None:
    on("cuda")
    for name in ("auto", "flash", "triton", "xformers"):
        assert spec_config.parse(OPTIONS | {"attention": name})[0].attention == name
    with pytest.raises(ConfigError, match=r"attention: got .cutlass.; allowed: 'auto'.*'flash'.*'triton'.*'xformers'"):
        spec_config.parse(OPTIONS | {"attention": "cutlass"})


def test_the_worker_follows_the_device(on: Any) -> None:
    on("cuda")
    name = spec_config._worker("auto")
    module, _, cls = name.rpartition(".")
    assert module == cuda_worker.__name__
    worker = getattr(cuda_worker, cls)
    assert issubclass(worker, Worker)
    on("cuda", rocm=True)
    with pytest.raises(ConfigError, match="not supported yet on ROCM"):
        spec_config._worker("auto")
    on("xpu")
    with pytest.raises(ConfigError, match="not supported yet on XPU"):
        spec_config._worker("auto")


def test_vllms_classes_come_after_ours() -> None:
    """Each override reaches vLLM's own method."""
    for ours, stock in ((CUDATreeModelRunner, GPUModelRunner), (CUDATreeProposer, EagleProposer)):
        assert issubclass(ours, stock)
    order = CUDATreeModelRunner.__mro__
    assert order.index(TreeModelRunner) < order.index(GPUModelRunner)


def config(mode: CUDAGraphMode | None, ubatching: bool = False, policy: str = "static") -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(adaptivespec=SimpleNamespace(tree=SimpleNamespace(policy=policy))),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
    )


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graphs_that_leave_attention_out(mode: CUDAGraphMode | None) -> None:
    settings = config(mode)
    assert list(cuda_worker.unsupported(settings)) == []
    cuda_worker.use_piecewise_graphs(settings.compilation_config)
    left = settings.compilation_config.cudagraph_mode
    assert left is None or not left.has_full_cudagraphs()


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
def test_graphs_that_hold_attention_are_refused(mode: CUDAGraphMode) -> None:
    (reason,) = cuda_worker.unsupported(config(mode))
    assert reason.startswith(f"cudagraph_mode={mode.name}: ")
    assert "allowed: NONE, PIECEWISE, FULL_AND_PIECEWISE" in reason


def test_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = cuda_worker.unsupported(config(CUDAGraphMode.PIECEWISE, ubatching=True))
    assert reason.startswith("enable_dbo=True: ")
    (reason,) = cuda_worker.unsupported(config(CUDAGraphMode.PIECEWISE, policy="talon"))
    assert reason.startswith("tree.policy='talon': ")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    (reason,) = cuda_worker.unsupported(config(CUDAGraphMode.PIECEWISE))
    assert reason.startswith("VLLM_USE_BREAKABLE_CUDAGRAPH=1: ")
