"""Tuned block-sparse decode attention for Hopper: over NVFP4 pages in lane order, and what other pages share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmcompile.core.formats.nvfp4_cache import SM90
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ELEMENT_SIZES,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    stage_warps,
    symbol_parameters,
)
from mmcompile.targets._tuned import sparse_ptx
from mmcompile.targets._tuned.sparse_lanes import tile_attend_lanes, tile_merge_lanes

GROUP, HEAD_DIM, PAGE_SIZE = 16, 128, 128
LARGEST_SELECTION = 16
OWNERS = 128
_RUN_BYTES = 9216  # of one side of a head's page
_DECODED = 256.0


@dataclass(frozen=True)
class Config:
    """How the work on a token and KV head is cut: warps a program, programs, whether loads run ahead a step."""

    warps: int
    splits: int
    ahead: bool
    max_registers: int | None = None


CONFIGS = (
    (1, Config(2, 32, True)),
    (4, Config(2, 16, True)),
    (8, Config(1, 16, True)),
    (16, Config(4, 4, True)),
    (32, Config(8, 1, True)),
    (64, Config(8, 1, False, 128)),
    (128, Config(4, 1, False, 128)),
    (None, Config(2, 1, False, 128)),
)
"""(largest token count, the fastest of up to ten cuts on an H200 there)."""


def refuse_operands(call: OpCall, architecture: Architecture, features: frozenset[str]) -> str | None:
    """A reason that holds for pages of every kind: the architecture, the phase, dtypes, what is not a number."""
    missing = sorted(features - architecture.features)
    if missing:
        return f"{architecture.name} lacks {missing[0]}"
    if call.attributes.get("phase", "decode") != "decode":
        return "for the decode phase"
    q, cache, blocks = need(call, "q"), need(call, "kv_cache"), need(call, "blocks")
    if not float(call.attributes["scale"]) > 0:
        return f"scores are multiplied by {call.attributes['scale']}, which is not positive"
    if q.dtype != "bfloat16" or blocks.dtype != "int32":
        return f"q is {q.dtype} and blocks {blocks.dtype}, not bfloat16 and int32"
    if any(need(call, name).dtype != "int32" or need(call, name).strides[-1] != 1
           for name in ("block_table", "seq_lens", "query_start")):  # fmt: skip
        return "block_table, seq_lens and query_start must be int32 with a last stride of 1"
    fixed = (*q.shape[1:], *q.strides, *cache.shape[1:], *cache.strides, *blocks.shape[1:], *blocks.strides)
    if not all(isinstance(n, int) for n in fixed):
        return "the sizes and strides of q, kv_cache and blocks must be numbers"
    return None


def refuse_heads(call: OpCall, kv_heads: int) -> str | None:
    """A reason that holds for pages of every kind: heads, rows of q, selections."""
    q, blocks = need(call, "q"), need(call, "blocks")
    if q.shape[2] != HEAD_DIM or int(q.shape[1]) != GROUP * kv_heads:
        return f"q has {q.shape[1]} heads of {q.shape[2]}, not {GROUP} of {HEAD_DIM} for each of {kv_heads} KV heads"
    if int(q.strides[0]) % 8 or int(q.strides[1]) % 8 or q.strides[2] != 1:
        return "rows of q do not begin at multiples of 16 bytes"
    if int(blocks.shape[2]) > LARGEST_SELECTION or blocks.strides[2] != 1 or kv_heads % int(blocks.shape[1]):
        return f"{blocks.shape[2]} blocks a selection, above {LARGEST_SELECTION}, or not one after the other"
    return None


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    cache = need(call, "kv_cache")
    if call.attributes.get("layout") != SM90 or cache.dtype != "uint8":
        return f"the cache is not in the layout {SM90!r}"
    reason = refuse_operands(call, architecture, sparse_ptx.FEATURES)
    if reason is None and (tuple(cache.shape[2:]), tuple(cache.strides[1:])) != ((PAGE_SIZE, 72), (_RUN_BYTES, 72, 1)):
        reason = "pages of the cache are not 128 rows of 72 bytes, one run after the other"
    if reason is None and int(cache.strides[0]) % 16:
        reason = "pages of the cache do not begin at multiples of 16 bytes"
    return reason or refuse_heads(call, int(cache.shape[1]) // 2)


def fit_stage(config: Config, call: OpCall) -> Config:
    """The cut for a stage of a merged kernel, which has a number of warps of its own: as many parts as in a launch.

    Loads do not run ahead there: the registers that they take would decide how many programs of the whole step are
    resident at once, and with what the walk over the stages holds they are more than there are.
    """
    warps = stage_warps(call, config.warps)
    if "warps" not in call.attributes:
        return config
    return replace(config, warps=warps, splits=max(1, config.warps * config.splits // warps), ahead=False)


def _assemble(call: OpCall, config: Config) -> dict[str, list[sparse_ptx.Text]]:
    factor = float(call.attributes["scale"]) * math.log2(math.e) * _DECODED
    turns = -(-4 * LARGEST_SELECTION // (config.warps * config.splits))
    # weights up to 2^shift times values up to 10.5 (2688 / 256), summed over the tokens of a warp, stay below 65504
    shift = int(math.log2(65504 / (10.5 * 32 * turns)))
    return {
        "SCALE_QUERY": [sparse_ptx.scale_query(1.0)],
        "SPLIT_SCALES": [sparse_ptx.split_scales()],
        "SCORE_TILES": [sparse_ptx.score_tiles(0), sparse_ptx.score_tiles(2)],
        "UPDATE_SOFTMAX": [sparse_ptx.update_softmax(shift, factor)],
        "DECAY_SUMS": [sparse_ptx.decay_sums()],
        "ADD_VALUES": [sparse_ptx.add_values(half, quarter) for half in range(2) for quarter in range(4)],
        "STORE_ROWS": [sparse_ptx.store_rows(0), sparse_ptx.store_rows(1)],
    }


@dataclass(frozen=True)
class Form:
    """What reads pages of one kind.

    Attributes:
        name: in the names of kernels. title: of the pages. steps: steps a page.
        loads: operands of 16 bytes a lane that hold the keys of 8 tokens.
        runs: runs of the cache's second dimension a KV head.
        assemble: inline assembly by the parameter of the tile that takes it; [] for None.
        functions: replace those of sparse_lanes that have their names.
    """

    name: str
    title: str
    steps: int
    loads: int
    runs: int
    assemble: Callable[[OpCall, Config], dict[str, list[sparse_ptx.Text]]]
    ledger: dict[str, bool]
    functions: tuple[Any, ...] = ()


NVFP4 = Form("nvfp4", "NVFP4 pages in lane order", 4, 1, 2, _assemble,
             {"HMMA.16816.F32": True, "HMMA.16816.F16": True})  # fmt: skip


def _list_assembly(form: Form, call: OpCall, config: Config) -> dict[str, str]:
    """The inline assembly as constants, in the order of the tile's parameters."""
    texts = form.assemble(call, config) | {
        "SHUFFLE": [sparse_ptx.shuffle()],
        "HOLD": [sparse_ptx.hold_loads()],
        "SUM_QUADS": [sparse_ptx.sum_quads()],
        "STORE_WEIGHT": [sparse_ptx.store_weight()],
    }
    names = ("SCALE_QUERY", "SHUFFLE", "HOLD", "SPLIT_SCALES", "SCORE_TILES", "UPDATE_SOFTMAX", "DECAY_SUMS",
             "ADD_VALUES", "SUM_QUADS", "STORE_ROWS", "STORE_WEIGHT")  # fmt: skip
    return {name: sparse_ptx.as_constant(*texts[name]) if texts[name] else "None" for name in names}


