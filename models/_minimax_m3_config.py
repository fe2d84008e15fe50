"""Dimensions of MiniMax-M3 and M3.1-Flash, and how they are read from a published config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmcompile.core.errors import CaptureError, UsageError

MODEL_TYPES = ("minimax_m3_vl",)
"""``model_type`` of the config.json of the checkpoints that the model reads."""

_SPARSE_LAYER, _DENSE_LAYER = "minimax_m3_sparse", "full_attention"
# Field of the config -> names in config.json, those of transformers first, then those of the sparse_attention_config.
_FIELDS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "dense_intermediate_size": ("dense_intermediate_size",),
    "intermediate_size": ("intermediate_size",),
    "shared_intermediate_size": ("shared_intermediate_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rotary_dim": ("rotary_dim",),
    "rope_theta": ("rope_theta",),
    "rms_norm_eps": ("rms_norm_eps",),
    "max_positions": ("max_position_embeddings",),
    "num_experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "swiglu_alpha": ("swiglu_alpha",),
    "swiglu_limit": ("swiglu_limit",),
    "index_heads": ("index_n_heads", "sparse_num_index_heads"),
    "index_head_dim": ("index_head_dim", "sparse_index_dim"),
    "block_size": ("index_block_size", "sparse_block_size"),
    "top_k_blocks": ("index_topk_blocks", "sparse_topk_blocks"),
    "local_blocks": ("index_local_blocks", "sparse_local_block"),
    "initial_blocks": ("sparse_init_block",),
}
# What the model does not do: field -> values that are fine.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_output_gate": (False,),
    "tie_word_embeddings": (False,),
    "n_shared_experts": (1,),
    "hidden_act": ("swigluoai", "silu"),  # transformers writes "silu" and computes swigluoai all the same
    "sparse_score_type": ("max",),
}


@dataclass(frozen=True)
class MiniMaxM3Config:
    """Dimensions of a decoder; all widths in elements.

    ``sparse_attention_freq`` and ``moe_layer_freq`` hold one flag a layer: whether its attention is block-sparse and
    whether its feed-forward part is a mixture of experts. ``index_topk_freq``, ``index_topk_pattern`` ("F" choose, "S"
    share) and ``index_skip_topk_offset`` say which sparse layers share the blocks that an earlier one chose.
    """

    sparse_attention_freq: tuple[int, ...]
    moe_layer_freq: tuple[int, ...]
    vocab_size: int = 200064
    hidden_size: int = 6144
    dense_intermediate_size: int = 12288
    intermediate_size: int = 3072
    shared_intermediate_size: int = 3072
    num_layers: int = 60
    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5e6
    rms_norm_eps: float = 1e-6
    max_positions: int = 1048576
    num_experts: int = 128
    experts_per_token: int = 4
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    index_heads: int = 4
    index_head_dim: int = 128
    block_size: int = 128
    top_k_blocks: int = 16
    local_blocks: int = 1
    initial_blocks: int = 0
    index_topk_freq: int = 1
    index_topk_pattern: str = ""
    index_skip_topk_offset: int = 0
    eos_token_ids: tuple[int, ...] = (200020,)

    def __post_init__(self) -> None:
        for name in ("sparse_attention_freq", "moe_layer_freq"):
            if len(getattr(self, name)) != self.num_layers:
                raise UsageError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        if self.rotary_dim > min(self.head_dim, self.index_head_dim) or self.rotary_dim % 2:
            raise UsageError(
                f"rotary_dim is {self.rotary_dim}, it must be even and at most head_dim {self.head_dim} and "
                f"index_head_dim {self.index_head_dim}"
            )
        if self.num_heads % self.num_kv_heads or self.num_kv_heads % self.index_heads:
            raise UsageError(
                f"{self.num_heads} heads, {self.num_kv_heads} KV heads and {self.index_heads} index heads: "
                "each must be a multiple of the next"
            )
        blocks = self.max_positions // self.block_size
        if not max(1, self.local_blocks + self.initial_blocks) <= self.top_k_blocks <= blocks:
            raise UsageError(
                f"top_k_blocks is {self.top_k_blocks}, it must hold the {self.local_blocks} local and "
                f"{self.initial_blocks} initial blocks and be at most {blocks}, the blocks of max_positions"
            )
        if not 0 < self.experts_per_token <= self.num_experts:
            raise UsageError(f"experts_per_token is {self.experts_per_token} of {self.num_experts} experts")
        sparse = sum(map(bool, self.sparse_attention_freq))
        if self.index_topk_freq < 1 or len(self.index_topk_pattern) not in (0, sparse):
            raise UsageError(
                f"index_topk_freq is {self.index_topk_freq}, at least 1 is needed, and index_topk_pattern "
                f"{self.index_topk_pattern!r}, empty or one letter for each of the {sparse} sparse layers is needed"
            )

    def chooses_blocks(self, layer: int) -> bool:
        """True if a sparse layer runs its own indexer, False if it takes the blocks of the sparse layer before it."""
        ordinal = sum(map(bool, self.sparse_attention_freq[:layer]))
        if ordinal == 0:
            return True
        if self.index_topk_pattern:
            return self.index_topk_pattern[ordinal] != "S"
        return max(ordinal - self.index_skip_topk_offset, 0) % self.index_topk_freq == 0


def slice_layers(config: MiniMaxM3Config, layers: int) -> MiniMaxM3Config:
    """The first ``layers`` layers at the same dimensions. Raises UsageError if there are not as many."""
    if not 0 < layers <= config.num_layers:
        raise UsageError(f"a slice of {layers} layers was asked of a model with {config.num_layers}")
    sparse = sum(map(bool, config.sparse_attention_freq[:layers]))
    return replace(
        config,
        num_layers=layers,
        sparse_attention_freq=config.sparse_attention_freq[:layers],
        moe_layer_freq=config.moe_layer_freq[:layers],
        index_topk_pattern=config.index_topk_pattern[:sparse],
    )


def read_config(fields: Mapping[str, Any]) -> MiniMaxM3Config:
    """The dimensions of the text decoder in ``fields`` of a config.json.

    A field that is absent has MiniMax-M3's value, as in transformers; which layers are sparse and which hold experts
    must be said. Raises CaptureError if it is not, or for a variant that the model does not compute, and UsageError
    for values that contradict one another.
    """
    text = dict(fields.get("text_config") or fields)
    sparse = text.get("sparse_attention_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = {**sparse, **rope, **{name: value for name, value in text.items() if value is not None}}
    _refuse_variants(given, rope)
    values = {field: given[name] for field, names in _FIELDS.items() for name in reversed(names) if name in given}
    layers = int(values.get("num_layers", MiniMaxM3Config.num_layers))
    if "rotary_dim" not in values and "partial_rotary_factor" in given:
        values["rotary_dim"] = int(values.get("head_dim", MiniMaxM3Config.head_dim) * given["partial_rotary_factor"])
    attention = _read_flags(given, "layer_types", {_SPARSE_LAYER: 1, _DENSE_LAYER: 0}, "sparse_attention_freq")
    if not given.get("use_sparse_attention", True):
        attention = (0,) * layers
    experts = _read_flags(given, "mlp_layer_types", {"sparse": 1, "dense": 0}, "moe_layer_freq")
    _refuse_index_values(given, attention)
    if given.get("use_index_cache"):
        for name in ("index_topk_freq", "index_skip_topk_offset"):
            values |= {name: given[name]} if name in given else {}
        values["index_topk_pattern"] = "".join(given.get("index_topk_pattern") or ())
    stops = given.get("eos_token_id", MiniMaxM3Config.eos_token_ids)
    values["eos_token_ids"] = (stops,) if isinstance(stops, int) else tuple(stops)
    return MiniMaxM3Config(sparse_attention_freq=attention, moe_layer_freq=experts, **values)


def _refuse_variants(given: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    for name, fine in _FIXED.items():
        if given.get(name, fine[0]) not in fine:
            raise CaptureError(f"{name} is {given[name]!r}, and MiniMax-M3 is compiled with {fine[0]!r} only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CaptureError(f"rope_type is {kind!r}, and MiniMax-M3 is compiled with unscaled RoPE only")


def _read_flags(given: Mapping[str, Any], types: str, kinds: Mapping[str, int], flags: str) -> tuple[int, ...]:
    """One flag a layer, from names of kinds or from numbers."""
    if types in given:
        unknown = sorted({str(kind) for kind in given[types]} - set(kinds))
        if unknown:
            raise CaptureError(f"{types} holds {unknown[0]!r}, known are {', '.join(sorted(kinds))}")
        return tuple(kinds[kind] for kind in given[types])
    if flags not in given:
        raise CaptureError(f"config.json names neither {types} nor {flags}", fix="take the one of the checkpoint")
    return tuple(int(bool(flag)) for flag in given[flags])


def _refuse_index_values(given: Mapping[str, Any], attention: tuple[int, ...]) -> None:
    disabled = given.get("sparse_disable_index_value", attention)
    disabled = (disabled,) * len(attention) if isinstance(disabled, bool | int) else disabled
    for layer, (sparse, without) in enumerate(zip(attention, disabled, strict=False)):
        if sparse and not without:
            raise CaptureError(f"layer {layer} has an indexer with values (sparse_disable_index_value), not supported")
