"""Tuned mixture of experts over NVFP4 weights in fragment order: columns of an mma for few tokens, a grouped GEMM."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmcompile.core.formats.nvfp4_fragments import LAYOUTS, refuse_shape
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    row_stride,
    stage_warps,
    symbol_parameters,
)
from mmcompile.targets._kernels.linear import Blocks, mma_ledger
from mmcompile.targets._kernels.moe import (
    SLOT_TOKENS,
    Stack,
    activation_constants,
    count_experts,
    count_places,
    emit_combine,
    emit_sort,
    label_moe,
    list_stacks,
    refuse_moe,
    scratch_groups,
    scratch_pointer,
    scratch_slots,
)
from mmcompile.targets._tuned.fragments_gemm import decode_constants
from mmcompile.targets._tuned.linear_configs import Config, choose_fragments
from mmcompile.targets._tuned.linear_fragments import refuse_lanes
from mmcompile.targets._tuned.linear_ptx import hold_loads, multiply_fragments
from mmcompile.targets._tuned.moe_gemm import tile_group_fragments_down, tile_group_fragments_gate_up
from mmcompile.targets._tuned.moe_lanes import (
    tile_group_lanes_down,
    tile_group_lanes_gate_up,
    tile_only_token_down,
    tile_slot_lanes_down,
    tile_slot_lanes_gate_up,
)

GROUPS = 2
"""Groups of 8 sorted pairs, the columns of an mma, for tokens beyond those that slots serve."""
_ROUTE = 16  # words of a slot's route
_PLACES = 8  # columns of an mma
_LANE_PAIRS, _NARROW_PAIRS = 8, 48  # an expert on average, of which few experts have more than a tile of 16 or of 64
_LANE_TOKENS = (512, 256, 128, 64, 32)
_NARROW_TOKENS = (4096, 2048, 1024, 512, 256, 128)


def find_bit() -> str:
    """$0: the position in word $1 of the set bit number $2, by halving; anything if it has no such bit."""
    steps = (
        f"and.b32 part, word, {(1 << size) - 1:#x}; popc.b32 count, part; setp.ge.s32 beyond, left, count; "
        f"@beyond sub.s32 left, left, count; @beyond shr.u32 word, word, {size}; @beyond add.s32 $0, $0, {size};"
        for size in (16, 8, 4, 2, 1)
    )
    return (
        "{ .reg .b32 word, left, part, count; .reg .pred beyond; mov.b32 word, $1; mov.b32 left, $2; mov.b32 $0, 0; "
        f"{' '.join(steps)} }}"
    )


@dataclass(frozen=True)
class Projection:
    """A launch that multiplies: what its tile takes beside weights, by name, and its grid with {} for tiles of rows.

    gated: it is that of gate and up, and ends with the activation.
    """

    tile: Any
    kind: str
    stack: Stack
    gated: bool
    grid: str
    parameters: tuple[Parameter, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How a projection is cut: weight rows a program, warps, stages; and what the disassembly must hold."""

    rows: int
    warps: int
    stages: int
    ledger: dict[str, bool]


def _emit(call: OpCall, arch: Architecture, made: Projection, shape: Shape, own: dict[str, Any]) -> KernelSource:
    """The source of a projection; what its tile function takes is found by name."""
    x, stack, tiles_n = need(call, "x"), made.stack, ceil_div(made.stack.rows, shape.rows)
    weights = dict(zip(("weight", "scale", "global_scale"), stack.names, strict=True))
    constants = made.constants | own | {
        "N": stack.rows // 2 if made.gated else stack.rows,
        "K": stack.k,
        "TILES_N": tiles_n,
        "GLOBAL_EXPERT": int(need(call, stack.names[2]).strides[0]),
    }
    names = list(inspect.signature(made.tile.fn).parameters)
    constants = {name: value for name, value in constants.items() if name in names}
    given = weights | {p.name: p.name for p in made.parameters} | {name: name for name in constants}
    given |= {"tile": "tl.program_id(0)", "tokens": str(x.shape[0])}
    spelled = ", ".join(given.get(name, "None") for name in names)
    return emit_kernel(
        name=kernel_name(f"{call.op}_{made.kind}", label_moe(call), f"{stack.rows}x{stack.k}"),
        title=f"{call.op}, {made.kind}: experts [{stack.rows}, {stack.k}] in fragment order for {x.shape[0]} tokens.",
        tiles=[made.tile],
        constants=constants,
        parameters=[
            *made.parameters,
            *(pointer(name, need(call, name)) for name in stack.names),
            *symbol_parameters(x.shape[0]),
        ],
        body=f"{made.tile.__name__}({spelled})",
        grid=(made.grid.format(tiles_n), "1", "1"),
        num_warps=shape.warps,
        num_stages=shape.stages,
        ledger=shape.ledger,
        early=arch,
    )


