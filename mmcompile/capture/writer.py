"""Write a checkpoint as engines read it: ModelOpt's mix of NVFP4 and MXFP8, compressed-tensors, or MiniMax's MXFP8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mmcompile.capture.quantized import CT_FORMAT, CT_MXFP8, CT_WEIGHTS, GROUP_SIZES, NAMES
from mmcompile.capture.shards import write_shards
from mmcompile.capture.tensors import Checkpoint, LazyTensor, PackedLinear, ScaledLinear
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import nvfp4

Layout = Literal["modelopt", "compressed-tensors", "minimax"]

# Matrices of one expert that engines multiply as one and that therefore share a global scale: gate, up.
_FUSED = {"w1": "w3", "gate_proj": "up_proj"}


def write_checkpoint(
    directory: Path, checkpoint: Checkpoint, layout: Layout | str = "modelopt", *, shard_bytes: int = 5_000_000_000
) -> list[Path]:
    """Write ``checkpoint`` to ``directory``: safetensors, config.json, and ModelOpt's hf_quant_config.json.

    Args:
        checkpoint: as it was opened, experts not stacked. Tensors are read, written and dropped one by one.
        layout: "modelopt" (``weight``, ``weight_scale``, ``weight_scale_2``, ``input_scale`` 1.0, and for MXFP8
            ``weight_scale_inv``), "compressed-tensors" (``weight_packed``, ``weight_scale``, ``weight_global_scale``,
            and for MXFP8 ``weight_scale``), or "minimax" (quant_method mxfp8; no NVFP4 weights).
        shard_bytes: see :func:`mmcompile.capture.shards.write_shards`.

    Gate and up of one expert get one global scale, the larger of theirs (:func:`nvfp4.share_global_scale`; nothing
    changes if they are equal). Returns the weight files. Raises CheckpointError for weights that no layout can hold.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    if directory.exists() and directory.resolve() == Path(checkpoint.where).resolve():
        raise CheckpointError("a checkpoint cannot be written over itself", where=str(directory))
    if checkpoint.experts:
        raise CheckpointError(
            "stacked experts cannot be written, each needs tensors of its own", where=checkpoint.where
        )
    if layout == "minimax" and checkpoint.nvfp4:
        raise CheckpointError("MiniMax's MXFP8 layout holds no NVFP4 weights", where=checkpoint.where)
    tensors = dict(checkpoint.tensors)
    for module, packed in checkpoint.nvfp4.items():
        tensors |= {f"{module}.{part}": lazy for part, lazy in _store_nvfp4(checkpoint, module, packed, layout)}
    for module, scaled in checkpoint.mxfp8.items():
        tensors |= {f"{module}.{part}": lazy for part, lazy in _store_mxfp8(scaled, layout)}
    directory.mkdir(parents=True, exist_ok=True)
    files = write_shards(directory, dict(sorted(tensors.items())), shard_bytes)
    quantization = _describe(checkpoint, layout)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    _write_json(directory / "config.json", config | ({"quantization_config": quantization} if quantization else {}))
    if layout == "modelopt" and quantization:
        record = {key: value for key, value in quantization.items() if key != "quant_method"}
        _write_json(directory / "hf_quant_config.json", {"producer": {"name": "mmcompile"}, "quantization": record})
    return files


