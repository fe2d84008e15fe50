"""Emit one persistent kernel of many: the stages of a decode step as branches that call the same tile functions."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmcompile.core.kernel import KernelParts, KernelSource, Parameter
from mmcompile.core.schedule import (
    ARGUMENTS,
    COUNTER_STRIDE,
    FAULT,
    FINISH,
    OWN_PARAMETERS,
    STAGE_WARPS,
    STAGE_WORDS,
    WAITS,
)
from mmcompile.core.spec import TargetSpec
from mmcompile.targets._emit import HEADER, collect_functions
from mmcompile.targets._intrinsics import synchronise, synchronise_cuda, synchronise_hip

_PROGRAM = re.compile(r"\btl\.program_id\(([012])\)")
_INTRINSICS = {"cuda": synchronise_cuda, "hip": synchronise_hip}


def refuse_merge(source: KernelSource) -> str | None:
    """The reason why a kernel cannot become a stage, or None: its tiles must know their place from the entry only."""
    if source.parts is None:
        return "its text is not made of tile functions"
    fixed = source.lanes or source.num_warps > STAGE_WARPS
    if fixed and source.num_warps != STAGE_WARPS:
        return f"it needs {source.num_warps} warps, a stage has {STAGE_WARPS}"
    texts = [text for _, text in source.parts.functions]
    if any(word in text for text in texts for word in ("tl.program_id", "tl.num_programs")):
        return "a tile function asks for its place in the grid"
    if "num_programs" in source.parts.body:
        return "it depends on the number of programs"
    return None


@dataclass
class _Names:
    """Functions and constants of the merged text: equal ones are shared, others of the same name get a number."""

    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    finals: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, parts: KernelParts, number: int, num_stages: int) -> tuple[str, dict[str, str]]:
        """Take in the pieces of stage ``number``: its body with the names it must use, and its local constants."""
        renamed: dict[str, str] = {}
        local = dict(parts.constants)
        for name, text in parts.functions:
            if name == "enter_gate":  # the merged kernel has its own
                continue
            text = _keep_pipelines(text, num_stages)
            for constant in _free_names(text) & local.keys():
                renamed[constant] = f"{constant}_{number}"
                self.constants[renamed[constant]] = local[constant]
            text = _rename(text, {k: v for k, v in renamed.items() if k not in _bound_names(text)})
            final = self.finals.get((name, text), name)
            while final != self.finals.get((name, text)) and final in self.functions:
                final = f"{final}_{number}"
            if final != name:
                renamed[name] = final
            self.functions[final] = _rename(text, {name: final})
            self.finals[name, text] = final
        body = _keep_pipelines(parts.body, num_stages)
        return _rename(body, {k: v for k, v in renamed.items() if k not in local}), local


def _rename(text: str, names: dict[str, str]) -> str:
    """Other names in statements; attributes and keywords of the same spelling stay."""
    lines = text.encode().split(b"\n")
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name | ast.FunctionDef)] if names else []
    places = []
    for node in found:
        name, start = (node.id, 0) if isinstance(node, ast.Name) else (node.name, len("def "))
        if name in names:
            places.append((node.lineno - 1, node.col_offset + start, name))
    for line, start, name in sorted(places, reverse=True):
        row = lines[line]
        lines[line] = row[:start] + names[name].encode() + row[start + len(name.encode()) :]
    return b"\n".join(lines).decode()


def _keep_pipelines(text: str, num_stages: int) -> str:
    """Loops of a stage with the depth of pipeline that they have in a launch of their own, whatever others have.

    Triton takes the kernel's ``num_stages`` for every loop that says nothing; in a merged kernel that is the largest
    of all stages, and registers of the deepest pipeline would be asked for in every loop.
    """
    lines, places = text.encode().split(b"\n"), []
    for node in ast.walk(ast.parse(text)):
        call = node.iter if isinstance(node, ast.For) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("range", "tl.range"):
            continue
        if all(keyword.arg != "num_stages" for keyword in call.keywords):
            places.append(call)
    for call in sorted(places, key=lambda c: (c.lineno, c.col_offset), reverse=True):
        assert call.end_lineno is not None and call.end_col_offset is not None
        end = lines[call.end_lineno - 1]
        closing = call.end_col_offset - 1
        lines[call.end_lineno - 1] = end[:closing] + f", num_stages={num_stages}".encode() + end[closing:]
        start, name = lines[call.lineno - 1], ast.unparse(call.func).encode()
        after = call.col_offset + len(name)
        lines[call.lineno - 1] = start[: call.col_offset] + b"tl.range" + start[after:]
    return b"\n".join(lines).decode()


def _free_names(text: str) -> set[str]:
    """Names that a function reads and does not bind."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - _bound_names(text)


