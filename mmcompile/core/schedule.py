"""Mono-decode: the static schedule of a phase as one persistent launch, its table, and the proof that it is right.

All programs of the launch are resident at once and walk the same stages in the same order. Tile ``t`` of a stage runs
on program ``(base + t) mod programs``; ``base`` moves on by the tiles of the stage before, so that work is spread. A
program that has tiles of a stage first waits for the counters of the stages that ``waits`` names, each of which every
program with tiles of that stage raises by one when it is done. A replicated stage runs whole on every program.

Since waits point backwards and everybody is resident, every wait ends. What a program knows to be done is a vector
clock: for every program, the last stage done there. A stage may touch memory that an earlier one touched, one of them
writing, only if its programs know that the earlier one is done wherever it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.core.errors import LoweringError
from mmcompile.core.expression import Expression, evaluate
from mmcompile.core.plan import Stage

MERGED_PHASE = "decode"
MOST_TOKENS = 16
STAGE_WARPS = 4
"""Warps of a merged kernel; a call that asks for a stage says so by its attribute "warps"."""
OWN_PARAMETERS = (("table", "*i64"), ("counters", "*i32"), ("times", "*i64"), ("first", "i32"), ("last", "i32"))
"""Parameters (name, Triton type) of every merged kernel; those of its stages' symbols follow."""
MOST_WAITS = 4
MOST_ARGUMENTS = 16
WAITS = 8
ARGUMENTS = WAITS + 2 * MOST_WAITS
STAGE_WORDS = ARGUMENTS + 2 * MOST_ARGUMENTS
"""int64 words of a stage in the table: body, tiles, grid x, grid y, base, replicated, number of waits, whether it is
awaited; (stage, target) of each wait; (address, bytes between the programs' copies) of each pointer argument."""
FINISH, FAULT = 0, 1
COUNTER_STRIDE = 32
"""int32 words: [0] programs that have finished, [1] and [2] code and value of the first wait in vain, then one counter
for every stage, 128 bytes apart."""

Clock = npt.NDArray[np.int32]
_NEVER = np.int32(-1)


@dataclass(frozen=True)
class Access:
    """Memory that a stage touches: ``space`` (the arena, or a buffer by its name), bytes from ``start`` to ``end``.

    ``name``: of the buffer that is meant.
    """

    space: str
    start: int
    end: int
    writes: bool
    name: str = ""

    def conflicts(self, other: Access) -> bool:
        """True if the two may not change places."""
        return self.space == other.space and _overlap(self, other) and (self.writes or other.writes)