def _emit_lanes(call: OpCall, arch: Architecture, made: Projection, config: Config, groups: int = 1) -> KernelSource:
    """A projection by columns of the mma for 8 * groups pairs."""
    chunks = [multiply_fragments(need(call, "x").dtype, chunk, groups) for chunk in range(4)]
    # With one warp the epilogue's tensors [32, 4] would look like tensors of lanes, whose layout is held to the rule.
    warps = max(2, stage_warps(call, config.warps))
    own = {
        "CHUNKS": (*(text for text, _ in chunks), chunks[0][1]),
        "GROUPS": groups,
        "WARPS": warps,
        "HOLD": config.hold,
        "BARRIER": repr(hold_loads()),
        "PAIRED": config.paired,
    }
    shape = Shape(32 if made.gated or config.paired else 16, warps, 1, {"HMMA.16816": True})
    return replace(_emit(call, arch, made, shape, own), lanes=True, max_registers=config.max_registers)


def _choose(call: OpCall, stack: Stack, gated: bool, groups: int, spec: TargetSpec) -> Config:
    """As a linear layer of the rows of one token's experts."""
    return choose_fragments(stack.rows * count_places(call), stack.k, groups, gated, spec.units)


def emit_slots(call: OpCall, arch: Architecture, only: bool, first: Config, second: Config) -> tuple[KernelSource, ...]:
    """Two projections, a program for each pair and tile of rows, and the sum; the ``only`` token's is in the second.

    first, second: how gate and up are cut, and down.
    """
    x, experts, places, (gate_up, down) = need(call, "x"), need(call, "experts"), count_places(call), list_stacks(call)
    hidden, routes = scratch_pointer("hidden", x.dtype), scratch_pointer("routes", "int32")
    chosen, grid = pointer("experts", experts), f"{x.shape[0]} * {places} * {{}}"
    constants = {
        "X_STRIDE": row_stride(x),
        "CHOICE_STRIDE": row_stride(experts),
        "TOP_K": places,
        "WORDS": ceil_div(SLOT_TOKENS * places, 32),
        "FIND": repr(find_bit()),
    } | activation_constants(call)
    made = Projection(tile_slot_lanes_gate_up, "slot_lanes_gate_up", gate_up, True, grid,
                      (pointer("x", x), chosen, hidden, routes), constants)  # fmt: skip
    source = _emit_lanes(call, arch, made, first)
    if only:
        names = ["weights", *(["residual"] if is_present(call, "residual") else [])]
        parameters = (hidden, chosen, *(pointer(n, need(call, n)) for n in names), pointer("result", call.results[0]))
        made = Projection(tile_only_token_down, "only_token_down", down, False, "{}", parameters, {"TOP_K": places})
        return source, _emit_lanes(call, arch, made, replace(second, paired=False))
    made = Projection(tile_slot_lanes_down, "slot_lanes_down", down, False, grid,
                      (hidden, routes, scratch_pointer("outputs", x.dtype)), {})  # fmt: skip
    return source, _emit_lanes(call, arch, made, second), emit_combine(call, arch)