def _bound_names(text: str) -> set[str]:
    """Parameters of a function and names that it assigns."""
    nodes = list(ast.walk(ast.parse(text)))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _write_stage(number: int, source: KernelSource, names: _Names) -> str:
    """The functions of one stage: the kernel's entry point, and its prefetch, with their place in the grid given."""
    assert source.parts is not None
    own = ["gate"] if source.parts.gated else []  # elsewhere an operand may have that name, as SwiGLU's has
    signature = ", ".join([*own, "program_0", "program_1", "program_2", *(p.name for p in source.parameters)])
    written = []
    for prefix, body in (("stage", source.parts.body), ("prefetch", source.parts.prefetch)):
        if body:
            body, local = names.add(replace(source.parts, body=body), number, source.num_stages)
            lines = [f"{name}: tl.constexpr = {value}" for name, value in local.items()]
            text = textwrap.indent("\n".join([*lines, _PROGRAM.sub(r"program_\1", body)]), "    ")
            written.append(f'@triton.jit\ndef {prefix}_{number}({signature}):\n    """{source.name}"""\n{text}')
    return "\n\n\n".join(written)


def _write_branch(number: int, source: KernelSource) -> str:
    """Load the stage's arguments from its row of the table, ask for weights, wait, and walk this program's tiles.

    The loop over tiles must not be pipelined: where a tile has no loop of its own, Triton 3.9 would do it, and what it
    runs beyond the last tile takes the else branch of every condition, stores included.
    """
    assert source.parts is not None
    lines, arguments, slot = [], [], 0
    for parameter in source.parameters:
        if not parameter.type.startswith("*"):
            arguments.append(parameter.value)
            continue
        lines.append(f"a{slot} = load_pointer(row, {slot}, program, {_POINTERS[parameter.type[1:]]})")
        arguments.append(f"a{slot}")
        slot += 1
    if source.parts.prefetch:
        given = ["None"] if source.parts.gated else []
        call = ", ".join([*given, "begin % x", "begin // x % y", "begin // (x * y)", *arguments])
        lines.append(f"prefetch_{number}({call})")
    gate = ["(row, first, counters, stage, program, times, programs, tile == begin)"] if source.parts.gated else []
    call = ", ".join([*gate, "tile % x", "tile // x % y", "tile // (x * y)", *arguments])
    if not source.parts.gated:
        lines += ["ready = await_stages(row, first, counters, stage, program)",
                  "record_time(times, stage * programs + program, 1)"]  # fmt: skip
    walk = "for tile in tl.range(begin, tiles, step, num_stages=1):"
    lines += ["if ready:", f"    {walk}", f"        stage_{number}({call})"]
    return f"{'if' if number == 0 else 'elif'} body == {number}:\n" + textwrap.indent("\n".join(lines), "    ")


_POINTERS = {
    "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32", "fp8e4nv": "tl.float8e4nv",
    "u8": "tl.uint8", "i8": "tl.int8", "i32": "tl.int32", "i64": "tl.int64",
}  # fmt: skip
_READ_ROW = f'''@triton.jit
def load_stage(row):
    """The head of a row: body, tiles, grid x and y, base, whether it is replicated, whether it is awaited."""
    return (tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32),
            tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32),
            tl.load(row + 7).to(tl.int32))


@triton.jit
def record_time(times, place, event: tl.constexpr):
    """Nanoseconds at the start of a stage (0), after its waits (1) and after its tiles (2), if anybody wants them."""
    if times.to(tl.int64) != 0:
        tl.store(times + place * 3 + event, read_clock())


@triton.jit
def load_pointer(row, slot: tl.constexpr, program, dtype: tl.constexpr):
    """Argument ``slot`` of a stage: an address and how far the copies of the programs lie apart."""
    address = tl.load(row + {ARGUMENTS} + 2 * slot) + tl.load(row + {ARGUMENTS} + 2 * slot + 1) * program
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def await_stages(row, first, counters, stage, program):
    """Wait for the stages that the row names, but for those of earlier launches; False if one wait is in vain."""
    waits = tl.load(row + 6).to(tl.int32)
    ready = waits >= 0
    for wait in tl.range(0, waits, num_stages=1):
        source = tl.load(row + {WAITS} + 2 * wait).to(tl.int32)
        target = tl.load(row + {WAITS + 1} + 2 * wait).to(tl.int32)
        if source >= first:
            place = counters + (source + 1) * {COUNTER_STRIDE}
            ready = ready & wait_for(place, target, counters + {FAULT}, stage + 1 + program * 65536)
    return ready


@triton.jit
def enter_gate(gate):
    """Wait before the first tile of a gated stage, whose weights are on their way."""
    if gate is not None:
        if gate[7]:
            await_stages(gate[0], gate[1], gate[2], gate[3], gate[4])
            record_time(gate[5], gate[3] * gate[6] + gate[4], 1)'''