@dataclass(frozen=True)
class Placed:
    """A stage for one token count: its grid, where its tiles run, and how many arrivals its counter gets."""

    name: str
    grid: tuple[int, int, int]
    base: int
    replicated: bool
    programs: npt.NDArray[np.bool_]

    @property
    def tiles(self) -> int:
        """Tiles of the whole grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def arrivals(self) -> int:
        """Programs that have tiles."""
        return int(self.programs.sum())


def place_stages(
    stages: Sequence[Stage],
    names: Sequence[str],
    grids: Sequence[tuple[Expression, Expression, Expression]],
    symbols: Mapping[str, int],
    programs: int,
) -> list[Placed]:
    """Evaluate the grids and deal out the tiles, one stage after the other."""
    placed, base = [], 0
    for stage, name, grid in zip(stages, names, grids, strict=True):
        x, y, z = (evaluate(size, symbols) for size in grid)
        tiles = x * y * z
        mask = np.zeros(programs, np.bool_)
        mask[(base + np.arange(min(tiles, programs))) % programs] = True
        if stage.replicated:
            mask[:] = tiles > 0
        placed.append(Placed(name, (x, y, z), base, stage.replicated, mask))
        base = base if stage.replicated else (base + tiles) % programs
    return placed


def find_conflicts(accesses: Sequence[Sequence[Access]]) -> list[list[int]]:
    """For every stage the earlier ones that it conflicts with, the latest first."""
    by_space: dict[str, list[tuple[int, Access]]] = {}
    found: list[list[int]] = []
    for index, own in enumerate(accesses):
        earlier = {i for a in own for i, other in by_space.get(a.space, ()) if a.conflicts(other)}
        found.append(sorted(earlier, reverse=True))
        for access in own:
            by_space.setdefault(access.space, []).append((index, access))
    return found


def refuse_clobbered(accesses: Sequence[Sequence[Access]], names: Sequence[str]) -> None:
    """Refuse stages that find something else where they expect a buffer, or write one of their buffers over another.

    Every access must find the bytes that the buffer of its name was last written with, in the order of the stages.
    Raises LoweringError that names the reader and who wrote another buffer there.
    """
    writes: dict[str, list[tuple[int, Access]]] = {}
    written: set[str] = set()
    for index, own in enumerate(accesses):
        _refuse_overlaps(own, f"stage {index} ({names[index]})")
        for access in own:
            if access.writes and access.name not in written:
                continue
            last = next((w for w in reversed(writes.get(access.space, ())) if _overlap(w[1], access)), None)
            if last is not None and last[1].name != access.name:
                raise LoweringError(
                    f"stage {index} ({names[index]}) finds {last[1].name}, which stage {last[0]} ({names[last[0]]}) "
                    f"wrote, where it expects {access.name}",
                    fix="place buffers that are alive together apart",
                )
        for access in own:
            if access.writes:
                writes.setdefault(access.space, []).append((index, access))
                written.add(access.name)


def _refuse_overlaps(accesses: Sequence[Access], stage: str) -> None:
    """Programs of one stage run in any order, so what it writes must not lie on another buffer that it touches."""
    for number, access in enumerate(accesses):
        for other in accesses[:number]:
            if access.name != other.name and access.conflicts(other):
                raise LoweringError(
                    f"{stage} writes where it also touches another buffer: {other.name} and {access.name} overlap",
                    fix="place buffers that are alive together apart",
                )


def _overlap(one: Access, other: Access) -> bool:
    return one.start < other.end and other.start < one.end


class Clocks:
    """Vector clocks of the programs over a schedule; ``known[p, q]``: the last stage on q that p knows to be done."""

    def __init__(self, programs: int) -> None:
        self.known = np.full((programs, programs), _NEVER, np.int32)
        self._reached: list[Clock] = []
        self._least_known: Clock | None = None

    def wait(self, stage: Placed, source: int) -> None:
        """The programs of ``stage`` have seen the counter of ``source`` full."""
        self._least_known = None
        self.known[stage.programs] = np.maximum(self.known[stage.programs], self._reached[source])

    def lacks(self, stage: Placed, earlier: Placed, index: int) -> bool:
        """True if a program of ``stage`` may start before ``earlier`` (number ``index``) is done on another program."""
        if self._least_known is None:
            self._least_known = self._find_least(stage)
        return bool((self._least_known[earlier.programs] < index).any())

    def _find_least(self, stage: Placed) -> Clock:
        """What all programs of the present stage know of each program, which itself knows what it did."""
        known = self.known.copy()
        np.fill_diagonal(known, len(self._reached))
        least: Clock = known[stage.programs].min(axis=0, initial=len(self._reached))
        return least

    def finish(self, stage: Placed) -> None:
        """The programs of the next stage are done with it."""
        self._least_known = None
        index = len(self._reached)
        diagonal = np.flatnonzero(stage.programs)
        self.known[diagonal, diagonal] = index
        self._reached.append(self.known[stage.programs].max(axis=0, initial=_NEVER))


def choose_waits(placed: Sequence[Placed], conflicts: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every stage the fewest counters, latest first, after which it knows that all it conflicts with is done."""
    clocks = Clocks(len(placed[0].programs))
    waits: list[list[int]] = []
    for index, stage in enumerate(placed):
        chosen: list[int] = []
        for earlier in conflicts[index]:
            if clocks.lacks(stage, placed[earlier], earlier):
                clocks.wait(stage, earlier)
                chosen.append(earlier)
        clocks.finish(stage)
        waits.append(chosen)
    return waits