def _emit_slots(only: bool, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """In the configurations of linear layers of as many rows; the only token's experts are one after the other in K."""
    (gate_up, down), places = list_stacks(call), count_places(call)
    second = _choose(call, down, False, 1, spec)
    if only:
        second = choose_fragments(down.rows, down.k * places, 1, False, spec.units)
    return emit_slots(call, arch, only, _choose(call, gate_up, True, 1, spec), second)


def _list_groups(call: OpCall, kind: str, tiles: tuple[Any, Any], columns: int) -> tuple[Projection, Projection]:
    """The two projections of sorted pairs, ``columns`` of one expert a program."""
    x, places, experts, (gate_up, down) = need(call, "x"), count_places(call), count_experts(call), list_stacks(call)
    hidden, outputs = scratch_pointer("hidden", x.dtype), scratch_pointer("outputs", x.dtype)
    order = (scratch_pointer("pairs", "int32"), scratch_pointer("offsets", "int32"))
    pairs = f"{x.shape[0]} * {places}"
    grid = f"min({pairs}, cdiv({pairs}, {columns}) + {experts}) * {{}}"  # an expert has one tile that is not full
    constants = {"TOP_K": places, "EXPERTS": experts, "BLOCK_E": next_power_of_two(experts)}
    first = {"X_STRIDE": row_stride(x)} | constants | activation_constants(call)
    return (
        Projection(tiles[0], f"{kind}_gate_up", gate_up, True, grid, (pointer("x", x), *order, hidden), first),
        Projection(tiles[1], f"{kind}_down", down, False, grid, (hidden, *order, outputs), constants),
    )


def _emit_group_lanes(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """The sort, two projections of 8 * GROUPS sorted pairs, and the sum."""
    made = _list_groups(call, "group_lanes", (tile_group_lanes_gate_up, tile_group_lanes_down), 8 * GROUPS)
    projections = (_emit_lanes(call, arch, p, _choose(call, p.stack, p.gated, GROUPS, spec), GROUPS) for p in made)
    return (emit_sort(call, arch), *projections, emit_combine(call, arch))


def _emit_gemm(columns: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """The sort, two grouped GEMMs with tiles of ``columns`` pairs, and the sum."""
    made = _list_groups(call, f"group{columns}_fragments",
                        (tile_group_fragments_gate_up, tile_group_fragments_down), columns)  # fmt: skip
    dtype = need(call, "x").dtype
    blocks = Blocks(columns, 128, 64, 8 if columns > 64 else 4, 3)
    shape = Shape(blocks.n, blocks.num_warps, blocks.num_stages, mma_ledger(dtype, blocks, spec, arch))
    own = decode_constants(dtype, pairs=False) | {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}
    return (emit_sort(call, arch), *(_emit(call, arch, p, shape, own) for p in made), emit_combine(call, arch))


def _scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    """As of the portable slots, and each slot's route."""
    pairs = f"{need(call, 'x').shape[0]} * {count_places(call)}"
    return (*scratch_slots(call, spec), Scratch("routes", (pairs, _ROUTE), "int32"))


def _scratch_only(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    return tuple(s for s in _scratch(call, spec) if s.name != "outputs")


def _refuse_shape(call: OpCall, arch: Architecture) -> str | None:
    """The reason why these kernels cannot take a call, whatever the layouts of its weights, or None."""
    reason = refuse_lanes(call, arch)
    if reason is None and "wgmma" not in arch.features:
        return f"{arch.name} lacks wgmma"
    gate_up, down = list_stacks(call)
    reason = reason or refuse_shape(gate_up.rows, gate_up.k) or refuse_shape(down.rows, down.k)
    if reason is None and gate_up.rows % 32:
        return f"the {gate_up.rows // 2} gate rows are not made of tiles of 16"
    for name in (name for stack in (gate_up, down) for name in stack.names[:2]):
        _, rows, columns = need(call, name).shape
        if reason is None and need(call, name).strides != (int(rows) * int(columns), columns, 1):
            return f"{name} lies in a wider buffer"
    return reason


def _layouts(call: OpCall) -> dict[str, str]:
    names = [name for stack in list_stacks(call) for name in stack.names[:2]]
    return dict.fromkeys(names, LAYOUTS[need(call, "x").dtype])


def want_fragments(call: OpCall, spec: TargetSpec, arch: Architecture) -> dict[str, str]:
    """Codes and scales of all experts in fragment order, where the call allows it."""
    return {} if refuse_moe(call, spec, arch) or _refuse_shape(call, arch) else _layouts(call)


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_moe(call, spec, arch) or _refuse_shape(call, arch)
    if reason is None:
        wanted = _layouts(call)
        found = {name: need(call, name).layout for name in wanted}
        if set(found.values()) == {"linear"}:
            return "the experts are row-major"
        wrong = next((name for name in wanted if found[name] != wanted[name]), None)
        return wrong and f"{wrong} has the layout {found[wrong]}, not {wanted[wrong]}"
    return reason


def _refuse_only(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    if count_places(call) > _PLACES:
        return f"{count_places(call)} experts a token, more than the {_PLACES} columns of an mma"
    return _refuse(call, spec, arch)


def _refuse_tokens(tokens: int, most: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """Tiles are for few pairs an expert: ``tokens`` must give it at most ``most`` on average."""
    reason = _refuse(call, spec, arch)
    if reason is None and tokens * count_places(call) > most * count_experts(call):
        return f"{tokens} tokens give an expert more than {most} pairs"
    return reason


def _make(name: str, emit: Any, scratch: Any, tokens: int | None, refuse: Any = _refuse) -> KernelTemplate:
    return KernelTemplate(f"moe_nvfp4_{name}", "moe_nvfp4", refuse, emit, scratch, tokens, "tuned", want_fragments)


TEMPLATES: tuple[KernelTemplate, ...] = (
    _make("only_token", partial(_emit_slots, True), _scratch_only, 1, _refuse_only),
    _make("slot_lanes", partial(_emit_slots, False), _scratch, SLOT_TOKENS),
    # The largest number of tokens that leaves experts with few pairs depends on how many there are.
    *(
        _make(f"group_lanes{tokens}", _emit_group_lanes, scratch_groups, tokens,
              partial(_refuse_tokens, tokens, _LANE_PAIRS))
        for tokens in _LANE_TOKENS
    ),
    *(
        _make(f"fragments64_{tokens}", partial(_emit_gemm, 64), scratch_groups, tokens,
              partial(_refuse_tokens, tokens, _NARROW_PAIRS))
        for tokens in _NARROW_TOKENS
    ),
    _make("fragments128", partial(_emit_gemm, 128), scratch_groups, None),
)  # fmt: skip
