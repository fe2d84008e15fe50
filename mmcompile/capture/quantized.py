"""Which tensors of a quantized Hugging Face checkpoint belong together, and whether we can read its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mmcompile.capture.tensors import LazyTensor, PackedLinear, ScaledLinear, list_some
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import mxfp8
from mmcompile.core.formats.nvfp4 import BLOCK, Convention

Tensors = Mapping[str, LazyTensor]

# Tensor names within one module: (packed, block scale, global scale).
NAMES: dict[Convention, tuple[str, str, str]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}
# Names of the scale of an MXFP8 ``weight``: MiniMax's, then that of ModelOpt and compressed-tensors.
MXFP8_SCALES = ("weight_scale_inv", "weight_scale")
CT_FORMAT, CT_MXFP8 = "nvfp4-pack-quantized", "mxfp8-quantized"
CT_WEIGHTS: dict[str, dict[str, Any]] = {
    CT_FORMAT: {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True},
    CT_MXFP8: {"num_bits": 8, "type": "float", "strategy": "group", "group_size": mxfp8.BLOCK, "symmetric": True},
}
GROUP_SIZES = {"NVFP4": BLOCK, "MXFP8": mxfp8.BLOCK}
ACTIVATION_SCALES = ("input_scale", "input_global_scale")
CACHE_SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Scheme:
    """What a quantization configuration allows.

    ``convention``: of its NVFP4 weights, None if it has none. ``mxfp8``: whether it has MXFP8 weights. ``listed``:
    module -> algorithm, where the configuration lists modules one by one.
    """

    convention: Convention | None = None
    mxfp8: bool = False
    listed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        formats = [f"the {self.convention} convention"] if self.convention else []
        return " and ".join([*formats, *(["MXFP8"] if self.mxfp8 else [])])


@dataclass(frozen=True)
class Split:
    """A checkpoint by kind: ordinary tensors by name, NVFP4 and MXFP8 weights by module path."""

    tensors: dict[str, LazyTensor]
    nvfp4: dict[str, PackedLinear]
    mxfp8: dict[str, ScaledLinear]


def split_quantized(tensors: Tensors, quantization: Any, where: str) -> Split:
    """Find the quantized weights of a checkpoint, of one format or of a mix.

    Args:
        tensors: everything stored.
        quantization: ``quantization_config`` of config.json or ``quantization`` of hf_quant_config.json, or None.

    Activation scales are dropped (activations are not quantized here). KV-cache scales are dropped if they are 1.0.
    Raises CheckpointError for another format, for incomplete groups, for modules that are stored otherwise than the
    configuration lists them, and for KV-cache scales other than 1.0.
    """
    scheme = Scheme() if quantization is None else _find_scheme(quantization, where)
    packed = _find_packed(tensors, scheme.convention)
    scaled = _find_scaled(tensors) if scheme.mxfp8 else {}
    used = {f"{module}.{part}" for module in packed for part in NAMES[packed[module].convention]}
    used |= {f"{module}.{part}" for module in scaled for part in ("weight", *MXFP8_SCALES)}
    ordinary = {name: lazy for name, lazy in tensors.items() if name not in used}
    _refuse_strays(ordinary, scheme, where)
    _check_listed(scheme.listed, packed, scaled, where)
    if quantization is None:
        return Split(ordinary, packed, scaled)
    ordinary = {name: lazy for name, lazy in ordinary.items() if not _ends_with(name, ACTIVATION_SCALES)}
    _check_cache_scales({name: lazy for name, lazy in ordinary.items() if _ends_with(name, CACHE_SCALES)})
    return Split({n: lazy for n, lazy in ordinary.items() if not _ends_with(n, CACHE_SCALES)}, packed, scaled)


def _ends_with(name: str, parts: Iterable[str]) -> bool:
    return name.rpartition(".")[2] in parts


def _find_scheme(quantization: Any, where: str) -> Scheme:
    if not isinstance(quantization, dict):
        raise CheckpointError("the quantization configuration is not a JSON object", where=where)
    if "quant_algo" in quantization:
        return _read_modelopt(quantization, where)
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _read_compressed_tensors(quantization, where)
    if method == "mxfp8":
        _check_block(quantization.get("weight_block_size", [1, mxfp8.BLOCK]), where)
        return Scheme(mxfp8=True)
    raise _unsupported(f"quant_method {method!r}", where)


def _check_block(size: Any, where: str) -> None:
    if size != [1, mxfp8.BLOCK]:
        raise CheckpointError(f"MXFP8 needs weight_block_size [1, {mxfp8.BLOCK}], got {size}", where=where)


def _unsupported(what: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is not a supported quantization",
        where=where,
        fix="use ModelOpt's quant_algo NVFP4, MXFP8 or a mix of them, compressed-tensors' formats "
        f"{CT_FORMAT} and {CT_MXFP8}, quant_method mxfp8, or unquantized weights",
    )


def _read_modelopt(quantization: dict[str, Any], where: str) -> Scheme:
    layers = quantization.get("quantized_layers") or {}
    if not _is_table(layers):
        raise CheckpointError("quantized_layers must map modules to JSON objects", where=where)
    whole = quantization["quant_algo"]
    algorithms = {whole} - {"MIXED_PRECISION"} if layers else {whole}
    algorithms |= {layer.get("quant_algo") for layer in layers.values()}
    for algorithm in sorted(algorithms, key=str):
        if algorithm not in GROUP_SIZES:
            raise _unsupported(f"quant_algo {algorithm!r}", where)
    for algorithm, size in [(whole, quantization.get("group_size"))] + [
        (layer.get("quant_algo"), layer.get("group_size")) for layer in layers.values()
    ]:
        if size is not None and size != GROUP_SIZES.get(algorithm, size):
            raise CheckpointError(f"{algorithm} needs group_size {GROUP_SIZES[algorithm]}, got {size}", where=where)
    listed = {module: layer["quant_algo"] for module, layer in layers.items()}
    return Scheme("modelopt" if "NVFP4" in algorithms else None, "MXFP8" in algorithms, listed)


def _is_table(value: Any) -> bool:
    """Whether ``value`` is a JSON object of JSON objects."""
    return isinstance(value, dict) and all(isinstance(row, dict) for row in value.values())


def _read_compressed_tensors(quantization: dict[str, Any], where: str) -> Scheme:
    groups = quantization.get("config_groups")
    if not groups or not _is_table(groups):
        raise CheckpointError("the quantization configuration has no config_groups", where=where)
    forms = set()
    for name, group in groups.items():
        form = group.get("format") or quantization.get("format")
        if form not in CT_WEIGHTS:
            raise _unsupported(f"format {form!r} of {name}", where)
        weights = group.get("weights") or {}
        wrong = {key: weights.get(key) for key, value in CT_WEIGHTS[form].items() if weights.get(key, value) != value}
        if wrong:
            raise _unsupported(f"{form} with weights {wrong} in {name}", where)
        forms.add(form)
    return Scheme("compressed-tensors" if CT_FORMAT in forms else None, CT_MXFP8 in forms)


def _find_packed(tensors: Tensors, convention: Convention | None) -> dict[str, PackedLinear]:
    """Collect the NVFP4 groups of ``convention``."""
    packed: dict[str, PackedLinear] = {}
    if convention is not None:
        for name, lazy in tensors.items():
            module, _, part = name.rpartition(".")
            if part == NAMES[convention][0] and lazy.dtype == torch.uint8:
                packed[module] = _group(tensors, module, convention)
    return packed


def _find_scaled(tensors: Tensors) -> dict[str, ScaledLinear]:
    """Collect the MXFP8 weights with their scales."""
    scaled: dict[str, ScaledLinear] = {}
    for name, lazy in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or lazy.dtype != torch.float8_e4m3fn:
            continue
        scales = [f"{module}.{scale}" for scale in MXFP8_SCALES if f"{module}.{scale}" in tensors]
        if len(scales) != 1:
            what = "without its scale" if not scales else "with two scales"
            raise CheckpointError(f"MXFP8 weight {what}: {name!r}", where=lazy.where, fix="export it again")
        scaled[module] = ScaledLinear(lazy, tensors[scales[0]])
    return scaled


def _refuse_strays(ordinary: Tensors, scheme: Scheme, where: str) -> None:
    """Refuse a part of any group that is left over."""
    parts = {part for names in NAMES.values() for part in names} - {"weight"} | set(MXFP8_SCALES)
    stray = {name for name in ordinary if _ends_with(name, parts)}
    stray |= {name for name, lazy in ordinary.items() if _is_raw_weight(name, lazy)}
    if stray:
        expected = str(scheme) or "a checkpoint without quantization_config"
        raise CheckpointError(
            f"quantized tensors that do not fit {expected}: {list_some(stray)}",
            where=where,
            fix="check that the quantization configuration belongs to these weights",
        )


def _check_listed(
    listed: Mapping[str, str], packed: Mapping[str, PackedLinear], scaled: Mapping[str, ScaledLinear], where: str
) -> None:
    """Refuse a module that the configuration lists and that is missing or stored in another format."""
    stored = {"NVFP4": packed, "MXFP8": scaled}
    wrong = {f"{module} ({algorithm})" for module, algorithm in listed.items() if module not in stored[algorithm]}
    if wrong:
        raise CheckpointError(
            f"modules that are not stored as quantized_layers lists them: {list_some(wrong)}",
            where=where,
            fix="finish the download, or check that the quantization configuration belongs to these weights",
        )


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