def prove_schedule(
    placed: Sequence[Placed],
    waits: Sequence[Sequence[int]],
    targets: Mapping[int, int],
    conflicts: Sequence[Sequence[int]],
    resident: int,
) -> None:
    """Refuse a schedule that could hang or read what is not there.

    Args:
        targets: what is waited for at the counter of each awaited stage.
        resident: programs of the merged kernel that fit on the device at once.

    Raises LoweringError that names the two stages if a wait points forwards, a counter never or too early reaches its
    target, a stage starts before one that it conflicts with is done (a read before its write, a buffer reused before
    its last reader), or the programs are not all resident.
    """
    programs = len(placed[0].programs)
    if programs > resident:
        raise LoweringError(
            f"{programs} programs of the merged launch are not resident at once, {resident} are",
            fix="lower the number of programs",
        )
    clocks = Clocks(programs)
    for index, stage in enumerate(placed):
        _prove_waits(placed, index, waits[index], targets)
        for source in waits[index]:
            clocks.wait(stage, source)
        for earlier in conflicts[index]:
            if clocks.lacks(stage, placed[earlier], earlier):
                raise LoweringError(
                    f"stage {index} ({stage.name}) may start before stage {earlier} ({placed[earlier].name}) is done, "
                    "with which it shares memory",
                    fix=f"let it wait for stage {earlier}",
                )
        clocks.finish(stage)


def _prove_waits(placed: Sequence[Placed], index: int, waits: Sequence[int], targets: Mapping[int, int]) -> None:
    stage = placed[index]
    if len(waits) > MOST_WAITS:
        raise LoweringError(f"stage {index} ({stage.name}) waits for {len(waits)} stages, {MOST_WAITS} are the most")
    for source in waits:
        if not 0 <= source < index:
            name = placed[source].name if 0 <= source < len(placed) else "none"
            raise LoweringError(
                f"stage {index} ({stage.name}) waits for stage {source} ({name}), which does not come before it",
                fix="let waits point backwards, or the launch hangs",
            )
        if targets.get(source) != placed[source].arrivals:
            raise LoweringError(
                f"stage {index} ({stage.name}) waits for {targets.get(source)} arrivals at stage {source} "
                f"({placed[source].name}), which gets {placed[source].arrivals}",
                fix="make the target the number of programs that have tiles of it",
            )


def list_targets(placed: Sequence[Placed], stages: Sequence[Stage]) -> dict[int, int]:
    """Target of the counter of every awaited stage: the programs that have tiles of it."""
    return {source: placed[source].arrivals for stage in stages for source in stage.waits}


def build_table(
    placed: Sequence[Placed], stages: Sequence[Stage], arguments: Sequence[Sequence[tuple[int, int]]]
) -> npt.NDArray[np.int64]:
    """The table that the merged kernel walks, int64 [stages + 1, STAGE_WORDS]; it reads ahead to the empty last row.

    arguments: for every stage (address, bytes between the copies of the programs) of each pointer.
    """
    targets = list_targets(placed, stages)
    table = np.zeros((len(stages) + 1, STAGE_WORDS), np.int64)
    for index, (stage, place) in enumerate(zip(stages, placed, strict=True)):
        waits = [word for source in stage.waits if targets[source] for word in (source, targets[source])]
        pointers = [word for pair in arguments[index] for word in pair]
        table[index, :WAITS] = (
            stage.body, place.tiles, place.grid[0], place.grid[1], place.base, place.replicated,
            len(waits) // 2, index in targets,
        )  # fmt: skip
        table[index, WAITS : WAITS + len(waits)] = waits
        table[index, ARGUMENTS : ARGUMENTS + len(pointers)] = pointers
    return table
