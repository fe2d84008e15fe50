"""Records of a kernel: the template that a target offers, its emitted source, and the compiled result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmcompile.core.spec import Architecture, TargetSpec


@dataclass(frozen=True)
class Operand:
    """A tensor argument of an operation, as a kernel sees it.

    ``shape`` and ``strides`` (in elements) hold ints or symbol names ("tokens", "batch", "max_blocks", "pages") or
    expressions over them; ``dtype`` is torch's short name, e.g. "bfloat16"; ``layout`` is that of its buffer.
    """

    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    dtype: str
    layout: str = "linear"


@dataclass(frozen=True)
class OpCall:
    """One operation of a plan to find a kernel for: operands by parameter name (None where absent) and attributes."""

    op: str
    operands: dict[str, Operand | None]
    results: tuple[Operand, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """A run-time argument of an emitted kernel.

    ``type`` is Triton's: "*bf16", "*fp32", "*fp8e4nv", "*u8", "*i32", "*i64", "i32". ``value`` says what the launch
    passes: an operand name of the OpCall ("x", "kv_cache"), "result", "result1", "scratch:<name>", or a symbol name.
    """

    name: str
    type: str
    value: str


@dataclass(frozen=True)
class KernelParts:
    """What an emitted text is made of, so that a merged kernel can be made of several.

    Attributes:
        functions: (name, text) of the jit functions, callees first. constants: (name, expression) of the module.
        body: statements of the entry point; it asks for its tile by ``tl.program_id``.
        gated: the body waits for its inputs itself, after it has asked for weights, by ``enter_gate(gate)``.
        prefetch: statements that ask for the weights of a tile (``prefetch_bytes``), before its inputs are there.
    """

    functions: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    body: str
    prefetch: str = ""
    gated: bool = False


@dataclass(frozen=True)
class KernelSource:
    """One emitted kernel: self-contained Triton text whose entry point the module calls ``kernel``.

    Attributes:
        name: readable base name and symbol, e.g. "rms_norm_bf16_576"; an identifier.
        text: the Python source; no reference to anything of mmcompile.
        parameters: run-time arguments, in the order of ``kernel``'s parameters (everything else is baked in).
        grid: three expressions over the symbols, e.g. ("tokens", "9", "1"); cdiv, min and max may be used.
        ledger: mnemonic -> True if the disassembly must hold it, False if it must not (substring match).
        lanes: True if its inline assembly counts on lanes: in tensors [32 * num_warps, 4] row r is thread r, with the
            row's four elements in four registers, in tensors [32 * num_warps] element r is thread r. The compiler
            holds the chosen layouts against this. Triton's interpreter cannot run such a kernel, an emulator can.
        private_shared: (first byte, end) of the dynamic shared memory that inline assembly takes for itself: the
            compiler ends its own before the first byte, and the launch gets all up to the end.
        max_registers: registers a thread that the assembler may use (NVIDIA); None = its own choice.
        parts: the pieces of ``text``; None if it cannot become a stage of a merged kernel.
        replicable: a tile costs so little that every program of a merged kernel may compute it for itself.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    grid: tuple[str, str, str]
    num_warps: int = 4
    num_stages: int = 2
    ledger: dict[str, bool] = field(default_factory=dict)
    lanes: bool = False
    private_shared: tuple[int, int] | None = None
    max_registers: int | None = None
    parts: KernelParts | None = None
    replicable: bool = False

    @property
    def digest(self) -> str:
        """Content hash of everything that decides the binary, 16 hex digits."""
        key: tuple[object, ...] = (
            self.text, [(p.name, p.type) for p in self.parameters], self.num_warps, self.num_stages
        )  # fmt: skip
        if self.max_registers is not None:
            key += (self.max_registers,)
        if self.private_shared is not None:
            key += self.private_shared
        return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Scratch:
    """A temporary buffer between the kernels of one operation: shape over the symbols, dtype by torch's name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class KernelTemplate:
    """A kernel that a target can offer for an operation.

    Attributes:
        name: unique, e.g. "linear_nvfp4_gemm". op: the mm:: operation it implements.
        refuse: None if it can serve the call on this target, else the reason in one clause.
        emit: the sources to launch one after the other (most need one; split-K needs two).
        scratch: temporary buffers shared by those launches.
        max_tokens: largest token count it is meant for (None = any). Select takes, for every range of token counts,
            the first template of the target's list that does not refuse.
        grade: "portable" or "tuned".
        layouts: the weights, by operand name, that it wants in another layout than "linear"; {} where it takes the call
            as it is, or is not worth it. A weight gets the layout if all of its readers want and can read it
            (lower.layouts).
    """

    name: str
    op: str
    refuse: Callable[[OpCall, TargetSpec, Architecture], str | None]
    emit: Callable[[OpCall, TargetSpec, Architecture], tuple[KernelSource, ...]]
    scratch: Callable[[OpCall, TargetSpec], tuple[Scratch, ...]] = lambda call, spec: ()
    max_tokens: int | None = None
    grade: str = "portable"
    layouts: Callable[[OpCall, TargetSpec, Architecture], dict[str, str]] = lambda call, spec, arch: {}


@dataclass(frozen=True)
class CompiledKernel:
    """A binary and what is known of it: ``assembly`` text (ptx or amdgcn), ``binary`` (cubin or hsaco), metadata.

    ``metadata`` holds name (symbol), shared, num_warps, warp_size, global_scratch_size, registers, spills and the
    ledger: counts of notable mnemonics in the disassembly.
    """

    source: KernelSource
    architecture: str
    assembly: str
    binary: bytes
    metadata: dict[str, Any]
