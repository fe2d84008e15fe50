"""Lower the graphs of a model to one LaunchPlan for one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.kernel import KernelSource, KernelTemplate
from mmcompile.core.plan import Buffer, Launch, Phase, Plan
from mmcompile.core.runner import copy_graph
from mmcompile.core.schedule import MERGED_PHASE
from mmcompile.core.spec import TargetSpec
from mmcompile.lower.host import prepare_for_host
from mmcompile.lower.layouts import choose_layouts
from mmcompile.lower.phase import PhaseLowering, Stages
from mmcompile.lower.select import RefuseSource, Selector


@dataclass
class Lowered:
    """A plan without binaries yet, the weights its buffers need and the kernel sources to compile, by name.

    ``stages``: of the decode phase, if merged launches are wanted.
    """

    plan: Plan
    weights: dict[str, torch.Tensor]
    sources: dict[str, KernelSource]
    stages: Stages | None = None


def lower_model(
    graphs: Mapping[str, fx.GraphModule],
    spec: TargetSpec,
    templates: Sequence[KernelTemplate],
    symbols: Mapping[str, Mapping[str, int]],
    output_names: Mapping[str, tuple[str, ...]],
    *,
    strict: bool = False,
    portable: bool = False,
    refuse_stage: RefuseSource | None = None,
) -> Lowered:
    """Lower every phase.

    Args:
        graphs: phase name -> graph, e.g. {"prefill": ..., "decode": ...}.
        symbols: phase name -> largest value of each symbol there; sizes the arena and bounds the kernel choice.
        output_names: phase name -> public names of its results, e.g. ("logits", "next_tokens").
        strict: an operation without a kernel is an error instead of a reference launch.
        portable: leave tuned kernels out. refuse_stage: choose stages for merged launches of the decode phase too.
    """
    selector = Selector(spec, templates, portable) if spec.backend else None
    buffers: dict[str, Buffer] = {}
    weights: dict[str, torch.Tensor] = {}
    sources: dict[str, KernelSource] = {}
    phases: dict[str, Phase] = {}
    load: dict[str, Launch] = {}
    largest = {k: max(s[k] for s in symbols.values() if k in s) for k in {k for s in symbols.values() for k in s}}
    lowerings: list[PhaseLowering] = []
    stages: Stages | None = None
    for name, graph_module in graphs.items():
        if selector is None:
            graph_module = copy_graph(graph_module)
            prepare_for_host(graph_module)
        lowerings.append(PhaseLowering(
            graph_module, name, selector, symbols[name], strict, output_names[name], largest, spec.cache_layouts
        ))  # fmt: skip
        lowerings[-1].walk()
    layouts = choose_layouts(lowerings, selector) if selector is not None else {}
    for lowering in lowerings:
        lowered = lowering.finish(layouts, refuse_stage if lowering.name == MERGED_PHASE else None)
        stages = lowering.stages or stages
        for key, buffer in lowered.buffers.items():
            if buffers.setdefault(key, buffer) != buffer:
                raise LoweringError(f"the phases disagree about the buffer {key}: {buffers[key]} and {buffer}")
        weights |= lowered.weights
        sources |= lowered.sources
        load |= {launch.name: launch for launch in lowered.load_launches}
        phases[lowering.name] = lowered.phase
    if load:
        launches = tuple(load.values())
        phases["load"] = Phase(
            name="load", inputs=(), outputs=(), launches=launches, after=tuple(() for _ in launches), arena_bytes=0
        )
    used = {v.buffer for p in phases.values() for la in p.launches for v in (*la.inputs.values(), *la.outputs) if v}
    used |= {n for p in phases.values() for n in (*p.inputs, *p.outputs)}
    kept = {n: b for n, b in buffers.items() if b.role not in ("weight",) or n in used}
    plan = Plan(
        target=spec.name,
        symbols=dict(sorted(largest.items())),
        buffers=kept,
        phases=phases,
        kernels={},
    )
    return Lowered(plan, {n: w for n, w in weights.items() if n in kept}, sources, stages)
