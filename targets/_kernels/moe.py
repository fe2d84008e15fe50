"""Mixture of experts, bf16 or NVFP4: by pairs where tokens are few, by sorted pairs as a grouped GEMM otherwise.

Few tokens: one program for each pair and tile of weight rows; the first pair of an expert takes all its tokens, so the
weights of an expert are read once and those of an unused expert never. Many: a counting sort on the device, then tiles
of pairs of one expert. Both end with a weighted sum in the order of the places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ELEMENT_SIZES,
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
    symbol_parameters,
)
from mmcompile.targets._kernels.linear import SPLIT, Blocks, gemm_blocks, mma_ledger, skinny_blocks, skinny_rows
from mmcompile.targets._kernels.linear_nvfp4 import BLOCK, nvfp4_intrinsics
from mmcompile.targets._kernels.moe_tiles import (
    tile_combine,
    tile_group_down,
    tile_group_gate_up,
    tile_slot_down,
    tile_slot_gate_up,
    tile_sort_pairs,
)

LARGEST_TOP_K = 32
LARGEST_EXPERTS = 1024
SLOT_TOKENS = 16
NARROW_TOKENS = 256
_ACTIVATIONS = ("swiglu", "swiglu_oai")
_WEIGHT_DTYPES = ("uint8", "float8_e4m3fn", "float32")

Constants = dict[str, int | float | bool | str]


@dataclass(frozen=True)
class Stack:
    """One projection of all experts: its operand names, weight rows and k of an expert."""

    names: tuple[str, ...]
    rows: int
    k: int

    def constants(self, call: OpCall) -> Constants:
        """Strides between rows and between experts, in elements."""
        weight, scale, multiplier = (*(need(call, name) for name in self.names), None, None)[:3]
        strides: Constants = {"WEIGHT_STRIDE": int(weight.strides[1]), "WEIGHT_EXPERT": int(weight.strides[0])}
        strides |= {"SCALE_STRIDE": int(scale.strides[1]) if scale else 0}
        strides |= {"SCALE_EXPERT": int(scale.strides[0]) if scale else 0}
        return strides | {"GLOBAL_EXPERT": int(multiplier.strides[0]) if multiplier else 0}

    def spell(self) -> list[str]:
        """The weight, scale and global scale arguments of a tile."""
        return [*self.names, "None", "None"][:3]


def list_stacks(call: OpCall) -> tuple[Stack, Stack]:
    """(gate and up, down)."""
    parts = ("_packed", "_scale", "_global_scale") if call.op == "moe_nvfp4" else ("",)
    k = int(need(call, "x").shape[1])
    rows = int(need(call, f"gate_up{parts[0]}").shape[1])
    gate_up, down = (tuple(f"{base}{part}" for part in parts) for base in ("gate_up", "down"))
    return Stack(gate_up, rows, k), Stack(down, k, rows // 2)


def count_experts(call: OpCall) -> int:
    """Experts of the layer."""
    return int(need(call, list_stacks(call)[0].names[0]).shape[0])


def count_places(call: OpCall) -> int:
    """Experts that a token chooses."""
    return int(need(call, "experts").shape[1])


def _refuse_choice(call: OpCall) -> str | None:
    """The reason why the operands that say who goes where cannot be served, or None."""
    experts, weights = need(call, "experts"), need(call, "weights")
    if experts.dtype not in ("int32", "int64") or weights.dtype != "float32":
        return f"experts are {experts.dtype} and weights {weights.dtype}, not int32 or int64 and float32"
    if len(experts.shape) != 2 or len(weights.shape) != 2:
        return "experts and weights must have two dimensions"
    if not isinstance(experts.shape[1], int) or not 1 <= experts.shape[1] <= LARGEST_TOP_K:
        return f"{experts.shape[1]} experts a token, not from 1 to {LARGEST_TOP_K}"
    for name, operand in (("experts", experts), ("weights", weights)):
        if operand.strides[1] != 1 or not isinstance(operand.strides[0], int):
            return f"rows of {name} must be contiguous, at a fixed distance"
    return None


def _refuse_stack(call: OpCall, stack: Stack) -> str | None:
    """The reason why the weights of one projection cannot be served, or None."""
    operands = [need(call, name) for name in stack.names]
    dtypes = _WEIGHT_DTYPES if len(operands) == 3 else (need(call, "x").dtype,)
    for name, operand, dtype in zip(stack.names, operands, dtypes, strict=True):
        if operand.dtype != dtype:
            return f"{name} is {operand.dtype}, not {dtype}"
        if operand.strides[-1] != 1 or not all(isinstance(n, int) for n in (*operand.shape, *operand.strides)):
            return f"{name} must have fixed sizes and the last stride 1"
    if len(operands) == 3 and stack.k % BLOCK:
        return f"k = {stack.k} of {stack.names[0]} is not a multiple of {BLOCK}"
    if len(operands) == 3 and any(int(stride) % 4 for stride in operands[0].strides[:2]):
        return f"rows of {stack.names[0]} must start at multiples of 4 bytes"
    return None


def refuse_moe(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """The reason why a call cannot be served, or None; whatever the layouts of its weights."""
    reason = refuse_rows(call, "x", "residual") or _refuse_choice(call)
    if reason is not None:
        return reason
    x, residual = need(call, "x"), call.operands.get("residual")
    if residual is not None and residual.dtype != x.dtype:
        return f"residual is {residual.dtype} and x {x.dtype}"
    if call.attributes.get("activation", "swiglu") not in _ACTIVATIONS:
        return f"activation {call.attributes['activation']} is not one of {', '.join(_ACTIVATIONS)}"
    if count_experts(call) > LARGEST_EXPERTS:
        return f"{count_experts(call)} experts, above {LARGEST_EXPERTS}"
    return next((r for stack in list_stacks(call) if (r := _refuse_stack(call, stack)) is not None), None)


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_moe(call, spec, arch)
    if reason is None:
        layouts = {name: need(call, name).layout for stack in list_stacks(call) for name in stack.names}
        return next((f"{name} has the layout {tag}" for name, tag in layouts.items() if tag != "linear"), None)
    return reason


def scratch_slots(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    """Activations and outputs of every pair."""
    (_, down), x = list_stacks(call), need(call, "x")
    pairs = f"{x.shape[0]} * {count_places(call)}"
    return (Scratch("hidden", (pairs, down.k), x.dtype), Scratch("outputs", (pairs, down.rows), x.dtype))


def scratch_groups(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    """As for pairs, and the sorted pairs with each expert's beginning."""
    pairs = f"{need(call, 'x').shape[0]} * {count_places(call)}"
    sort = (Scratch("pairs", (pairs,), "int32"), Scratch("offsets", (count_experts(call) + 1,), "int32"))
    return (*scratch_slots(call, spec), *sort)


