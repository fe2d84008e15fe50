"""Which lanes of a group run next: divergence, convergence, barriers, polling, and what is left when nothing can run.

A fragment is a set of lanes at the same basic block. Branches split fragments, fragments that reach the same block
merge, and the one that is furthest behind runs first (PTX ISA: warps may diverge; instructions with .sync or .aligned
need whole warps). A fragment that polls memory in a loop yields to the others.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.barriers import BlockBarriers
from mmcompile.emulate.ptx.fragment import Fragment
from mmcompile.emulate.ptx.group import WARP, Array, Group
from mmcompile.emulate.ptx.translator import Translator

Outcome = Literal["done", "spinning", "looping", "more"]
_LONG_LOOP = 5_000
"""Basic blocks after which a fragment in a loop counts as polling."""
_UNLIMITED = 1 << 60


class Scheduler:
    """Runs the lanes of one group.

    ``seed`` None: all warps go together as far as they can. Otherwise every warp is on its own and they take turns in
    seeded random order. ``since_poll``: basic blocks since a fragment last yielded because it polls.
    """

    def __init__(self, group: Group, translator: Translator, seed: int | None = None) -> None:
        self.group, self.translator, self.program = group, translator, translator.program
        self.random = random.Random(seed) if seed is not None else None
        self.fragments = [Fragment(0, group.live.copy(), 0)]
        if self.random:
            warps = np.arange(group.lanes) // WARP
            self.fragments = [Fragment(0, warps == warp, warp) for warp in range(group.lanes // WARP)]
        self.barriers = BlockBarriers(group, self.fragments)
        self.entered: set[int] = set()
        self.since_poll, self.looped = 0, False

    def run(self, quantum: int = _UNLIMITED) -> Outcome:
        """Run until all lanes exited ("done"), every runnable fragment polls ("spinning"), or ``quantum`` blocks.

        "looping" is "spinning" where a fragment ran for ``_LONG_LOOP`` blocks without polling or waiting.
        """
        left = quantum
        while self.fragments:
            fragment = self._choose()
            if fragment is None:
                if not any(f.state == "run" for f in self.fragments):
                    raise self._report_stuck()
                for waiting in self.fragments:
                    waiting.yielded = False
                looped, self.looped = self.looped, False
                return "looping" if looped else "spinning"
            turn = self.random.randint(1, 6) if self.random else _LONG_LOOP
            steps = self._run_fragment(fragment, min(turn, left))
            left -= steps
            self._note_long_loop(fragment, steps)
            self.since_poll = 0 if fragment.yielded else self.since_poll + steps
            if left <= 0:
                return "more"
        for queue in self.group.queues.values():
            queue.finish(self.group)
        return "done"

    def _choose(self) -> Fragment | None:
        """The runnable fragment that is furthest behind, of a random warp if warps run on their own."""
        ready = [f for f in self.fragments if f.state == "run" and not f.yielded]
        if not ready:
            return None
        if self.random:
            warp = self.random.choice([f.warp for f in ready])
            ready = [f for f in ready if f.warp == warp]
        return min(ready, key=lambda f: f.block)

    def _run_fragment(self, fragment: Fragment, limit: int) -> int:
        """Run blocks until the fragment waits, splits, meets another, or has had ``limit`` of them; their number."""
        group, program, find = self.group, self.program, self.translator.find
        for steps in range(1, limit + 1):
            block, mask = fragment.block, fragment.mask
            if program.gates[block] and mask is not None and not self._pass_gate(fragment):
                return steps
            mask = fragment.mask
            outcome = find(block, mask is not None)(group, group.registers, mask)
            self.entered.add(block)
            group.executed += program.count(block) * (group.lanes if mask is None else int(mask.sum()))
            if type(outcome) is int:
                fragment.block = outcome
                if outcome <= block:
                    fragment.yielded, group.spun = group.spun, False
            else:
                self._control(fragment, outcome)
            if fragment.state != "run" or fragment.yielded or fragment not in self.fragments:
                return steps
            if len(self.fragments) > 1 and self._meet(fragment):
                return steps
        return limit

    def _note_long_loop(self, fragment: Fragment, steps: int) -> None:
        """A fragment that only loops lets others run, as if it polled."""
        fragment.ran = 0 if fragment.yielded or fragment.state != "run" else fragment.ran + steps
        if fragment.ran >= _LONG_LOOP:
            fragment.yielded, fragment.ran, self.looped = True, 0, True

    def _meet(self, fragment: Fragment) -> bool:
        """Merge with what is at the same block; whether another fragment should run now."""
        self._merge(fragment)
        return self.random is None or any(f is not fragment and f.warp == fragment.warp for f in self.fragments)

    def _control(self, fragment: Fragment, outcome: tuple[Any, ...]) -> None:
        kind = outcome[0]
        if kind == "branch":
            self._branch(fragment, outcome[1], outcome[2])
        elif kind == "indexed":
            self._branch_indexed(fragment, outcome[1], outcome[2])
        elif kind == "exit":
            self._exit(fragment, outcome[1])
        else:
            for part in self._split_warps(fragment, outcome[1]):
                self.barriers.arrive(part, *outcome[1:])
            self._merge_running()

    def _split_warps(self, fragment: Fragment, numbers: Array) -> list[Fragment]:
        """A fragment for each of the barriers ``numbers`` that its warps name; the lanes of a warp must name one."""
        values = np.unique(numbers[fragment.lanes])
        parts = [fragment]
        for value in values[1:]:
            parts.append(self._split(fragment, fragment.lanes & (numbers == value), fragment.block))
        if np.sum([part.lanes.reshape(-1, WARP).any(axis=1) for part in parts], axis=0).max() > 1:
            raise self.group.fault("divergent barrier", "the lanes of a warp name different barriers")
        return parts

    def _branch(self, fragment: Fragment, condition: Array, target: int) -> None:
        taken = condition if fragment.mask is None else condition & fragment.mask
        block, following, group = fragment.block, fragment.block + 1, self.group
        backwards = target <= block
        if not taken.any():
            fragment.block = following
            return
        spun = backwards and group.spun
        if backwards:
            group.spun = False
        if (taken if fragment.mask is None else taken[fragment.lanes]).all():
            fragment.block, fragment.yielded = target, spun
            return
        other = self._split(fragment, taken, target)
        other.yielded = spun
        fragment.block = following
        self._merge(other)

    def _branch_indexed(self, fragment: Fragment, index: Array, targets: list[int]) -> None:
        values = np.unique(index[fragment.lanes])
        if int(values[-1]) >= len(targets):
            raise self.group.fault("out of bounds", f"branch index {int(values[-1])} of {len(targets)} targets")
        for value in values[1:]:
            self._split(fragment, fragment.lanes & (index == value), targets[int(value)])
        fragment.block = targets[int(values[0])]

    def _exit(self, fragment: Fragment, mask: Array | None) -> None:
        leaving = fragment.lanes if mask is None else fragment.lanes & mask
        group = self.group
        group.live = group.live & ~leaving
        if leaving.any() and (leaving == fragment.lanes).all():
            self.fragments.remove(fragment)
        else:
            fragment.set_lanes(fragment.lanes & ~leaving)
            fragment.block += 1
        self.barriers.recount()
        for other in self.fragments:
            if other.state == "gate":
                other.state = "run"
        self._merge_running()

    def _split(self, fragment: Fragment, lanes: Array, block: int) -> Fragment:
        other = Fragment(block, lanes, fragment.warp)
        other.ran = fragment.ran
        fragment.set_lanes(fragment.lanes & ~lanes)
        self.fragments.append(other)
        return other

    def _merge(self, fragment: Fragment) -> None:
        """Take in the fragments of the same warps that are at the same block."""
        for other in list(self.fragments):
            same = other.block == fragment.block and other.warp == fragment.warp
            if other is not fragment and same and other.state in ("run", "gate"):
                fragment.set_lanes(fragment.lanes | other.lanes)
                fragment.state, fragment.yielded = "run", fragment.yielded and other.yielded
                fragment.ran = max(fragment.ran, other.ran)
                self.fragments.remove(other)

    def _merge_running(self) -> None:
        for fragment in list(self.fragments):
            if fragment in self.fragments and fragment.state == "run":
                self._merge(fragment)

    def _pass_gate(self, fragment: Fragment) -> bool:
        """Hold back the warps of which only a part of the live lanes is here; whether others may go on."""
        lanes, live = fragment.lanes.reshape(-1, WARP), self.group.live.reshape(-1, WARP)
        partial = lanes.any(axis=1) & (lanes != live).any(axis=1)
        if not partial.any():
            return True
        held = np.repeat(partial, WARP) & fragment.lanes
        if (held == fragment.lanes).all():
            fragment.state = "gate"
            return False
        self._split(fragment, held, fragment.block).state = "gate"
        return True

    def _report_stuck(self) -> EmulationFault:
        """Nothing can run: a barrier that not all reach, or a wait for something that nobody does."""
        first = min(self.fragments, key=lambda f: f.block)
        self.group.line = self.locate(first)
        counted = any(f.state == "barrier" and f.counted for f in self.fragments)
        kind: Literal["deadlock", "divergent barrier"] = "deadlock" if counted else "divergent barrier"
        return self.group.fault(kind, self.describe())

    def locate(self, fragment: Fragment) -> int:
        """The line where a fragment waits: of its barrier, or of the start of its block."""
        if fragment.state == "barrier":
            return fragment.waiting_line
        block = min(fragment.block, len(self.program.starts) - 2)
        return self.program.instructions[self.program.starts[block]].line

    def describe(self) -> str:
        """Where the lanes are."""
        words = {"run": "running", "gate": "waiting for the rest of their warps", "barrier": "waiting at a barrier"}
        places = [f"{int(f.lanes.sum())} lanes {words[f.state]} at line {self.locate(f)}" for f in self.fragments]
        return "; ".join(places[:6])