_PARTIALS = (Parameter("partial", "*bf16", "scratch:partial"), Parameter("weights", "*fp32", "scratch:weights"))


def _emit_attend(form: Form, call: OpCall, config: Config, architecture: Architecture) -> KernelSource:
    q, cache, blocks, table = (need(call, name) for name in ("q", "kv_cache", "blocks", "block_table"))
    (result,), kv_heads = call.results, int(cache.shape[1]) // form.runs
    page, head, row = (int(stride) * ELEMENT_SIZES[cache.dtype] // 4 for stride in cache.strides[:3])
    constants = {
        "Q_STRIDE": q.strides[0], "Q_HEAD_STRIDE": q.strides[1], "PAGE_WORDS": page,
        "HEAD_WORDS": head * form.runs, "ROW_WORDS": row, "STEPS": form.steps, "LOADS": form.loads,
        "CHOSEN_STRIDE": blocks.strides[0], "SELECTION_STRIDE": blocks.strides[1], "COUNT": int(blocks.shape[2]),
        "SHARING": kv_heads // int(blocks.shape[1]), "KV_HEADS": kv_heads, "SPLITS": config.splits,
        "WARPS": config.warps, "AHEAD": config.ahead, "OWNERS": OWNERS,
    } | _list_assembly(form, call, config)  # fmt: skip
    inputs = [pointer(n, need(call, n)) for n in ("q", "kv_cache", "blocks", "block_table", "seq_lens", "query_start")]
    source = emit_kernel(
        name=kernel_name(f"block_sparse_attention_lanes_{form.name}", f"{q.shape[1]}x{kv_heads}x{HEAD_DIM}",
                         f"{blocks.shape[2]}pages", f"warps{config.warps}", f"split{config.splits}"),
        title=f"Block-sparse attention over {form.title}: one part of the blocks of one token and KV head.",
        tiles=[tile_attend_lanes], constants=constants,
        parameters=[*inputs, pointer("result", result), *_PARTIALS,
                    *symbol_parameters("batch", q.shape[0], table.strides[0])],
        body=f"""
            tile_attend_lanes(tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1), q, kv_cache,
                              blocks, block_table, {table.strides[0]}, seq_lens, query_start, batch, {q.shape[0]},
                              result, partial, weights, {", ".join(constants)})
        """,
        grid=(f"{kv_heads}*{q.shape[0]}", str(config.splits), "1"), num_warps=config.warps, num_stages=1,
        early=architecture, ledger=form.ledger, intrinsics={f.fn.__name__: f for f in form.functions},
    )  # fmt: skip
    return replace(source, lanes=True, max_registers=config.max_registers)


def _emit_merge(call: OpCall, config: Config, architecture: Architecture) -> KernelSource:
    q, (result,), parts = need(call, "q"), call.results, config.warps * config.splits
    constants = {"PARTS": parts, "PARTS_BLOCK": next_power_of_two(parts)}
    return emit_kernel(
        name=kernel_name("block_sparse_attention_lanes_merge", parts),
        title="Block-sparse attention: merge the parts of one token and head.",
        tiles=[tile_merge_lanes], constants=constants, parameters=[*_PARTIALS, pointer("result", result)],
        body="tile_merge_lanes(tl.program_id(0), tl.program_id(1), partial, weights, result, PARTS, PARTS_BLOCK)",
        grid=(f"{int(q.shape[1]) // GROUP}*{q.shape[0]}", str(GROUP), "1"), num_warps=1 if parts <= 16 else 4,
        early=architecture,
    )


def _emit(
    form: Form, config: Config, call: OpCall, spec: TargetSpec, architecture: Architecture
) -> tuple[KernelSource, ...]:
    config = fit_stage(config, call)
    attend = _emit_attend(form, call, config, architecture)
    return (attend,) if config.splits == 1 else (attend, _emit_merge(call, config, architecture))


def _scratch(config: Config, call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    config = fit_stage(config, call)
    q = need(call, "q")
    rows = (q.shape[0], int(q.shape[1]) // GROUP, config.warps * config.splits, GROUP)
    return Scratch("partial", (*rows, HEAD_DIM), "bfloat16"), Scratch("weights", rows, "float32")


def make_templates(
    form: Form,
    configs: tuple[tuple[int | None, Config], ...],
    refuse: Callable[[OpCall, TargetSpec, Architecture], str | None],
) -> tuple[KernelTemplate, ...]:
    """A template for each of the configurations, (largest token count, cut)."""
    suffix = "" if form is NVFP4 else f"_{form.name}"
    return tuple(
        KernelTemplate(f"paged_block_sparse_attention_lanes{suffix}{tokens or ''}", "paged_block_sparse_attention",
                       refuse, partial(_emit, form, config), partial(_scratch, config), max_tokens=tokens,
                       grade="tuned")
        for tokens, config in configs
    )  # fmt: skip


TEMPLATES = make_templates(NVFP4, CONFIGS, _refuse)