def activation_constants(call: OpCall) -> Constants:
    """Which activation it is, and its numbers."""
    oai = call.attributes.get("activation", "swiglu") == "swiglu_oai"
    values = {name: float(call.attributes.get(name, 0.0)) if oai else 0.0 for name in ("alpha", "limit")}
    return {"OAI": oai, "ALPHA": values["alpha"], "LIMIT": values["limit"]}


def label_moe(call: OpCall) -> str:
    """Dtype, places and experts, for kernel names."""
    return f"{short_dtype(need(call, 'x').dtype)}_{count_places(call)}of{count_experts(call)}"


def scratch_pointer(name: str, dtype: str) -> Parameter:
    """A pointer parameter for a scratch buffer."""
    return Parameter(name, f"*{short_dtype(dtype)}", f"scratch:{name}")


@dataclass(frozen=True)
class Projection:
    """One launch that multiplies: its tile function, weights, tile sizes and run-time arguments by spelling."""

    tile: Any
    stack: Stack
    blocks: Blocks
    parameters: tuple[Parameter, ...]
    constants: Constants
    grid: Callable[[int], str]
    kind: str


def _emit_projection(call: OpCall, spec: TargetSpec, arch: Architecture, made: Projection) -> KernelSource:
    """The source of one projection; its arguments are those of the tile function between ``tile`` and ``tokens``."""
    x, stack, blocks = need(call, "x"), made.stack, made.blocks
    tiles_n = ceil_div(stack.rows, blocks.n)
    names = [parameter.name for parameter in made.parameters]
    constants = made.constants | stack.constants(call) | {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}
    constants |= {"BLOCK_K": blocks.k, "TILES_N": tiles_n} | ({"SPLIT": SPLIT} if blocks.skinny else {})
    intrinsics: Mapping[str, Any] = {}
    ledger = mma_ledger(x.dtype, blocks, spec, arch)
    if call.op == "moe_nvfp4":
        intrinsics, promised = nvfp4_intrinsics(arch, x.dtype)
        ledger = ledger | promised
    arguments = ["tl.program_id(0)", *names[:-1], *stack.spell(), names[-1], str(x.shape[0])]
    spelled = ", ".join([*arguments, *(f"{name}={name}" for name in constants)])
    weights = [pointer(name, need(call, name)) for name in stack.names]
    return emit_kernel(
        name=kernel_name(f"{call.op}_{made.kind}", label_moe(call), f"{stack.rows}x{stack.k}"),
        title=f"{call.op}, {made.kind}: experts [{stack.rows}, {stack.k}] for {x.shape[0]} tokens.",
        tiles=[made.tile], constants=constants,
        parameters=[*made.parameters[:-1], *weights, made.parameters[-1], *symbol_parameters(x.shape[0])],
        body=f"{made.tile.__name__}({spelled})", grid=(made.grid(tiles_n), "1", "1"), intrinsics=intrinsics,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages, ledger=ledger,
    )


