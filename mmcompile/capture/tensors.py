"""A checkpoint in memory: its configuration, its text tools and its tensors, each read only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmcompile.core.errors import CheckpointError, ToolchainError
from mmcompile.core.formats import mxfp8, nvfp4

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is still in its file. ``where`` names the file; ``read`` returns it with this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class PackedLinear:
    """The stored parts of one NVFP4 weight [n, k]; ``convention`` tells how ``global_scale`` is meant."""

    packed: LazyTensor
    scale: LazyTensor
    global_scale: LazyTensor
    convention: nvfp4.Convention

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the weight that the parts encode."""
        rows, half = self.packed.shape
        return rows, half * 2

    def load(self, where: str) -> tuple[Tensor, Tensor, Tensor]:
        """Read and check it (:func:`nvfp4.check_scales`); ``where`` names it in messages.

        Returns: packed uint8 [n, k/2], scale float8_e4m3fn [n, k/16], global scale fp32 [1] or [n], a multiplier.
        """
        packed, scale = self.packed.read(), self.scale.read()
        multiplier = nvfp4.to_multiplier(self.global_scale.read().reshape(-1), self.convention)
        nvfp4.check_scales(packed, scale, multiplier, where)
        return packed, scale, multiplier


@dataclass(frozen=True)
class ScaledLinear:
    """The stored parts of one MXFP8 weight [n, k]: E4M3 values and E8M0 scales (uint8, or torch's float8_e8m0fnu)."""

    values: LazyTensor
    scale: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, k) of the weight that the parts encode."""
        return self.values.shape

    def load(self, where: str) -> tuple[Tensor, Tensor]:
        """Read and check it (:func:`mxfp8.check_parts`); ``where`` names it in messages.

        Returns: values float8_e4m3fn [n, k], scale uint8 [n, k/32].
        """
        values, scale = self.values.read(), self.scale.read()
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        mxfp8.check_parts(values, scale, where)
        return values, scale


@dataclass(frozen=True)
class PackedExperts:
    """The NVFP4 weights [experts, n, k] of a layer, in matrices.

    ``experts``: for every expert the (module path, parts) of the matrices that lie one below the other: gate then up.
    """

    experts: tuple[tuple[tuple[str, PackedLinear], ...], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, n, k) of the weight that the parts encode."""
        matrices = [parts.shape for _, parts in self.experts[0]]
        return len(self.experts), sum(rows for rows, _ in matrices), matrices[0][1]

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Read and check every matrix, each straight to its place, so that memory holds the result and one matrix.

        Returns: packed uint8 [experts, n, k/2], scale float8_e4m3fn [experts, n, k/16], global scale fp32 [experts, n],
        a multiplier: gate and up keep their own, so that nothing is requantized
        (:func:`nvfp4.share_global_scale` brings them to one).
        """
        count, rows, columns = self.shape
        packed = torch.empty(count, rows, columns // 2, dtype=torch.uint8)
        scale = torch.empty(count, rows, columns // nvfp4.BLOCK, dtype=torch.float8_e4m3fn)
        multiplier = torch.empty(count, rows)
        for i, matrices in enumerate(self.experts):
            begin = 0
            for module, parts in matrices:
                place = slice(begin, begin + parts.shape[0])
                loaded = parts.load(f"{module} in {parts.packed.where}")
                packed[i, place], scale[i, place], multiplier[i, place] = loaded
                begin = place.stop
        return packed, scale, multiplier


@dataclass
class Checkpoint:
    """Named tensors of one model with its Hugging Face style configuration.

    Attributes:
        where: the directory or file it came from.
        config: the fields of Hugging Face's config.json.
        tensors: every ordinary tensor by its Hugging Face name.
        nvfp4: every NVFP4 weight by module path (``model.layers.0.mlp.up_proj``); its parts are not in ``tensors``.
        mxfp8: every MXFP8 weight likewise.
        experts: every stack of NVFP4 experts by the name of the parameter that it is in the model, once they are
            stacked (:func:`mmcompile.capture.experts.stack_experts`).
        left_out: number of stored tensors by part (vision tower, drafts) that are not of the text decoder, likewise.
        chat_template: a Jinja template, or None.
        special_tokens: text by role: ``bos_token``, ``eos_token``, ...
        build_tokenizer: makes the tokenizer; raises CheckpointError if there is none.
    """

    where: str
    config: dict[str, Any]
    tensors: Mapping[str, LazyTensor]
    build_tokenizer: Callable[[], Tokenizer]
    nvfp4: Mapping[str, PackedLinear] = field(default_factory=dict)
    mxfp8: Mapping[str, ScaledLinear] = field(default_factory=dict)
    experts: Mapping[str, PackedExperts] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the ordinary tensors, sorted."""
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``, without reading it."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor ``name``, without reading it."""
        return self._find(name).dtype

    def load(self, name: str) -> Tensor:
        """Read one tensor. Raises CheckpointError if it is absent or holds NaN or infinity."""
        lazy = self._find(name)
        tensor = lazy.read()
        values = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise CheckpointError(
                f"tensor {name!r} holds NaN or infinity",
                where=lazy.where,
                fix="download or export the checkpoint again",
            )
        return tensor

    def load_nvfp4(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """Read one NVFP4 weight [n, k] and check its scales (:func:`nvfp4.check_scales`).

        Returns: packed uint8 [n, k/2], scale float8_e4m3fn [n, k/16], global scale fp32 [n], a multiplier.
        """
        if module not in self.nvfp4:
            raise CheckpointError(f"module {module!r} has no NVFP4 weight", where=self.where)
        parts = self.nvfp4[module]
        packed, scale, multiplier = parts.load(f"{module} in {parts.packed.where}")
        return packed, scale, multiplier.expand(packed.shape[0]).contiguous()

    def load_mxfp8(self, module: str) -> tuple[Tensor, Tensor]:
        """Read one MXFP8 weight [n, k] and check it: values float8_e4m3fn [n, k], scale uint8 [n, k/32]."""
        if module not in self.mxfp8:
            raise CheckpointError(f"module {module!r} has no MXFP8 weight", where=self.where)
        parts = self.mxfp8[module]
        return parts.load(f"{module} in {parts.values.where}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights. Raises CheckpointError if none did."""
        return self.build_tokenizer()

    def _find(self, name: str) -> LazyTensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing", where=self.where)
        return self.tensors[name]


def list_some(names: list[str] | set[str], limit: int = 5) -> str:
    """The first ``limit`` names in order, quoted, and how many more there are."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(repr(name) for name in ordered[:limit]) + rest


def require_package(package: str, extra: str) -> Any:
    """Import an optional package, or raise ToolchainError that names the extra to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        advice = f'run pip install "mmcompile[{extra}]"'
        raise ToolchainError(f"the package {package!r} is not installed", fix=advice) from error
