"""Branches, calls, barriers, waits, cache control (AMD Instinct CDNA4 ISA, "Program Flow Control")."""

from __future__ import annotations

import numpy as np

from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.operands import match_symbol, parse_operand, read_scalar
from mmcompile.emulate.gfx950.parser import Instruction, Kernel
from mmcompile.emulate.gfx950.state import EXEC, SCALAR, SCC, VCC, Waves
from mmcompile.emulate.gfx950.waits import build_wait, issue

CODE = 0x7D00_0000_0000
"""Device address of the first instruction; every instruction takes 8 bytes here."""

NO_EFFECT = {"s_nop", "s_setprio", "s_clause", "s_sched_barrier", "s_inst_prefetch", "s_icache_inv", "s_dcache_wb",
             "s_dcache_inv", "s_ttracedata", "s_delay_alu", "v_nop", "s_set_gpr_idx_off", "s_wakeup",
             "s_incperflevel", "s_decperflevel"}  # fmt: skip

# fp8 conversions saturate where this bit of the mode is set, and here always (see convert.py).
SATURATE_FP8 = "hwreg(HW_REG_MODE, 23, 1), 1"

NOTE_READS = (
    "the race check takes a read as done when it is issued: one that nobody waited for before a barrier, and that "
    "another wave overwrites after it, shows only as a wrong number, when operations complete late"
)

_CONDITIONS = {"scc0": False, "scc1": True, "vccz": False, "vccnz": True, "execz": False, "execnz": True}
"""s_cbranch_NAME: taken where the register is (not) zero."""


def build_branch(i: Instruction) -> Decoded | None:
    """s_branch and s_cbranch_*."""
    target = i.operands[0]
    if i.op == "s_branch":

        def always(w: Waves) -> None:
            w.jump = np.ones(len(w.waves), np.bool_)

        return Decoded(always, control="branch", target=target)
    condition = i.op.removeprefix("s_cbranch_")
    if condition not in _CONDITIONS:
        return None
    wanted = _CONDITIONS[condition]
    register, count = {"s": (SCC, 1), "v": (VCC, 2), "e": (EXEC, 2)}[condition[0]]

    def step(w: Waves) -> None:
        w.jump = w.scalar[w.rows, register : register + count].any(axis=1) == wanted

    registers = [SCALAR + register + k for k in range(count)]
    return Decoded(step, registers, demands=registers, control="branch", target=target)


def build_call(i: Instruction) -> Decoded:
    """s_getpc_b64, s_setpc_b64, s_swappc_b64: addresses are CODE + 8 * index of an instruction."""
    operands = [parse_operand(text) for text in i.operands]
    name = i.op.split("_")[1]
    target = None if name == "setpc" else operands[0].index
    read = None if name == "getpc" else read_scalar(operands[-1], 64)

    def step(w: Waves) -> None:
        destination = None if read is None else read(w).copy()
        if target is not None:
            w.put_pair(target, np.full(len(w.waves), CODE + 8 * (w.index + 1), np.uint64))
        if destination is not None:
            w.jump = (np.broadcast_to(destination, (len(w.waves),)).astype(np.int64) - CODE) >> 3

    writes = [] if target is None else operands[0].list_registers()
    needed = [] if read is None else operands[-1].list_registers()
    return Decoded(step, needed, writes, demands=needed, control="" if read is None else "indirect")


def resolve_symbols(kernel: Kernel) -> None:
    """Replace ``function@rel32@lo+4`` and ``@hi+12`` (LLVM's calls) by numbers."""
    for index, i in enumerate(kernel.instructions):
        symbol = match_symbol(i.operands[-1]) if i.operands else None
        if symbol and symbol[0] in kernel.labels:
            start = index if symbol[1] == "lo" else index - 1
            distance = 8 * (kernel.labels[symbol[0]] - start)
            value = distance & 0xFFFFFFFF if symbol[1] == "lo" else distance >> 32 & 0xFFFFFFFF
            kernel.instructions[index] = Instruction(i.op, (*i.operands[:-1], hex(value)), i.modifiers, i.line, i.text)


def build_clock(i: Instruction) -> Decoded:
    """s_memtime, s_memrealtime: a counter of 64 bits, which returns like a scalar load.

    Time is the number of instructions that the launch has executed, in whatever unit the register counts (those of
    s_memrealtime are 10 ns, AMD Instinct CDNA4 ISA, "Scalar Memory Operations").
    """
    target = parse_operand(i.operands[0])
    targets = target.list_registers()

    def step(w: Waves) -> None:
        w.put_pair(target.index, np.full(len(w.waves), w.executed, np.uint64))
        for register in targets:
            w.smem[register - SCALAR, w.rows] = True
            w.load_line[register] = w.line
        w.pending.update(targets)

    return Decoded(step, (), targets, queue="smem")


def _trap(w: Waves) -> None:
    raise w.fault("trap", "the kernel executed a trap")


def _sleep(w: Waves) -> None:
    w.polled[w.waves] += 1


def _write_back(w: Waves) -> None:
    issue(w, w.vm, ())
    if w.races is not None:
        w.races.request_release(w)


def _invalidate(w: Waves) -> None:
    if w.races is not None:
        w.races.acquire(w)


def build(i: Instruction) -> Decoded | None:
    """Control instructions; None for anything else."""
    if i.op == "s_waitcnt":
        return build_wait(i.operands[0])
    if i.op in NO_EFFECT or (i.op == "s_setreg_imm32_b32" and i.operands == (SATURATE_FP8,)):
        return Decoded(lambda w: None)
    if i.op == "s_sleep":
        return Decoded(_sleep)
    if i.op in ("s_branch",) or i.op.startswith("s_cbranch_"):
        return build_branch(i)
    if i.op in ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64"):
        return build_call(i)
    if i.op in ("s_memtime", "s_memrealtime"):
        return build_clock(i)
    if i.op == "s_barrier":
        return Decoded(lambda w: None, control="barrier", note=NOTE_READS)
    if i.op == "s_endpgm":
        return Decoded(lambda w: None, control="endpgm")
    if i.op in ("s_trap", "s_endpgm_saved"):
        return Decoded(_trap)
    if i.op == "buffer_wbl2":
        return Decoded(_write_back if "sc1" in i.modifiers or "sc1" in i.operands else lambda w: issue(w, w.vm, ()))
    if i.op == "buffer_inv":
        return Decoded(_invalidate if "sc1" in i.modifiers or "sc1" in i.operands else lambda w: None)
    return None
