"""Parsing of modules, operands and statements, and the cut into basic blocks."""

from __future__ import annotations

import pytest
from snippets import make_module

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.parser import Operand, parse_module, parse_operand, parse_variable, split_commas
from mmcompile.emulate.ptx.program import Program, load_program

REGISTERS = {name: Operand("register", index=i, width=4, name=name) for i, name in enumerate(("%r1", "%r2", "%rd1"))}


def parse(text: str) -> Operand:
    return parse_operand(text, REGISTERS.get)


def test_commas_inside_brackets_do_not_split() -> None:
    assert split_commas("{%r1, %r2}, [%rd1 + 4], (a, b)") == ["{%r1, %r2}", "[%rd1 + 4]", "(a, b)"]


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("-7", -7), ("0x1F", 31), ("010", 8), ("3U", 3), ("-0x10", -16), ("0", 0)]
)
def test_integer_literals(text: str, value: int) -> None:
    assert parse(text).integer == value


@pytest.mark.parametrize(
    ("text", "value"), [("0f3F800000", 1.0), ("0fBF000000", -0.5), ("0d4000000000000000", 2.0), ("1.5", 1.5)]
)
def test_float_literals(text: str, value: float) -> None:
    operand = parse(text)
    assert operand.kind == "float"
    assert operand.value == value


@pytest.mark.parametrize(
    ("text", "offset"), [("[%rd1]", 0), ("[ %rd1 + 12 ]", 12), ("[%rd1+-8]", -8), ("[%rd1 + 0x10]", 16)]
)
def test_memory_operands(text: str, offset: int) -> None:
    operand = parse(text)
    assert operand.kind == "memory"
    assert operand.base is REGISTERS["%rd1"]
    assert operand.offset == offset


def test_coordinates_pairs_vectors_and_sinks() -> None:
    tensor = parse("[%rd1, {%r1, %r2}]")
    assert [part.name for part in tensor.parts[0].parts] == ["%r1", "%r2"]
    assert [part.name for part in parse("%r1|%r2").parts] == ["%r1", "%r2"]
    assert parse("_").kind == "sink"
    assert parse("!%r1").base is REGISTERS["%r1"]


def test_unknown_operand_is_refused() -> None:
    with pytest.raises(EmulationFault, match="unknown operand '%nothing'"):
        parse("%nothing")


def test_variables() -> None:
    assert parse_variable(".align 16 .b8 x[10]") == (16, 1, "x", 10, "")
    assert parse_variable(".b32 y") == (4, 4, "y", 1, "")
    assert parse_variable(".align 1 .b8 s[3] = {1, 2, 3}")[4] == "1, 2, 3"
    assert parse_variable(".align 16 .b8 dynamic[]")[3] is None


def test_module_with_parameters_shared_and_global_variables() -> None:
    text = """
.extern .shared .align 16 .b8 global_smem[];
.global .align 1 .b8 name[4] = {1, 2, 3};
.shared .align 8 .b8 first[12]; .shared .align 16 .b8 second[4];
.visible .entry k(.param .u32 n, .param .u64 .ptr .global .align 1 p, .param .align 64 .b8 map[128])
.reqntid 64
{ ret; }
"""
    module = parse_module(text)
    function = module.functions["k"]
    assert function.parameters == {"n": (0, 4), "p": (8, 8), "map": (64, 128)}
    assert function.parameter_bytes == 192
    assert module.shared == {"global_smem": None, "first": 0, "second": 16}
    assert module.globals["name"] == bytes([1, 2, 3, 0])


def test_lines_survive_comments() -> None:
    text = make_module("/* two\nlines */ // and this\n add.u32 %r, %a, %b;")
    program = load_program(text, "k")
    (add,) = [i for i in program.instructions if i.form == "add.u32"]
    assert "add.u32 %r" in text.split("\n")[add.line - 1]


def test_registers_of_inner_scopes_hide_outer_ones() -> None:
    body = "mov.b32 %r, 1; { .reg .b32 %r; mov.b32 %r, 2; } mov.b32 %r, 3;"
    program = load_program(make_module(body), "k")
    targets = [i.operands[0].index for i in program.instructions if i.op == "mov" and i.operands[1].kind == "immediate"]
    assert targets[0] == targets[2] != targets[1]


def test_blocks_end_at_labels_branches_and_barriers() -> None:
    body = "mov.b32 %r, 0; bar.sync 0; L: add.u32 %r, %r, 1; setp.lt.u32 %p, %r, 4; @%p bra L; mov.b32 %x, 1;"
    program = load_program(make_module(body, head="", tail="ret;"), "k")
    blocks = [[i.op for i in program.block_instructions(b)] for b in range(len(program.starts) - 1)]
    assert blocks == [["mov"], ["bar"], ["add", "setp", "bra"], ["mov", "exit"], ["exit"]]
    assert program.block_instructions(2)[-1].targets == [2]


def test_a_called_function_is_inlined_with_its_own_labels() -> None:
    outside = """
.func (.param .b32 result) twice(.param .b32 value)
{ .reg .b32 %v; ld.param.b32 %v, [value]; bra DONE; DONE: add.u32 %v, %v, %v; st.param.b32 [result], %v; ret; }
"""
    body = """
{ .param .b32 in; .param .b32 out; st.param.b32 [in], %a; call.uni (out), twice, (in); ld.param.b32 %r, [out]; }
{ .param .b32 in; .param .b32 out; st.param.b32 [in], %r; call.uni (out), twice, (in); ld.param.b32 %r, [out]; }
"""
    program = load_program(make_module(body, outside=outside), "k")
    assert [i.op for i in program.instructions].count("bra") == 4


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("bra NOWHERE;", "unknown label NOWHERE"),
        (".strange x;", "unknown directive .strange"),
        ("@%nothing mov.b32 %r, 1;", "unknown predicate"),
        ("mov.b32 %r, %nothing;", "unknown operand"),
    ],
)
def test_malformed_texts_are_refused_with_their_line(body: str, what: str) -> None:
    with pytest.raises(EmulationFault, match=what) as caught:
        Program(parse_module(make_module(body)), "k")
    assert caught.value.kind == "malformed assembly"
    assert caught.value.line


def test_unknown_kernel_and_unclosed_body() -> None:
    with pytest.raises(EmulationFault, match="no kernel 'other'"):
        load_program(make_module(""), "other")
    with pytest.raises(EmulationFault, match="malformed"):
        parse_module(".visible .entry k() { mov.b32 %r, 1")
