"""A draft head on packed weights, in a few native ops instead of a module tree.

A pass over few rows is bound by reading the head's weights, and by torch's cost a call. Here the linear weights are
bfloat16 values (half the bytes of vLLM's float32 copy; packed only where each weight *is* such a value, so that nothing
is rounded), and a layer is one call. Heads with another structure, dtype or device, and quantized ones, are left to
their own modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import DraftLayer, LevelPlaces, PackedLinear

_READ_BACK = 256
"""Unit vectors at a time."""


class NotPacked(Exception):
    """A head that keeps its own modules, with the reason."""


class PackedHead:
    """The weights of an EAGLE-3 head of vLLM, packed.

    Args:
        model: vLLM's model, loaded.

    Raises:
        NotPacked: the head is not one whose passes are known here.

    """

    def __init__(self, model: Any) -> None:
        if not ops.native_ops_loaded():
            raise NotPacked("the native ops are not built")
        try:
            self._read(model)
        except AttributeError as error:
            raise NotPacked(f"the structure is another one ({error})") from None

    def _read(self, model: Any) -> None:
        inner = model.model
        first, processor = inner.layers[0], model.logits_processor
        if model.lm_head.tp_size > 1:
            raise NotPacked("it is spread over several ranks")
        if processor.soft_cap is not None or processor.head_dtype not in (None, torch.float32):
            raise NotPacked("the logits are not a plain product")
        norms = [inner.norm, *(m for layer in inner.layers for m in _norms(layer))]
        self._eps = inner.norm.variance_epsilon
        if any(n.variance_epsilon != self._eps or n.variance_size_override is not None for n in norms):
            raise NotPacked("the norms differ")
        self._embeddings = _float32(inner.embed_tokens.weight)
        self._embed_norm, self._hidden_norm = _float32(first.input_layernorm.weight), _float32(first.hidden_norm.weight)
        self._norm_before_residual = first._residual_norm == first._norm_before_residual
        self._norm_output = bool(inner.norm_output)
        self._layers = [_layer(layer, self._eps) for layer in inner.layers]
        following = [*(layer.input_layernorm for layer in inner.layers[1:]), inner.norm]
        self._next_norms = [_float32(norm.weight) for norm in following]
        self._read_fusion(inner)
        self._lm_head = _linear(model.lm_head, processor.org_vocab_size)
        self._logit_scale = processor.scale

    def _read_fusion(self, inner: Any) -> None:
        if not inner.use_aux_hidden_state:
            raise NotPacked("it reads no auxiliary hidden states")
        self._fc = _linear(inner.fc)
        self._norm_of_all = None if inner.input_norm is None else _float32(inner.input_norm.weight)
        self._norms_of_each = None
        norms = list(inner.fc_norm or [])
        if norms:
            self._norms_of_each = torch.stack([_float32(norm.weight) for norm in norms])
        if any(n.variance_epsilon != self._eps for n in [*norms, *filter(None, [inner.input_norm])]):
            raise NotPacked("the norms differ")

    def bytes(self) -> int:
        """Memory of the packed weights, beside vLLM's own copy."""
        layers = [linear for layer in self._layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(linear.weight.nbytes for linear in (*layers, self._fc, self._lm_head))

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """One hidden state of those of the auxiliary layers.

        Args:
            hidden: ``float32 [R, auxiliary layers x hidden size of the target]``.

        Returns:
            ``float32 [R, H]``.

        """
        if self._norm_of_all is not None:
            hidden = F.rms_norm(hidden, hidden.shape[1:], self._norm_of_all, self._eps)
        if self._norms_of_each is not None:
            each = hidden.view(len(hidden), *self._norms_of_each.shape)
            hidden = (F.rms_norm(each, each.shape[2:], None, self._eps) * self._norms_of_each).view(hidden.shape)
        return ops.linear(hidden, self._fc)

    def forward(
        self,
        tokens: torch.Tensor,
        parent_rows: torch.Tensor,
        hidden: torch.Tensor,
        places: LevelPlaces,
        scratch: list[torch.Tensor],
        caches: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that give logits, and those that the next level continues.

        Args:
            tokens: ``int64 [R]``.
            parent_rows: ``int64 [R]``, rows of ``hidden``.
            hidden: ``float32 [P, H]``.
            places: where the rows stand.
            scratch: for each layer ``float32 [2, Tk, Hkv, D]``, keys and values of the expanded nodes.
            caches: for each layer its paged keys and values.

        """
        x, residual = ops.draft_input(
            tokens, parent_rows, self._embeddings, hidden, self._embed_norm, self._hidden_norm, self._eps,
            self._norm_before_residual,
        )  # fmt: skip
        for layer, next_norm, (keys, values), cache in zip(
            self._layers, self._next_norms, scratch, caches, strict=True
        ):
            x = ops.draft_layer(x, residual, layer, next_norm, places, keys, values, *cache)
        return x, x if self._norm_output else residual

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """``float32 [R, draft vocabulary]``."""
        logits = ops.linear(last_hidden, self._lm_head)
        return logits if self._logit_scale == 1.0 else logits.mul_(self._logit_scale)


def _norms(layer: Any) -> list[Any]:
    attention = layer.self_attn
    heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return [layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, *heads]


def _layer(layer: Any, eps: float) -> DraftLayer:
    attention, mlp = layer.self_attn, layer.mlp
    rope = attention.rotary_emb
    if type(rope).forward_native is not RotaryEmbedding.forward_native or not rope.is_neox_style:
        raise NotPacked(f"rotary embedding {type(rope).__name__} is another one")
    head_norms = hasattr(attention, "q_norm")
    return DraftLayer(
        qkv=_linear(attention.qkv_proj),
        q_norm=_float32(attention.q_norm.weight) if head_norms else None,
        k_norm=_float32(attention.k_norm.weight) if head_norms else None,
        o=_linear(attention.o_proj),
        post_norm=_float32(layer.post_attention_layernorm.weight),
        gate_up=_linear(mlp.gate_up_proj),
        down=_linear(mlp.down_proj),
        cos_sin=_float32(rope.cos_sin_cache),
        scale=attention.attn.impl.scale,
        eps=eps,
    )


def _linear(layer: Any, outputs: int | None = None) -> PackedLinear:
    """The layer packed, its first ``outputs`` only where given."""
    if type(layer.quant_method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        raise NotPacked(f"the linear layers are {type(layer.quant_method).__name__}")
    bias = None if layer.bias is None else _float32(layer.bias)
    weight = _weight(layer)[:outputs]
    packed = PackedLinear.pack(weight, bias)
    if not torch.equal(packed.unpacked(), weight):
        raise NotPacked("its weights are not values of bfloat16")
    return packed


def _weight(layer: Any) -> torch.Tensor:
    """Weights ``[N, K]``. vLLM packs those of most layers for its own kernels and drops the parameter; what such a
    layer makes of the unit vectors is its weights."""
    if layer.weight.dim() == 2:
        return _float32(layer.weight)
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    blocks = []
    for begin in range(0, inputs, _READ_BACK):
        count = min(_READ_BACK, inputs - begin)
        units = torch.zeros(count, inputs)
        units[:, begin : begin + count].fill_diagonal_(1.0)
        blocks.append(layer.quant_method.apply(layer, units, None))
    return _float32(torch.cat(blocks).T)


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32 or not tensor.is_cpu:
        raise NotPacked(f"it holds {tensor.dtype} on {tensor.device}")
    return tensor.data