def emit_combine(call: OpCall, early: Architecture | None = None) -> KernelSource:
    """The source of the weighted sum; ``early``: see ``emit_kernel``."""
    x, residual, result = need(call, "x"), call.operands.get("residual"), call.results[0]
    width = int(x.shape[1])
    block = min(next_power_of_two(width), 1024)
    constants: Constants = {
        "WIDTH": width, "TOP_K": count_places(call), "CHOICE_STRIDE": row_stride(need(call, "experts")),
        "FACTOR_STRIDE": row_stride(need(call, "weights")),
        "RESIDUAL_STRIDE": 0 if residual is None else row_stride(residual), "RESULT_STRIDE": row_stride(result),
        "BLOCK": block,
    }  # fmt: skip
    names = ["experts", "weights", *(["residual"] if is_present(call, "residual") else [])]
    spelled = "residual" if is_present(call, "residual") else "None"
    return emit_kernel(
        name=kernel_name("moe_combine", label_moe(call), width, "residual" if residual is not None else ""),
        title="The weighted sum of the experts' outputs of one token.", tiles=[tile_combine], constants=constants,
        parameters=[scratch_pointer("outputs", x.dtype), *(pointer(name, need(call, name)) for name in names),
                    pointer("result", result)],
        body=f"tile_combine(tl.program_id(0), tl.program_id(1), outputs, experts, weights, {spelled}, result, "
             f"{', '.join(constants)})",
        grid=(str(x.shape[0]), str(ceil_div(width, block)), "1"), num_warps=4, early=early,
    )


def emit_sort(call: OpCall, early: Architecture | None = None) -> KernelSource:
    """The source of the sort; ``early``: see ``emit_kernel``."""
    experts, tokens = need(call, "experts"), need(call, "x").shape[0]
    constants: Constants = {"STRIDE": row_stride(experts), "TOP_K": count_places(call),
                            "EXPERTS": count_experts(call), "BLOCK": 1024}  # fmt: skip
    return emit_kernel(
        name=kernel_name("moe_sort", short_dtype(experts.dtype), f"{count_places(call)}of{count_experts(call)}"),
        title="Sort the pairs of token and place by expert.", tiles=[tile_sort_pairs], constants=constants,
        parameters=[pointer("experts", experts), scratch_pointer("pairs", "int32"),
                    scratch_pointer("offsets", "int32"), *symbol_parameters(tokens)],
        body=f"tile_sort_pairs(tl.program_id(0), experts, pairs, offsets, {tokens}, {', '.join(constants)})",
        grid=(str(count_experts(call)), "1", "1"), num_warps=4, early=early,
    )


def _slot_blocks(call: OpCall, stack: Stack, spec: TargetSpec) -> Blocks:
    """As a skinny linear layer of the rows of one token's experts."""
    size = ELEMENT_SIZES[need(call, "x").dtype]
    return skinny_blocks(SLOT_TOKENS, skinny_rows(stack.rows * count_places(call), spec), stack.k, size, spec)


