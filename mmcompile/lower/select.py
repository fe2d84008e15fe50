"""Choose kernels: for every operation and range of token counts, the first template of the target that can serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Scratch
from mmcompile.core.spec import Architecture, TargetSpec


@dataclass(frozen=True)
class Selected:
    """One template chosen for token counts up to ``max_tokens`` (None = any), with what it emits."""

    template: str
    max_tokens: int | None
    sources: tuple[KernelSource, ...]
    scratch: tuple[Scratch, ...]
    reason: str


RefuseSource = Callable[[KernelSource], str | None]
"""The reason why an emitted kernel will not do, or None."""


@dataclass
class Selector:
    """Remembers what was emitted, so that equal calls (the layers of a model) are emitted once.

    ``portable``: pass over tuned templates (for bisecting).
    """

    spec: TargetSpec
    templates: Sequence[KernelTemplate]
    portable: bool = False
    _memory: dict[str, tuple[tuple[Selected, ...], str]] = field(default_factory=dict)

    def select(
        self, call: OpCall, largest: int | None, refuse: RefuseSource | None = None
    ) -> tuple[tuple[Selected, ...], str]:
        """Choices in ascending order of token counts, the last covering ``largest`` tokens; or () and the reason.

        ``largest`` None: the graph has no token count to choose by, so only kernels for any number will do.
        ``refuse``: a further objection to what a template emits.
        """
        key = repr((call, largest, refuse is not None))
        if key not in self._memory:
            self._memory[key] = self._choose(call, largest, refuse)
        return self._memory[key]

    def propose_layouts(self, call: OpCall) -> dict[str, str]:
        """The layouts that the first tuned template of the operation with such a wish wants its weights in."""
        if self.portable:
            return {}
        common = common_architecture(self.spec)
        wishes = (t.layouts(call, self.spec, common) for t in self.templates if t.op == call.op)
        return next((wish for wish in wishes if wish), {})

    def _choose(
        self, call: OpCall, largest: int | None, refuse: RefuseSource | None
    ) -> tuple[tuple[Selected, ...], str]:
        chosen: list[Selected] = []
        passed: list[str] = []
        common = common_architecture(self.spec)
        covered = 0
        for template in self.templates:
            if template.op != call.op or (self.portable and template.grade != "portable"):
                continue
            if template.max_tokens is not None and template.max_tokens <= covered:
                continue
            if template.max_tokens is not None and largest is None:
                passed.append(f"{template.name}: it serves {template.max_tokens} tokens, the graph counts none")
                continue
            refusal = template.refuse(call, self.spec, common)
            if refusal is not None:
                passed.append(f"{template.name}: {refusal}")
                continue
            sources = template.emit(call, self.spec, common)
            refusal = next(filter(None, map(refuse, sources)), None) if refuse else None
            if refusal is not None:
                passed.append(f"{template.name}: {refusal}")
                continue
            scratch = template.scratch(call, self.spec)
            chosen.append(Selected(template.name, template.max_tokens, sources, scratch, "; ".join(passed)))
            if template.max_tokens is None or largest is None or template.max_tokens >= largest:
                return tuple(chosen), ""
            covered = template.max_tokens
        limit = f"its kernels stop at {covered} tokens" if chosen else f"no kernel implements {call.op}"
        return (), "; ".join(passed) or limit


def common_architecture(spec: TargetSpec) -> Architecture:
    """What all architectures of a target have: sources are emitted once and assembled for each."""
    first = spec.architectures[0]
    shared = frozenset.intersection(*(a.features for a in spec.architectures))
    return replace(first, name=spec.name, features=shared)
