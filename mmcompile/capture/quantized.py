"""Which tensors of a quantized Hugging Face checkpoint belong together, and whether we can read its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mmcompile.capture.tensors import LazyTensor, PackedLinear, list_some
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats.nvfp4 import BLOCK, Convention

Tensors = Mapping[str, LazyTensor]

# Tensor names within one module: (packed, block scale, global scale).
NAMES: dict[Convention, tuple[str, str, str]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}
CT_FORMAT = "nvfp4-pack-quantized"
CT_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True}
ACTIVATION_SCALES = ("input_scale", "input_global_scale")
CACHE_SCALES = ("k_scale", "v_scale")


def split_quantized(
    tensors: Tensors, quantization: Any, where: str
) -> tuple[dict[str, LazyTensor], dict[str, PackedLinear]]:
    """Split a checkpoint into (ordinary tensors, NVFP4 weights by module path).

    Args:
        tensors: everything stored.
        quantization: ``quantization_config`` of config.json or ``quantization`` of hf_quant_config.json, or None.

    Activation scales are dropped (activations are not quantized here). KV-cache scales are dropped if they are 1.0.
    Raises CheckpointError for another format, for incomplete groups and for KV-cache scales other than 1.0.
    """
    convention = None if quantization is None else _find_convention(quantization, where)
    packed = _find_packed(tensors, convention, where)
    used = {f"{module}.{part}" for module in packed for part in NAMES[packed[module].convention]}
    ordinary = {name: lazy for name, lazy in tensors.items() if name not in used}
    if convention is None:
        return ordinary, packed
    ordinary = {name: lazy for name, lazy in ordinary.items() if not _ends_with(name, ACTIVATION_SCALES)}
    _check_cache_scales({name: lazy for name, lazy in ordinary.items() if _ends_with(name, CACHE_SCALES)})
    return {name: lazy for name, lazy in ordinary.items() if not _ends_with(name, CACHE_SCALES)}, packed


def _ends_with(name: str, parts: Iterable[str]) -> bool:
    return name.rpartition(".")[2] in parts


def _find_convention(quantization: Any, where: str) -> Convention:
    if not isinstance(quantization, dict):
        raise CheckpointError("the quantization configuration is not a JSON object", where=where)
    if "quant_algo" in quantization:
        _check_modelopt(quantization, where)
        return "modelopt"
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        _check_compressed_tensors(quantization, where)
        return "compressed-tensors"
    raise _unsupported(f"quant_method {method!r}", where)


def _unsupported(what: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is not a supported quantization",
        where=where,
        fix=f"use ModelOpt's quant_algo NVFP4, compressed-tensors' format {CT_FORMAT}, or unquantized weights",
    )


def _check_modelopt(quantization: dict[str, Any], where: str) -> None:
    layers = quantization.get("quantized_layers") or {}
    if not _is_table(layers):
        raise CheckpointError("quantized_layers must map modules to JSON objects", where=where)
    algorithms = {quantization["quant_algo"]} - {"MIXED_PRECISION"} if layers else {quantization["quant_algo"]}
    for algorithm in sorted(algorithms | {layer.get("quant_algo") for layer in layers.values()}, key=str):
        if algorithm != "NVFP4":
            raise _unsupported(f"quant_algo {algorithm!r}", where)
    sizes = {quantization.get("group_size"), *(layer.get("group_size") for layer in layers.values())} - {None}
    if sizes - {BLOCK}:
        raise CheckpointError(f"NVFP4 needs group_size {BLOCK}, got {sorted(sizes)}", where=where)


def _is_table(value: Any) -> bool:
    """Whether ``value`` is a JSON object of JSON objects."""
    return isinstance(value, dict) and all(isinstance(row, dict) for row in value.values())


def _check_compressed_tensors(quantization: dict[str, Any], where: str) -> None:
    groups = quantization.get("config_groups")
    if not groups or not _is_table(groups):
        raise CheckpointError("the quantization configuration has no config_groups", where=where)
    for name, group in groups.items():
        form = group.get("format") or quantization.get("format")
        if form != CT_FORMAT:
            raise _unsupported(f"format {form!r} of {name}", where)
        weights = group.get("weights") or {}
        wrong = {key: weights.get(key) for key, value in CT_WEIGHTS.items() if weights.get(key, value) != value}
        if wrong:
            raise _unsupported(f"{CT_FORMAT} with weights {wrong} in {name}", where)


def _find_packed(tensors: Tensors, convention: Convention | None, where: str) -> dict[str, PackedLinear]:
    """Collect the groups of ``convention``; refuse a part of any group that is left over."""
    packed: dict[str, PackedLinear] = {}
    used: set[str] = set()
    if convention is not None:
        for name, lazy in tensors.items():
            module, _, part = name.rpartition(".")
            if part == NAMES[convention][0] and lazy.dtype == torch.uint8:
                packed[module] = _group(tensors, module, convention)
                used |= {f"{module}.{part}" for part in NAMES[convention]}
    parts = {part for names in NAMES.values() for part in names} - {"weight"}
    stray = {name for name in tensors if name not in used and _ends_with(name, parts)}
    stray |= {name for name, lazy in tensors.items() if name not in used and _is_raw_weight(name, lazy)}
    if stray:
        expected = f"the {convention} convention" if convention else "a checkpoint without quantization_config"
        raise CheckpointError(
            f"quantized tensors that do not fit {expected}: {list_some(stray)}",
            where=where,
            fix="check that the quantization configuration belongs to these weights",
        )
    return packed


def _is_raw_weight(name: str, lazy: LazyTensor) -> bool:
    """Whether a ``weight`` is stored in a one-byte type, which only makes sense with scales."""
    return _ends_with(name, ("weight",)) and lazy.dtype.itemsize == 1


def _group(tensors: Tensors, module: str, convention: Convention) -> PackedLinear:
    names = [f"{module}.{part}" for part in NAMES[convention]]
    where = tensors[names[0]].where
    missing = {name for name in names if name not in tensors}
    if missing:
        raise CheckpointError(f"NVFP4 weight without its scale: {list_some(missing)} missing", where=where)
    packed, scale, global_scale = (tensors[name] for name in names)
    if len(packed.shape) != 2:
        raise CheckpointError(f"NVFP4 weight {names[0]!r} is not a matrix: {list(packed.shape)}", where=where)
    return PackedLinear(packed, scale, global_scale, convention)


def _check_cache_scales(scales: Tensors) -> None:
    for name, lazy in scales.items():
        if bool((lazy.read().float() != 1.0).any()):
            raise CheckpointError(
                f"KV-cache scale {name!r} is not 1.0, and calibrated cache scales are not supported yet",
                where=lazy.where,
                fix="export the checkpoint without KV-cache quantization",
            )