def _emit_slots(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """Two projections with one program for each pair and tile of rows, and the sum."""
    x, experts, top_k, stacks = need(call, "x"), need(call, "experts"), count_places(call), list_stacks(call)
    choice: Constants = {"CHOICE_STRIDE": row_stride(experts), "TOP_K": top_k, "PLACES": next_power_of_two(top_k)}
    hidden, outputs = scratch_pointer("hidden", x.dtype), scratch_pointer("outputs", x.dtype)
    chosen = pointer("experts", experts)

    def grid(tiles_n: int) -> str:
        return f"{x.shape[0]} * {top_k * tiles_n}"

    first = Projection(
        tile_slot_gate_up, stacks[0], _slot_blocks(call, stacks[0], spec), (pointer("x", x), chosen, hidden),
        {"N": stacks[1].k, "K": stacks[0].k, "X_STRIDE": row_stride(x), **choice, **activation_constants(call)},
        grid, "slot_gate_up",
    )  # fmt: skip
    second = Projection(
        tile_slot_down, stacks[1], _slot_blocks(call, stacks[1], spec), (hidden, chosen, outputs),
        {"N": stacks[1].rows, "K": stacks[1].k, **choice}, grid, "slot_down",
    )  # fmt: skip
    return (*(_emit_projection(call, spec, arch, made) for made in (first, second)), emit_combine(call))


def _group_blocks(call: OpCall, stack: Stack, tokens: int, spec: TargetSpec) -> Blocks:
    """A GEMM tile; of 16 pairs by 64 rows where experts have few tokens."""
    blocks = gemm_blocks(stack.rows, stack.k, ELEMENT_SIZES[need(call, "x").dtype], spec)
    return replace(blocks, m=tokens, n=min(blocks.n, 64)) if tokens < blocks.m else blocks


def _emit_groups(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """The sort, two grouped GEMMs with tiles of ``tokens`` pairs, and the sum."""
    x, top_k, count, stacks = need(call, "x"), count_places(call), count_experts(call), list_stacks(call)
    groups: Constants = {"TOP_K": top_k, "EXPERTS": count, "BLOCK_E": next_power_of_two(count)}
    hidden, outputs = scratch_pointer("hidden", x.dtype), scratch_pointer("outputs", x.dtype)
    sorted_pairs = (scratch_pointer("pairs", "int32"), scratch_pointer("offsets", "int32"))

    def grid(tiles_n: int) -> str:
        """Every expert in use ends with at most one tile that is not full."""
        pairs = f"{x.shape[0]} * {top_k}"
        return f"min({pairs}, cdiv({pairs}, {tokens}) + {count}) * {tiles_n}"

    first = Projection(
        tile_group_gate_up, stacks[0], _group_blocks(call, stacks[0], tokens, spec),
        (pointer("x", x), *sorted_pairs, hidden),
        {"N": stacks[1].k, "K": stacks[0].k, "X_STRIDE": row_stride(x), **groups, **activation_constants(call)},
        grid, f"group{tokens}_gate_up",
    )  # fmt: skip
    second = Projection(
        tile_group_down, stacks[1], _group_blocks(call, stacks[1], tokens, spec), (hidden, *sorted_pairs, outputs),
        {"N": stacks[1].rows, "K": stacks[1].k, **groups}, grid, f"group{tokens}_down",
    )  # fmt: skip
    projections = (_emit_projection(call, spec, arch, made) for made in (first, second))
    return (emit_sort(call), *projections, emit_combine(call))


def _make(op: str) -> tuple[KernelTemplate, ...]:
    return (
        KernelTemplate(f"{op}_slots", op, _refuse, _emit_slots, scratch_slots, max_tokens=SLOT_TOKENS),
        KernelTemplate(f"{op}_group16", op, _refuse, partial(_emit_groups, 16), scratch_groups,
                       max_tokens=NARROW_TOKENS),
        KernelTemplate(f"{op}_group64", op, _refuse, partial(_emit_groups, 64), scratch_groups),
    )


TEMPLATES: tuple[KernelTemplate, ...] = (*_make("moe_nvfp4"), *_make("moe"))
