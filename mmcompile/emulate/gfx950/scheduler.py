"""Which waves run next: side by side, one at a time, or all programs in turns; barriers; endless waiting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoder import Block
from mmcompile.emulate.gfx950.execute import run_block
from mmcompile.emulate.gfx950.state import Rows, Waves
from mmcompile.emulate.gfx950.waits import finish_all
from mmcompile.emulate.launch import Launch, Report

RUNNING, WAITING, ENDED = 0, 1, 2
POLLS = 200
"""Polls (synchronising loads, atomics, sleeps) of every running wave without any progress that count as deadlock."""
PATIENCE = 2
"""After so many polls without any progress a wave's turn comes less often."""
STEPS = 200_000
"""Blocks without any progress that count as deadlock."""
FAIRNESS = 97
"""In the vector schedule every so many choices another place than the first in the text runs."""


class Scheduler:
    """Runs the resident waves to their end.

    Attributes:
        state: of each wave, RUNNING, WAITING (at a barrier) or ENDED. block: the block that each runs next.
        barrier_line: line of the barrier that each waits at.
    """

    def __init__(
        self, w: Waves, code: tuple[list[Block], dict[int, int]], start: int, launch: Launch, report: Report
    ) -> None:
        self.w, self.report, self.schedule = w, report, launch.schedule
        self.blocks, self.block_of = code
        self.random = np.random.default_rng(launch.seed)
        self.state: npt.NDArray[np.int64] = np.zeros(w.count, np.int64)
        self.block: npt.NDArray[np.int64] = np.full(w.count, start, np.int64)
        self.barrier_line: npt.NDArray[np.int64] = np.zeros(w.count, np.int64)
        self.program = np.arange(w.count) // w.per_program
        self.idle = self.counted = 0
        self.seen_progress = 0
        self.choices = 0

    def run(self) -> None:
        """Until every wave has ended. Raises EmulationFault."""
        choose: Callable[[], Rows] = {
            "program": self.choose_first,
            "warp": self.choose_wave,
            "interleaved": self.choose_mixed,
        }[self.schedule]
        while (self.state != ENDED).any():
            if not (self.state == RUNNING).any():
                self.report_stuck()
            self.run_together(choose(), self.find_budget())

    def find_budget(self) -> int:
        """Blocks to run before another choice."""
        if self.schedule == "interleaved":
            return int(self.random.integers(1, 33))
        return 1 << 30 if self.schedule == "warp" else 4096

    # ------------------------------------------------------------------ choices

    def choose_first(self) -> Rows:
        """All waves at the first place in the text that any runs, so that waves apart meet again."""
        running = self.state == RUNNING
        self.choices += 1
        where = self.block[running]
        place = where.min() if self.choices % FAIRNESS else self.random.choice(where)
        return self.narrow(running & (self.block == place))

    def choose_wave(self) -> Rows:
        """One wave of a program, at random; programs are independent, so those at the same place run along."""
        running = self.state == RUNNING
        wave = int(self.random.choice(np.flatnonzero(running)))
        same = np.arange(self.w.count) % self.w.per_program == wave % self.w.per_program
        return self.narrow(running & same & (self.block == self.block[wave]))

    def choose_mixed(self) -> Rows:
        """The waves of some programs that are at the place of a random wave; one that polls in vain comes rarely."""
        running = self.state == RUNNING
        busy = running & (self.w.polled < PATIENCE)
        candidates = busy if busy.any() and self.random.random() < 0.9 else running
        wave = int(self.random.choice(np.flatnonzero(candidates)))
        included = self.random.random(self.w.count // self.w.per_program) < 0.5
        included[self.program[wave]] = True
        return self.narrow(running & (self.block == self.block[wave]) & included[self.program])

    def narrow(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        """As a slice where that is possible: views are faster than copies."""
        rows = np.flatnonzero(chosen)
        first, last = int(rows[0]), int(rows[-1])
        if len(rows) == self.w.count:
            return slice(None)
        return slice(first, last + 1) if last - first + 1 == len(rows) else rows

    # ------------------------------------------------------------------ running

    def run_together(self, rows: Rows, budget: int) -> None:
        """Run the chosen waves while they stay together."""
        w = self.w
        w.select(rows)
        place = following = int(self.block[w.waves[0]])
        while budget > 0:
            if place < 0 or place >= len(self.blocks):
                raise w.fault("malformed assembly", "execution runs past the end of the text")
            block = self.blocks[place]
            lanes = w.lanes
            run_block(w, block)
            self.count(block, lanes)
            budget -= 1
            advanced = self.advance(block)
            if advanced is None:
                return
            following = advanced
            if following <= place and self.yields() and (self.state == RUNNING).sum() > len(w.waves):
                break
            place = following
        self.block[w.waves] = following

    def yields(self) -> bool:
        """Whether the chosen waves let others go first before another round of a loop."""
        polls = bool(self.w.polled[self.w.waves].any())
        return self.schedule == "program" or (self.schedule == "interleaved" and polls)

    def count(self, block: Block, lanes: int) -> None:
        """Report and progress."""
        self.report.instructions += len(block.steps) * lanes
        self.w.executed += len(block.steps) * len(self.w.waves)
        if not block.covered:
            block.covered = True
            self.report.covered.update(step.line for step in block.steps)
        if self.w.progress != self.seen_progress:
            self.note_progress()
        self.idle += 1
        self.counted += 1
        if self.counted % 64 == 0:
            self.check_spinning()

    def advance(self, block: Block) -> int | None:
        """The block where all selected waves go on; None if they stop or part."""
        w = self.w
        if block.control == "":
            return block.following
        if block.control == "branch":
            assert w.jump is not None
            if w.jump.all():
                return block.target
            if not w.jump.any():
                return block.following
            self.block[w.waves] = np.where(w.jump, block.target, block.following)
        elif block.control == "indirect":
            return self.jump_indirect()
        elif block.control == "barrier":
            self.block[w.waves] = block.following
            self.barrier_line[w.waves] = w.line
            self.state[w.waves] = WAITING
            self.release_barriers()
        else:
            finish_all(w)
            self.state[w.waves] = ENDED
            self.note_progress()
            self.release_barriers()
        return None

    def jump_indirect(self) -> int | None:
        """s_setpc_b64 and s_swappc_b64."""
        w = self.w
        assert w.jump is not None
        places = [self.block_of.get(int(target), -1) for target in w.jump]
        if min(places) < 0:
            raise w.fault("illegal", "a jump to an address that is no beginning of a block")
        if len(set(places)) == 1:
            return places[0]
        self.block[w.waves] = places
        return None

    # ------------------------------------------------------------------ barriers and waiting

    def release_barriers(self) -> None:
        """Let the programs go on whose waves are all at a barrier or have ended."""
        w = self.w
        states = self.state.reshape(-1, w.per_program)
        ready = ((states != RUNNING).all(axis=1)) & (states == WAITING).any(axis=1)
        for program in np.flatnonzero(ready):
            waves = np.arange(w.per_program) + program * w.per_program
            waiting = waves[self.state[waves] == WAITING]
            lines = set(self.barrier_line[waiting].tolist())
            if len(lines) > 1 or len(waiting) < w.per_program:
                what = f"waves are at barriers of lines {sorted(lines)}"
                if len(waiting) < w.per_program:
                    what = f"{w.per_program - len(waiting)} of {w.per_program} waves have ended"
                raise w.fault("divergent barrier", f"{what} while others wait at a barrier")
            if w.races is not None:
                w.races.barrier(waiting)
            self.state[waiting] = RUNNING
            # A barrier is no progress in a loop that polls, and who meets a polling wave there waits with it.
            self.idle = 0
            w.polled[waiting] = w.polled[waiting].max()

    def note_progress(self) -> None:
        """Something changed that a waiting wave could see."""
        self.seen_progress = self.w.progress
        self.idle = 0
        self.w.polled[:] = 0

    def check_spinning(self) -> None:
        """Fault if all running waves only poll."""
        running = self.state == RUNNING
        if running.any() and (self.w.polled[running] >= POLLS).all():
            self.report_stuck()
        if self.idle > STEPS:
            raise self.w.fault("deadlock", f"nothing changed in {STEPS} blocks")

    def report_stuck(self) -> None:
        """Nothing can go on."""
        running = int((self.state == RUNNING).sum())
        waiting = int((self.state == WAITING).sum())
        raise self.w.fault("deadlock", f"{running} waves poll without any change to see, {waiting} wait at a barrier")