_ENTRY = f'''@triton.jit
def {{name}}({{signature}}):
    program, programs = tl.program_id(0), tl.num_programs(0)
    stage = first
    body, tiles, x, y, base, replicated, awaited = load_stage(table + stage * {STAGE_WORDS})
    while stage < last:
        row = table + stage * {STAGE_WORDS}
        # What comes next is on its way while this stage runs; the table has a row after the last one.
        following = load_stage(row + {STAGE_WORDS})
        record_time(times, stage * programs + program, 0)
        begin, step = (program + programs - base) % programs, programs
        if replicated != 0:
            begin, step = 0, 1
        ready = stage >= 0
        if begin < tiles:
{{branches}}
            if ready:
                record_time(times, stage * programs + program, 2)
                if awaited != 0:
                    count_arrival(counters + (stage + 1) * {COUNTER_STRIDE})
                else:
                    finish_stores()
        body, tiles, x, y, base, replicated, awaited = following
        stage = tl.where(ready, stage + 1, last)
    if count_arrival(counters + {FINISH}) == programs - 1:
        for start in range(first, last, 1024):
            stages = start + tl.arange(0, 1024)
            tl.store(counters + (stages + 1) * {COUNTER_STRIDE}, 0, mask=stages < last)
        tl.store(counters + {FINISH}, 0)'''


def merge_kernels(name: str, sources: Sequence[KernelSource], spec: TargetSpec) -> KernelSource:
    """Write one persistent kernel whose body ``i`` is ``sources[i]``; none of them may be refused by refuse_merge.

    Its parameters are the table of stages (see core/schedule.py), the counters, the first stage and the one after the
    last, and the symbols that the sources ask for.
    """
    names = _Names()
    functions: dict[str, str] = {}
    replacements: Any = vars(_INTRINSICS[spec.backend])
    for function in (synchronise.wait_for, synchronise.finish_stores, synchronise.count_arrival,
                     synchronise.prefetch_bytes, synchronise.read_clock):
        collect_functions(function, replacements, functions)
    stages = [_write_stage(number, source, names) for number, source in enumerate(sources)]
    symbols = sorted({p.value for s in sources for p in s.parameters if not p.type.startswith("*")})
    types = dict(OWN_PARAMETERS) | dict.fromkeys(symbols, "i32")
    parameters = tuple(Parameter(parameter, types[parameter], parameter) for parameter in types)
    branches = textwrap.indent("\n".join(_write_branch(n, s) for n, s in enumerate(sources)), " " * 12)
    entry = _ENTRY.format(name=name, signature=", ".join(p.name for p in parameters), branches=branches)
    constants = [f"{key} = tl.constexpr({value})" for key, value in names.constants.items()]
    title = "A decode step as one launch: every program walks the stages of the table in order."
    head = "\n".join([HEADER.format(title=title), *constants])
    alias = f"kernel = {name}  # the entry point; profilers show the longer name"
    tiles = [text.strip() for text in names.functions.values()]
    text = "\n\n\n".join([head, *(t.strip() for t in functions.values()), *tiles, _READ_ROW, *stages, entry, alias])
    ledger = {key: value for source in sources for key, value in source.ledger.items()}
    stages_kept = max(source.num_stages for source in sources)
    return KernelSource(name, text + "\n", parameters, ("programs", "1", "1"), STAGE_WARPS, stages_kept, ledger,
                        lanes=any(source.lanes for source in sources))  # fmt: skip


def count_resident(metadata: dict[str, Any], spec: TargetSpec) -> int:
    """Programs of a compiled kernel that one unit holds at once, from its registers, shared memory and threads.

    NVIDIA: 65536 registers, given out to warps in 256s, and 1 KB of shared memory beside each program's. AMD: 512
    vector registers a lane for the waves of each of four SIMDs, given out in eights. Facts of each architecture's
    occupancy tables.
    """
    warps, shared = int(metadata["num_warps"]), int(metadata["shared"])
    by_threads = spec.threads_per_unit // (warps * spec.warp_size)
    registers = -(-max(int(metadata["registers"]), 1) // 8) * 8
    if spec.backend == "hip":
        by_registers = 4 * (512 // registers) // warps
        by_shared = spec.shared_memory_per_block // max(shared, 1)
    else:
        by_registers = 65536 // (registers * spec.warp_size) // warps
        by_shared = (spec.shared_memory_per_block + 1024) // (shared + 1024)
    return min(by_threads, by_registers, by_shared)
