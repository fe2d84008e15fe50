"""Merged kernels: colliding names, constants that functions read, what is refused, how many programs fit."""

from __future__ import annotations

import ast
import builtins
from dataclasses import replace

import pytest

from mmcompile.core.kernel import KernelParts, KernelSource, Parameter
from mmcompile.driver.targets import load_target
from mmcompile.targets._merge import _free_names, _Names, _rename, count_resident, merge_kernels, refuse_merge

SPEC = load_target("sm90").spec
POINTER = Parameter("x_pointer", "*bf16", "x")
COUNT = Parameter("count", "i32", "tokens")


def function(name: str, body: str, parameters: str = "x") -> tuple[str, str]:
    return name, f"@triton.jit\ndef {name}({parameters}):\n    {body}"


def source(name: str, *functions: tuple[str, str], body: str = "tile(x_pointer)", **changes) -> KernelSource:
    parts = KernelParts(functions, changes.pop("constants", ()), body, changes.pop("prefetch", ""))
    return KernelSource(name, "", (POINTER, COUNT), ("tokens", "1", "1"), parts=parts, **changes)


def merge(*sources: KernelSource) -> ast.Module:
    return ast.parse(merge_kernels("merged", sources, SPEC).text)


def find_functions(module: ast.Module) -> dict[str, str]:
    """Text by name; a name that is defined twice fails."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            assert node.name not in found, node.name
            found[node.name] = ast.unparse(node)
    return found


def find_called(text: str) -> set[str]:
    return {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def test_equal_functions_are_shared_and_different_ones_get_a_number() -> None:
    helper = function("helper", "return x + 1")
    tile = function("tile", "return helper(x)")
    other = function("helper", "return x + 2")
    functions = find_functions(merge(source("a", helper, tile), source("b", helper, tile), source("c", other, tile)))
    assert "return x + 1" in functions["helper"] and "return x + 2" in functions["helper_2"]
    assert find_called(functions["tile"]) == {"helper"} and find_called(functions["tile_2"]) == {"helper_2"}
    assert find_called(functions["stage_0"]) == find_called(functions["stage_1"]) == {"tile"}
    assert find_called(functions["stage_2"]) == {"tile_2"}


def test_a_number_never_takes_the_name_of_another_function() -> None:
    """Stage 1 renames its tile; stage 0 has a function of just that name."""
    taken = (function("tile_1", "return x * 5"), function("tile", "return tile_1(x)"))
    functions = find_functions(merge(source("a", *taken), source("b", function("tile", "return x * 7"))))
    assert "x * 5" in functions["tile_1"]
    (called,) = find_called(functions["stage_1"])
    assert "x * 7" in functions[called]


def test_renaming_leaves_attributes_and_keywords_alone() -> None:
    text = "y = tl.dot(x, dot(x, dot=dot), acc=dot)\nx.dot(dot)"
    assert _rename(text, {"dot": "dot_3"}) == "y = tl.dot(x, dot_3(x, dot=dot_3), acc=dot_3)\nx.dot(dot_3)"
    assert _rename('"dot"  # dot\ndot  # é dot', {"dot": "d"}) == '"dot"  # dot\nd  # é dot'
    assert _rename("def dot(x):\n    return 'é', dot(x)", {"dot": "d"}) == "def d(x):\n    return 'é', d(x)"


def test_a_parameter_hides_a_constant_of_the_same_name() -> None:
    tile, inner = function("tile", "return inner(x, WIDTH=WIDTH)"), function("inner", "return x * WIDTH", "x, WIDTH")
    outer = function("outer", "return tile(x)")
    functions = find_functions(
        merge(source("a", tile, inner, outer, constants=(("WIDTH", "8"),), body="outer(x_pointer)"))
    )
    assert "inner(x, WIDTH=WIDTH_0)" in functions["tile"] and "x * WIDTH\n" in functions["inner"] + "\n"


def test_constants_that_functions_read_become_the_stage_s_own() -> None:
    tile = function("tile", "return x + WIDTH")
    first, second = (source(n, tile, body="tile(x_pointer + WIDTH)", constants=(("WIDTH", v),))
                     for n, v in (("a", "64"), ("b", "128")))  # fmt: skip
    module = merge(first, second)
    constants = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in module.body if isinstance(n, ast.Assign)}
    functions = find_functions(module)
    for stage, value in ((0, "64"), (1, "128")):
        (called,) = find_called(functions[f"stage_{stage}"])
        (constant,) = _free_names(functions[called]) - {"triton"}
        assert constants[constant] == f"tl.constexpr({value})"
        assert f"WIDTH: tl.constexpr = {value}" in functions[f"stage_{stage}"]


def test_loops_keep_the_pipeline_that_they_have_alone() -> None:
    """A deep pipeline of one stage must not take registers in the loops of another; a depth that is said stays."""
    loop = function("tile", "for i in range(0,\n            8):  # é\n        x += i\n    return x")
    said = function("other", "for i in tl.range(8, num_stages=1):\n        x += i\n    return x")
    fixed = function("third", "for i in tl.static_range(8):\n        x += i\n    return x")
    sources = [source("a", loop, num_stages=1), source("b", loop, num_stages=4), source("c", loop, num_stages=4)]
    sources += [source("d", said, body="other(x_pointer)", num_stages=3), source("e", fixed, body="third(x_pointer)")]
    merged = merge_kernels("merged", sources, SPEC)
    functions = find_functions(ast.parse(merged.text))
    assert "tl.range(0, 8, num_stages=1)" in functions["tile"] and merged.num_stages == 4
    assert "tl.range(0, 8, num_stages=4)" in functions["tile_1"] and "tile_2" not in functions
    assert "tl.range(8, num_stages=1)" in functions["other"] and "tl.static_range(8)" in functions["third"]


def test_an_operand_may_be_called_gate() -> None:
    parts = KernelParts((function("tile", "return gate", "gate"),), (), "tile(gate)")
    swiglu = KernelSource("a", "", (Parameter("gate", "*bf16", "gate"),), ("1", "1", "1"), parts=parts)
    functions = find_functions(ast.parse(merge_kernels("merged", [swiglu], SPEC).text))
    assert "def stage_0(program_0, program_1, program_2, gate)" in functions["stage_0"]
    assert "stage_0(tile % x, tile // x % y, tile // (x * y), a0)" in functions["merged"]


def test_nothing_in_a_merged_text_is_undefined() -> None:
    tile = function("tile", "return x + WIDTH")
    module = merge(
        source("a", tile, constants=(("WIDTH", "64"),), prefetch="prefetch_bytes(x_pointer + tl.program_id(1), 16)"),
        source("b", function("tile", "return x * DEPTH"), constants=(("DEPTH", "2"),)),
    )
    defined = {n.name for n in module.body if isinstance(n, ast.FunctionDef)} | {"tl", "triton", *dir(builtins)}
    defined |= {ast.unparse(n.targets[0]) for n in module.body if isinstance(n, ast.Assign)}
    for name, text in find_functions(module).items():
        constants = {n.target.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.AnnAssign)}
        assert _free_names(text) - constants <= defined, name
    assert "program_id" not in find_functions(module)["prefetch_0"]


def test_arguments_come_from_the_table_and_symbols_from_the_launch() -> None:
    merged = merge_kernels("merged", [source("a", function("tile", "return x"))], SPEC)
    names = [parameter.name for parameter in merged.parameters]
    assert names[:2] == ["table", "counters"] and names[-3:] == ["first", "last", "tokens"]
    assert "a0 = load_pointer(row, 0, program, tl.bfloat16)" in merged.text
    assert merged.grid == ("programs", "1", "1") and merged.num_warps == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_warps": 8}, "8 warps"),
        ({"num_warps": 2, "lanes": True}, "2 warps"),
        ({"body": "tile(x_pointer, tl.num_programs(0))"}, "number of programs"),
        ({"functions": function("tile", "return tl.program_id(0)")}, "place in the grid"),
        ({"parts": None}, "tile functions"),
        ({"num_warps": 2}, None),
        ({}, None),
    ],
)
def test_what_cannot_become_a_stage_is_refused(changes: dict, reason: str | None) -> None:
    changes = dict(changes)
    given = source("a", changes.pop("functions", function("tile", "return x")), **{
        k: changes.pop(k) for k in ("body",) if k in changes
    })  # fmt: skip
    found = refuse_merge(replace(given, **changes))
    assert found is None if reason is None else reason in found


def test_names_of_two_bodies_of_one_stage_agree() -> None:
    """A stage's body and its prefetch are taken in one after the other."""
    names = _Names()
    names.add(KernelParts((function("tile", "return x"),), (), "tile(x)"), 0, 2)
    parts = KernelParts((function("tile", "return x + N"),), (("N", "4"),), "tile(x)")
    bodies = [names.add(replace(parts, body=body), 1, 2)[0] for body in ("tile(x)", "tile(x + N)")]
    (called,) = find_called(bodies[0])
    assert find_called(bodies[1]) == {called} and "N" in bodies[1].split("+")[1]
    assert len(names.functions) == 2 and list(names.constants.values()) == ["4"]


@pytest.mark.parametrize(
    ("target", "metadata", "resident"),
    [
        ("sm90", {"registers": 128, "shared": 0}, 4),
        ("sm90", {"registers": 129, "shared": 0}, 3),
        ("sm90", {"registers": 32, "shared": 100 * 1024}, 2),
        ("sm107", {"registers": 32, "shared": 0}, 8),
        ("gfx950", {"registers": 512, "shared": 0}, 1),
        ("gfx950", {"registers": 128, "shared": 0}, 4),
        ("gfx950", {"registers": 64, "shared": 80 * 1024}, 2),
    ],
)
def test_resident_programs_follow_registers_shared_memory_and_threads(target, metadata, resident) -> None:
    assert count_resident({"num_warps": 4, **metadata}, load_target(target).spec) == resident
