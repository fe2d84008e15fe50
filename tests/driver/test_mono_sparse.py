"""Merged launches of layers with block-sparse attention and experts, planned without a compiler or a capture."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mmcompile.core.errors import LoweringError
from mmcompile.core.plan import Plan, Schedule
from mmcompile.core.schedule import find_conflicts
from mmcompile.driver.mono import find_stage_rule
from mmcompile.driver.summary import assign_layers
from mmcompile.driver.targets import load_target
from mmcompile.lower.merge import Scheduler, count_read, find_merge, propose_merges
from mmcompile.lower.plan import Lowered, lower_model
from tests.driver.mono_model import tamper
from tests.driver.sparse_layer import EXPERTS, HIDDEN, SYMBOLS, WIDTH, SparseLayer

PROGRAMS = 5
FORMATS = [
    ("bf16", "bfloat16", "sm90"), ("bf16", "float8_e4m3fn", "gfx950"), ("bf16", "nvfp4", "sm100"),
    ("mxfp8", "bfloat16", "sm107"), ("mxfp8", "nvfp4", "gfx950"), ("mxfp8", "nvfp4", "sm90"),
]  # fmt: skip


@functools.cache
def lower(weights: str, cache: str, target: str) -> Lowered:
    loaded = load_target(target)
    graphs = {"decode": SparseLayer(weights, cache).build()}
    return lower_model(graphs, loaded.spec, loaded.kernels, {"decode": SYMBOLS}, {"decode": ("logits",)},
                       refuse_stage=find_stage_rule(loaded, "step"))  # fmt: skip


def open_scheduler(lowered: Lowered, plan: Plan | None = None) -> Scheduler:
    plan = plan or lowered.plan
    assert lowered.stages is not None
    sources = lowered.stages.sources
    phase = plan.phases["decode"]
    replicable = {name for name, source in sources.items() if source.replicable}
    gated = {name for name, source in sources.items() if source.parts and source.parts.gated}
    return Scheduler(plan, phase, replicable, load_target(plan.target).spec, assign_layers(plan, phase), gated)


def make_schedules(lowered: Lowered) -> list[Schedule]:
    assert lowered.stages is not None
    merges, _ = propose_merges(lowered.plan.phases["decode"], lowered.stages)
    return [open_scheduler(lowered).make(m, m.name, PROGRAMS, PROGRAMS, "step") for m in merges]


@pytest.mark.parametrize(("weights", "cache", "target"), FORMATS)
def test_every_launch_of_the_layer_is_a_stage(weights: str, cache: str, target: str) -> None:
    """Scores, block top-k, attention and its merge, insertion, router, experts, sum: none is left to a launch."""
    lowered = lower(weights, cache, target)
    launches = lowered.plan.phases["decode"].launches
    schedules = make_schedules(lowered)
    assert [(s.low, s.high) for s in schedules][0][0] == 1 and schedules[-1].high == 16
    for before, after in zip(schedules, schedules[1:], strict=False):
        assert after.low == before.high + 1
    for schedule in schedules:
        assert {stage.launch for stage in schedule.stages} == set(range(len(launches)))
    experts = [s for s in schedules[0].stages if launches[s.launch].op.startswith("mm.moe")]
    assert len(experts) == 3, "gate and up, down, and the weighted sum"


def test_data_dependent_stages_follow_what_they_depend_on() -> None:
    """Top-k ids, expert ids and written cache rows are read at addresses that only the device knows."""
    lowered = lower("mxfp8", "nvfp4", "sm90")
    schedule, scheduler = make_schedules(lowered)[-1], open_scheduler(lowered)
    ops = [lowered.plan.phases["decode"].launches[stage.launch].op for stage in schedule.stages]
    accesses = scheduler._list_accesses(find_merge(schedule), set(schedule.private), SYMBOLS)
    conflicts = find_conflicts(accesses)
    for reader, producer in (
        ("mm.moe_nvfp4", "mm.route_top_k"), ("mm.paged_block_sparse_attention", "mm.block_top_k"),
        ("mm.block_top_k", "mm.paged_index_score"), ("mm.paged_index_score", "mm.qkv_norm_rope_insert_index_mxfp8"),
        ("mm.paged_block_sparse_attention", "mm.qkv_norm_rope_insert_index_mxfp8"),
    ):  # fmt: skip
        last = len(ops) - 1 - ops[::-1].index(producer)
        assert last in conflicts[ops.index(reader)], (reader, producer)


def test_every_wait_is_needed() -> None:
    """A schedule that lacks any one of its waits is refused with both stages named."""
    lowered = lower("mxfp8", "nvfp4", "gfx950")
    schedule, scheduler = make_schedules(lowered)[-1], open_scheduler(lowered)
    waits = [(i, source) for i, stage in enumerate(schedule.stages) for source in stage.waits]
    assert len(waits) >= len(schedule.stages) - 4
    for index, source in waits:
        left = tuple(w for w in schedule.stages[index].waits if w != source)
        with pytest.raises(LoweringError, match=rf"stage {index} \(.*may start before stage \d+ \("):
            scheduler.prove(tamper(schedule, index, waits=left), PROGRAMS)


@pytest.mark.parametrize(("moved", "onto"), [
    ("hidden", "route_top_k"), ("outputs", "hidden"), ("partial", "block_top_k"),
])  # fmt: skip
def test_a_buffer_reused_before_its_last_reader_is_refused(moved: str, onto: str) -> None:
    """The experts' activations on the router's choice, their results on the activations, attention's parts on ids."""
    lowered = lower("mxfp8", "nvfp4", "sm90")
    schedule, buffers = make_schedules(lowered)[-1], lowered.plan.buffers
    used = {a.buffer for s in schedule.stages for a in s.record.arguments if not isinstance(a, str)}
    one, other = (next(n for n in sorted(used) if part in n and buffers[n].role == "temporary")
                  for part in (f".{moved}", onto if "_" in onto else f".{onto}"))  # fmt: skip
    changes: dict[str, Any] = {one: buffers[one].model_copy(update={"offset": buffers[other].offset})}
    plan = lowered.plan.model_copy(update={"buffers": buffers | changes})
    with pytest.raises(LoweringError, match="overlap|where it expects|may start before"):
        open_scheduler(lowered, plan).prove(schedule, PROGRAMS)


def test_few_tokens_read_few_experts() -> None:
    """Two experts a token of eight: the cost model counts their weights, and of the embedding one row."""
    lowered = lower("bf16", "bfloat16", "sm90")
    plan = lowered.plan
    launches = {launch.op: launch for launch in plan.phases["decode"].launches}
    experts, table = plan.buffers["layers_0_down"], plan.buffers["embed"]
    whole = EXPERTS * HIDDEN * WIDTH * 2
    read = [count_read(launches["mm.moe"], experts, n) for n in (1, 3, 4, 16)]
    assert read == [whole / 4, whole * 0.75, whole, whole]
    assert count_read(launches["mm.embedding"], table, 3) == 3 * HIDDEN * 2
    router, bias = launches["mm.route_top_k"], plan.buffers["layers_0_bias"]
    assert count_read(router, bias, 1) == count_read(router, bias, 16) >= 4 * EXPERTS
