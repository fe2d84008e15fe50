"""What the published MiniMax-M3 checkpoints hold, and in which formats: their bytes are counted from shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mmcompile.core.formats.footprint import Format, Weight
from mmcompile.models._minimax_m3_config import MiniMaxM3Config

Shapes = Mapping[str, tuple[int, ...]]

MIXES = ("nvfp4_mxfp8", "mxfp8", "bf16")
# The vision tower of both models: a CLIP-like encoder (transformers, minimax_m3_vl) and its projector.
_VISION_LAYERS, _VISION_HIDDEN, _VISION_WIDTH, _MERGED_PATCHES = 32, 1280, 5120, 4
_PATCH = (3, 2, 14, 14)


def choose_format(name: str, shape: tuple[int, ...], mix: str) -> Format:
    """The format of a parameter by its name as models/minimax_m3.py spells it.

    ``mix``: "nvfp4_mxfp8" (M3.1-Flash: experts NVFP4; projections of attention, indexer, dense and shared feed-forward
    layers MXFP8; router fp32; the rest bf16), "mxfp8" (M3: experts MXFP8 too) or "bf16" (everything but the router).
    Raises ValueError for another one.
    """
    if mix not in MIXES:
        raise ValueError(f"mix must be one of {MIXES}, got {mix!r}")
    parts = name.split(".")
    if "gate" in parts or parts[-1] == "e_score_correction_bias":
        return "fp32"
    if "experts" in parts and mix != "bf16":
        return "nvfp4" if mix == "nvfp4_mxfp8" else "mxfp8"
    projection = len(shape) == 2 and any(part.endswith("_proj") for part in parts)
    return "mxfp8" if projection and mix != "bf16" else "bf16"


def list_checkpoint_weights(
    shapes: Shapes, config: MiniMaxM3Config, mix: str, *, mtp_modules: int = 0
) -> Iterator[Weight]:
    """Every weight of a checkpoint: the text decoder, the vision tower and the multi-token prediction modules.

    Args:
        shapes: of the text decoder's parameters, from its module or its graph; a stack of experts is one parameter,
            gate above up, that the checkpoint holds as three matrices an expert.
        mix: see :func:`choose_format`. mtp_modules: 1 in M3's checkpoints, 0 in M3.1-Flash's (a DSpark draft comes in a
            file of its own instead).
    """
    text = {**shapes, **_shape_mtp(config, mtp_modules)}
    for name, shape in text.items():
        form = choose_format(name, shape, mix)
        if name.endswith("gate_up_proj"):  # two matrices, each with scalars of its own
            half = (shape[0], shape[1] // 2, shape[2])
            yield from (Weight(name.replace("gate_up", part), half, form) for part in ("gate", "up"))
        else:
            yield Weight(name, tuple(shape), form)
    yield from (Weight(name, shape, "bf16") for name, shape in _shape_vision(config.hidden_size).items())


def _shape_mtp(config: MiniMaxM3Config, modules: int) -> dict[str, tuple[int, ...]]:
    """A module is a sparse MoE layer behind a projection of [embedding | hidden state]."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv, index = config.num_kv_heads * config.head_dim, config.index_heads * config.index_head_dim
    layer = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "final_layernorm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.index_q_proj.weight": (index, hidden),
        "self_attn.index_k_proj.weight": (config.index_head_dim, hidden),
        **{f"self_attn.{part}_norm.weight": (config.head_dim,) for part in ("q", "k")},
        **{f"self_attn.index_{part}_norm.weight": (config.index_head_dim,) for part in ("q", "k")},
        "mlp.gate.weight": (config.num_experts, hidden),
        "mlp.e_score_correction_bias": (config.num_experts,),
        "mlp.experts.gate_up_proj": (config.num_experts, 2 * config.intermediate_size, hidden),
        "mlp.experts.down_proj": (config.num_experts, hidden, config.intermediate_size),
        "mlp.shared_experts.gate_proj.weight": (config.shared_intermediate_size, hidden),
        "mlp.shared_experts.up_proj.weight": (config.shared_intermediate_size, hidden),
        "mlp.shared_experts.down_proj.weight": (hidden, config.shared_intermediate_size),
    }
    return {f"model.mtp.layers.{i}.{name}": shape for i in range(modules) for name, shape in layer.items()}


def _shape_vision(hidden: int) -> dict[str, tuple[int, ...]]:
    """Vision tower and projector to ``hidden``, unquantized in every checkpoint."""
    size, width = _VISION_HIDDEN, _VISION_WIDTH
    shapes: dict[str, tuple[int, ...]] = {"vision_tower.embeddings.proj.weight": (size, *_PATCH)}
    for kind in ("weight", "bias"):
        shapes[f"vision_tower.pre_layrnorm.{kind}"] = (size,)
    matrices = {f"self_attn.{part}_proj": (size, size) for part in ("q", "k", "v", "out")}
    matrices |= {"mlp.fc1": (width, size), "mlp.fc2": (size, width)}
    for layer in range(_VISION_LAYERS):
        prefix = f"vision_tower.layers.{layer}"
        for name, shape in matrices.items():
            shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
        shapes |= {f"{prefix}.layer_norm{i}.{kind}": (size,) for i in (1, 2) for kind in ("weight", "bias")}
    for name, columns in {
        "linear_1": size, "linear_2": hidden, "merge_linear_1": _MERGED_PATCHES * hidden, "merge_linear_2": hidden,
    }.items():  # fmt: skip
        prefix = f"multi_modal_projector.{name}"
        shapes |= {f"{prefix}.weight": (hidden, columns), f"{prefix}.bias": (hidden,)}
    return shapes
