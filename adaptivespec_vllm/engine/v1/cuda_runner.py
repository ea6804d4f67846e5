"""The V1 model runner with trees on NVIDIA GPUs. Not run on a GPU yet; see ``docs/cuda.md``."""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from adaptivespec_vllm.engine.v1 import cuda_attention
from adaptivespec_vllm.engine.v1.device_steps import DeviceSteps


class CUDATreeModelRunner(DeviceSteps, GPUModelRunner):
    """vLLM's GPU runner with trees."""

    stock_attention = cuda_attention.STOCK

    def teach_attention(self) -> None:
        """Tree rows by what the key ``attention`` says."""
        every = self.compilation_config.static_forward_context
        self.attention_name, self.attention = cuda_attention.teach(
            self.attention_layers(), every, self.settings.attention
        )

    def describe_attention(self) -> str:
        """See :class:`TreeModelRunner`."""
        backends = sorted({layer.get_attn_backend().get_name() for layer in self.attention_layers().values()})
        return f"vLLM's {' and '.join(backends)}; tree rows by '{self.attention_name}'"
