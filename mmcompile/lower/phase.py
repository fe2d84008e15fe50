"""Lower one graph to the launches of one phase."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import depends_only_on_weights, find_op, full_arguments, operation_name, source_of
from mmcompile.core.kernel import KernelSource, OpCall, Operand
from mmcompile.core.ops import OPS
from mmcompile.core.plan import Buffer, Choice, KernelLaunch, Launch, Phase, Role, View
from mmcompile.core.schedule import MOST_TOKENS, STAGE_WARPS
from mmcompile.lower.caches import place_caches
from mmcompile.lower.memory import Lifetime, plan_memory
from mmcompile.lower.operands import Operands, dtype_name, is_view, place_input, resolve_view
from mmcompile.lower.regions import Group, build_region, find_regions
from mmcompile.lower.select import RefuseSource, Selected, Selector

_VECTOR_BYTES = 16
_REUSE_DISTANCE = 4
"""Launches for which memory rests before it is reused where launches are merged: reuse at once would cost a wait."""


@dataclass
class LoweredPhase:
    """A phase with its buffers, weights and emitted kernel sources (by kernel name).

    ``load_launches`` compute what depends on weights alone; they run once, when the artifact is loaded.
    """

    phase: Phase
    load_launches: list[Launch]
    buffers: dict[str, Buffer]
    weights: dict[str, torch.Tensor]
    sources: dict[str, KernelSource]


@dataclass
class Stages:
    """Kernels that each launch would be made of inside a merged one, or why there are none, and their sources.

    ``most``: tokens that they have to serve.
    """

    most: int
    choices: list[tuple[Choice, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    sources: dict[str, KernelSource] = field(default_factory=dict)


@dataclass
class PhaseLowering:
    """The state of lowering one graph; ``strict`` makes an operation without a kernel an error."""

    graph_module: fx.GraphModule
    name: str
    selector: Selector | None
    symbols: Mapping[str, int]
    strict: bool
    output_names: tuple[str, ...]
    plan_symbols: Mapping[str, int]
    cache_layouts: tuple[str, ...] = ()
    operands: Operands = field(default_factory=Operands)
    load_launches: list[Launch] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    sources: dict[str, KernelSource] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    stages: Stages | None = None

    def walk(self) -> None:
        """Make the launches, without kernels, going through the graph once in order."""
        groups = find_regions(self.graph_module)
        self.operands.memo = self.graph_module.meta.get("inferred", self.operands.memo)
        self.constant = depends_only_on_weights(self.graph_module)
        for node in self.graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                place_input(self.operands, self.graph_module, node)
            elif node.op == "call_function":
                self._lower_call(node, groups.get(node))
        self.outputs = self._name_outputs()

    def describe(self, launch: Launch) -> OpCall:
        """What kernel templates see of a launch."""
        operands = {k: self.operands.operand(v) for k, v in launch.inputs.items()}
        results = tuple(r for r in (self.operands.operand(v) for v in launch.outputs) if isinstance(r, Operand))
        return OpCall(launch.op.partition(".")[2], operands, results, launch.attributes | {"phase": self.name})

    def finish(self, layouts: Mapping[str, str], refuse_stage: RefuseSource | None = None) -> LoweredPhase:
        """Choose kernels with the weights in the given layouts (by buffer name), and plan the memory.

        refuse_stage: choose kernels that may become stages of a merged launch too; this one says which may not.
        """
        for name in layouts.keys() & self.operands.buffers.keys():
            self.operands.buffers[name] = self.operands.buffers[name].model_copy(update={"layout": layouts[name]})
        if self.selector is not None:
            self.launches = [self._choose(launch, self.selector) for launch in self.launches]
            if refuse_stage is not None:
                self.stages = self._choose_stages(self.selector, refuse_stage)
        return self._plan()

    def _choose_stages(self, selector: Selector, refuse: RefuseSource) -> Stages:
        """For every launch the kernels that would be its stages for up to ``MOST_TOKENS`` tokens."""
        found = Stages(min(MOST_TOKENS, self.symbols.get("tokens", MOST_TOKENS)))
        for launch in self.launches:
            selected, reason = self.find_kernels(launch, selector, refuse=refuse)
            choices = tuple(self._bind(launch.name, s, launch.inputs, launch.outputs, found.sources) for s in selected)
            found.choices.append(choices)
            found.reasons.append(reason)
        return found

    def _lower_call(self, node: fx.Node, group: Group | None) -> None:
        looks = node.target is operator.getitem or (is_view(node) and self._has_view_input(node))
        if looks and resolve_view(self.operands, node):
            return
        if group is not None:
            if node is group.nodes[-1]:
                self._lower_region(group)
            return
        op = find_op(node.target)
        if op is not None:
            self._lower_operation(node, op.name)
        else:
            self._lower_aten(node)

    def _has_view_input(self, node: fx.Node) -> bool:
        return isinstance(node.args[0], fx.Node) and isinstance(self.operands.views.get(node.args[0]), View)

    def _results(self, node: fx.Node) -> tuple[View, ...]:
        """Buffers for what a node returns."""
        value = node.meta["val"]
        role: Role = "derived" if node in self.constant else "temporary"
        # Derived values are shared by the phases, so their names must not depend on the phase.
        prefix = "load" if role == "derived" else self.name
        if value is None:
            return ()
        if isinstance(value, torch.Tensor):
            self.operands.views[node] = view = self.operands.add_buffer(f"{prefix}.{node.name}", value, role)
            return (view,)
        parts = [self.operands.add_buffer(f"{self.name}.{node.name}.{i}", v, "temporary") for i, v in enumerate(value)]
        self.operands.views[node] = parts
        return tuple(parts)

    def _lower_operation(self, node: fx.Node, name: str) -> None:
        arguments = full_arguments(node)
        inputs: dict[str, View | None] = {}
        attributes: dict[str, Any] = {}
        tensors = {a.name for a in node.target._schema.arguments if "Tensor" in str(a.type)}  # type: ignore[union-attr]
        for key, value in arguments.items():
            if key in tensors:
                inputs[key] = self.operands.views[value] if isinstance(value, fx.Node) else None
            else:
                attributes[key] = dtype_name(value) if isinstance(value, torch.dtype) else value
        attributes = place_caches(self.operands, self.cache_layouts, inputs, attributes)
        self._add_launch(node, f"mm.{name}", inputs, attributes)

    def _lower_region(self, group: Group, read: tuple[fx.Node, ...] = ()) -> None:
        outputs = read or tuple(group.outputs())
        region = build_region(group, outputs)
        inputs: dict[str, View | None] = {
            key: self.operands.views[n] for key, n in zip(region.inputs, group.inputs(), strict=True)
        }
        results = []
        for node in outputs:
            results += self._results(node)
        self._append(group.nodes[-1], f"region.{region.kind}", inputs, tuple(results), region.to_json())

    def _lower_aten(self, node: fx.Node) -> None:
        """Anything else runs by its aten reference, listed with the reason."""
        inputs: dict[str, View | None] = {}

        def encode(value: Any) -> Any:
            if isinstance(value, fx.Node):
                key = f"arg{len(inputs)}"
                inputs[key] = self.operands.views[value]
                return {"input": key}
            if isinstance(value, torch.dtype):
                return {"dtype": dtype_name(value)}
            if isinstance(value, torch.device | torch.layout | torch.memory_format):
                return None
            if isinstance(value, tuple | list):
                return [encode(v) for v in value]
            return value

        kwargs = {k: encode(v) for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
        attributes = {"args": [encode(a) for a in node.args], "kwargs": kwargs}
        self._add_launch(node, operation_name(node.target), inputs, attributes)

    def _add_launch(self, node: fx.Node, op: str, inputs: dict[str, View | None], attributes: dict[str, Any]) -> None:
        self._append(node, op, inputs, self._results(node), attributes)

    def _append(
        self,
        node: fx.Node,
        op: str,
        inputs: dict[str, View | None],
        outputs: tuple[View, ...],
        attributes: dict[str, Any],
    ) -> None:
        name = f"{'load' if node in self.constant else self.name}.{node.name}"
        launches = self.load_launches if node in self.constant else self.launches
        launches.append(
            Launch(name=name, op=op, inputs=inputs, outputs=outputs, attributes=attributes, source=source_of(node))
        )

    def _choose(self, launch: Launch, selector: Selector) -> Launch:
        """The launch with its kernels, or with the reason why it has none."""
        selected, reason = self.find_kernels(launch, selector)
        if not selected and self.strict:
            node = launch.name.removeprefix(f"{self.name}.")
            raise LoweringError(
                f"{launch.op} has no kernel for {selector.spec.name}: {reason}",
                where=", ".join(filter(None, (f"node {node}", launch.source))),
                fix="drop --strict to run it by its reference, or write a kernel template for it",
            )
        choices = tuple(self._bind(launch.name, s, launch.inputs, launch.outputs, self.sources) for s in selected)
        return launch.model_copy(update={"choices": choices, "reason": reason})

    def find_kernels(
        self,
        launch: Launch,
        selector: Selector,
        layouts: Mapping[str, str] = {},
        refuse: RefuseSource | None = None,
    ) -> tuple[tuple[Selected, ...], str]:
        """Kernels of a launch with the operands ``layouts`` (by name) in those layouts; or () and the reason.

        refuse: look for stages of a merged launch, to which it may object.
        """
        if launch.op.partition(".")[0] not in ("mm", "region"):
            return (), f"{launch.op} is no mm:: operation and no step of a generated kernel"
        misaligned = self._find_misaligned([*launch.inputs.values(), *launch.outputs])
        if misaligned:
            return (), f"a view on {misaligned} does not start at a multiple of {_VECTOR_BYTES} bytes"
        call = self.describe(launch)
        for name, layout in layouts.items():
            operand = call.operands[name]
            assert operand is not None
            call.operands[name] = replace(operand, layout=layout)
        if refuse is None:
            return selector.select(call, self.symbols.get("tokens"))
        call = replace(call, attributes=call.attributes | {"warps": STAGE_WARPS})
        return selector.select(call, min(MOST_TOKENS, self.symbols.get("tokens", MOST_TOKENS)), refuse)

    def _find_misaligned(self, views: list[View | None]) -> str:
        """Buffer of the first view that kernels, which load 16 bytes at a time, cannot take; "" if there is none."""
        for view in views:
            if view is not None and isinstance(view.offset, int):
                item = getattr(torch, self.operands.dtype(view)).itemsize
                if view.offset * item % _VECTOR_BYTES:
                    return view.buffer
        return ""

    def _bind(
        self,
        name: str,
        selected: Selected,
        inputs: dict[str, View | None],
        outputs: tuple[View, ...],
        sources: dict[str, KernelSource],
    ) -> Choice:
        """Give every parameter of the emitted kernels its view or symbol; remember the kernels in ``sources``."""
        values: dict[str, View | str] = {k: v for k, v in inputs.items() if v is not None}
        for i, view in enumerate(outputs):
            values["result" if i == 0 else f"result{i}"] = view
        for scratch in selected.scratch:
            buffer = Buffer(name=f"{name}.{selected.template}.{scratch.name}", shape=scratch.shape,
                            dtype=scratch.dtype, role="temporary")  # fmt: skip
            self.operands.buffers[buffer.name] = buffer
            values[f"scratch:{scratch.name}"] = View(buffer=buffer.name, shape=scratch.shape, strides=())
        launches = []
        for source in selected.sources:
            kernel = f"{source.name}_{source.digest[:8]}"
            sources[kernel] = source
            arguments = tuple(values.get(p.value, p.value) for p in source.parameters)
            launches.append(KernelLaunch(kernel=kernel, grid=source.grid, arguments=arguments))
        return Choice(max_tokens=selected.max_tokens, template=selected.template, kernels=tuple(launches),
                      reason=selected.reason)  # fmt: skip

    def _plan(self) -> LoweredPhase:
        buffers = self.operands.buffers
        lifetimes: dict[str, Lifetime] = {}
        for i, launch in enumerate(self.launches):
            stages = self.stages.choices[i] if self.stages else ()
            for name in _touched(launch, stages):
                last = i + _REUSE_DISTANCE if self.stages else i
                lifetimes[name] = Lifetime(lifetimes[name].first if name in lifetimes else i, last)
        movable = [b for b in buffers.values() if b.role == "temporary" and b.name in lifetimes]
        results = [buffers[name] for name in self.outputs]
        offsets, arena = plan_memory(movable, lifetimes, self.symbols, results, self.plan_symbols)
        placed = {n: b.model_copy(update={"offset": offsets[n]}) if n in offsets else b for n, b in buffers.items()}
        phase = Phase(
            name=self.name,
            inputs=tuple(n for n, b in buffers.items() if b.role == "input"),
            outputs=self.outputs,
            launches=tuple(self.launches),
            after=find_dependencies(self.launches),
            arena_bytes=arena,
        )
        return LoweredPhase(phase, self.load_launches, placed, self.operands.weights, self.sources)

    def _name_outputs(self) -> tuple[str, ...]:
        """Turn result buffers into outputs under their public names; a result that is a view is copied first."""
        (output,) = self.graph_module.graph.find_nodes(op="output")
        results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
        renamed: dict[str, Buffer] = {}
        for node, name in zip(results, self.output_names, strict=True):
            view = self.operands.views[node]
            buffer = self.operands.buffers[view.buffer]
            if buffer.role != "temporary" or view.shape != buffer.shape or buffer.name in renamed:
                buffer = self._copy_result(node, output)
            shape = buffer.shape
            if self.name == "decode":  # one token a sequence: the rows are the sequences
                shape = tuple("batch" if d == "tokens" else d for d in shape)
            renamed[buffer.name] = buffer.model_copy(update={"name": name, "role": "output", "shape": shape})
        names = {old: new.name for old, new in renamed.items()}
        self.launches = [_rename_buffers(launch, names) for launch in self.launches]
        kept = {n: b for n, b in self.operands.buffers.items() if n not in renamed}
        self.operands.buffers = kept | {b.name: b for b in renamed.values()}
        return tuple(b.name for b in renamed.values())

    def _copy_result(self, node: fx.Node, output: fx.Node) -> Buffer:
        with self.graph_module.graph.inserting_before(output):
            clone = self.graph_module.graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta["val"] = node.meta["val"].contiguous()
        self._lower_region(Group([clone], tuple(node.meta["val"].shape)), (clone,))
        self.graph_module.graph.erase_node(clone)
        return self.operands.buffers[self.operands.views[clone].buffer]


def _rename_buffers(launch: Launch, names: Mapping[str, str]) -> Launch:
    """The launch, which has no kernels yet, with buffers renamed in every view."""

    def rename(view: Any) -> Any:
        known = isinstance(view, View) and view.buffer in names
        return view.model_copy(update={"buffer": names[view.buffer]}) if known else view

    inputs = {key: rename(view) for key, view in launch.inputs.items()}
    outputs = tuple(rename(view) for view in launch.outputs)
    return launch.model_copy(update={"inputs": inputs, "outputs": outputs})


def _touched(launch: Launch, stages: tuple[Choice, ...] = ()) -> list[str]:
    names = [v.buffer for v in launch.inputs.values() if v is not None] + [v.buffer for v in launch.outputs]
    for choice in (*launch.choices, *stages):
        for kernel in choice.kernels:
            names += [a.buffer for a in kernel.arguments if isinstance(a, View)]
    return names


def find_dependencies(launches: list[Launch]) -> tuple[tuple[int, ...], ...]:
    """For each launch the earlier ones it must follow: read after write, write after read, write after write.

    Transitive edges are left out.
    """
    before: list[int] = []  # all that a launch follows, directly or not, as a set of bits
    direct: list[tuple[int, ...]] = []
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for i, launch in enumerate(launches):
        needed: set[int] = set()
        written = {v.buffer for v in launch.outputs}
        written |= {v.buffer for k in _mutated(launch.op) for v in [launch.inputs.get(k)] if v is not None}
        read = {v.buffer for v in launch.inputs.values() if v is not None}
        needed |= {writer[name] for name in read | written if name in writer}
        for name in written:
            needed |= set(readers.pop(name, []))
            writer[name] = i
        for name in read - written:
            readers.setdefault(name, []).append(i)
        reached, kept = 0, []
        for other in sorted(needed, reverse=True):
            if not reached >> other & 1:
                kept.append(other)
                reached |= before[other] | 1 << other
        before.append(reached)
        direct.append(tuple(reversed(kept)))
    return tuple(direct)


def _mutated(op: str) -> tuple[str, ...]:
    """Names of the tensor arguments that an operation writes."""
    return OPS[op.removeprefix("mm.")].mutates if op.startswith("mm.") else ()