def hold(tensor: Tensor) -> LazyTensor:
    """A tensor in memory as a stored one."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, "memory", lambda: tensor)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _store_nvfp4(
    checkpoint: Checkpoint, module: str, packed: PackedLinear, layout: str
) -> Iterator[tuple[str, LazyTensor]]:
    names = NAMES["modelopt" if layout == "modelopt" else "compressed-tensors"]
    multiplier = _read_multiplier(module, packed)
    shared = max([multiplier, *(_read_multiplier(m, checkpoint.nvfp4[m]) for m in _find_fused(checkpoint, module))])
    yield names[0], packed.packed
    yield names[1], packed.scale if shared == multiplier else _rescale(packed.scale, multiplier, shared)
    if layout == "modelopt":
        yield names[2], hold(torch.tensor(shared))
        yield "input_scale", hold(torch.tensor(1.0))
    elif packed.convention == layout and shared == multiplier:
        yield names[2], packed.global_scale
    else:
        yield names[2], hold(1.0 / torch.tensor([shared]))


def _read_multiplier(module: str, packed: PackedLinear) -> float:
    """The one global multiplier of a module, an fp32 value."""
    values = nvfp4.to_multiplier(packed.global_scale.read().reshape(-1), packed.convention)
    if bool((values != values[0]).any()):
        what = f"the rows of {module!r} have several global scales, and a checkpoint holds one a module"
        raise CheckpointError(what, where=packed.packed.where)
    return float(values[0])


def _find_fused(checkpoint: Checkpoint, module: str) -> list[str]:
    """The matrix of the same expert that must share the global scale of ``module``, if there is one."""
    parent, _, leaf = module.rpartition(".")
    other = {**_FUSED, **{up: gate for gate, up in _FUSED.items()}}.get(leaf)
    partner = f"{parent}.{other}"
    return [partner] if ".experts." in module and other and partner in checkpoint.nvfp4 else []


def _rescale(scale: LazyTensor, multiplier: float, shared: float) -> LazyTensor:
    def read() -> Tensor:
        rows = torch.full((scale.shape[0],), multiplier)
        return nvfp4.share_global_scale(scale.read(), rows, torch.tensor(shared))[0]

    return LazyTensor(scale.shape, scale.dtype, scale.where, read)


def _store_mxfp8(scaled: ScaledLinear, layout: str) -> Iterator[tuple[str, LazyTensor]]:
    yield "weight", scaled.values
    scale = scaled.scale
    bytes_only = LazyTensor(scale.shape, torch.uint8, scale.where, lambda: scale.read().view(torch.uint8))
    yield "weight_scale" if layout == "compressed-tensors" else "weight_scale_inv", bytes_only


def _describe(checkpoint: Checkpoint, layout: str) -> dict[str, Any]:
    """The quantization configuration, empty if nothing is quantized."""
    stored = {"NVFP4": sorted(checkpoint.nvfp4), "MXFP8": sorted(checkpoint.mxfp8)}
    kinds = [kind for kind, modules in stored.items() if modules]
    if not kinds:
        return {}
    rest = sorted(n.removesuffix(".weight") for n, lazy in checkpoint.tensors.items() if len(lazy.shape) == 2)
    if layout == "minimax":
        return {"quant_method": "mxfp8", "weight_block_size": [1, GROUP_SIZES["MXFP8"]], "ignored_layers": rest}
    if layout == "modelopt":
        layers = {m: {"quant_algo": kind, "group_size": GROUP_SIZES[kind]} for kind in kinds for m in stored[kind]}
        return {
            "quant_method": "modelopt",
            "quant_algo": kinds[0] if len(kinds) == 1 else "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": rest,
            "quantized_layers": layers,
        }
    forms = {"NVFP4": CT_FORMAT, "MXFP8": CT_MXFP8}
    groups = {}
    for number, kind in enumerate(kinds):
        others = [module for other in kinds if other != kind for module in stored[other]] + rest
        dtype = "torch.float8_e4m3fn" if kind == "NVFP4" else "torch.uint8"
        groups[f"group_{number}"] = {
            "format": forms[kind],
            "targets": _name_targets(stored[kind], others),
            "weights": CT_WEIGHTS[forms[kind]] | {"scale_dtype": dtype, "dynamic": False},
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms[kinds[0]] if len(kinds) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": rest,
    }


def _name_targets(modules: list[str], others: Iterable[str]) -> list[str]:
    """Module names with every number free where no other module has the same name but for numbers, else exact ones."""
    taken = {_free_numbers(other) for other in others}
    patterns = {module: _free_numbers(module) for module in modules}
    return sorted({module if pattern in taken else f"re:{pattern}$" for module, pattern in patterns.items()})


def _free_numbers(module: str) -> str:
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in module.split("."))
