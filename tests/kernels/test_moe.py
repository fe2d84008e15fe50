"""Kernels of the mixture of experts: choices of every kind, tails, formats, refusals, limits; equal bits every run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.kernel import OpCall, Operand
from mmcompile.core.ops.moe_nvfp4 import nvfp4_quantize_experts
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import pointer
from mmcompile.targets._kernels.moe import TEMPLATES
from mmcompile.targets._kernels.moe_tiles import find_group, tile_sort_pairs

BY_NAME = {t.name: t for t in TEMPLATES}
ROWS = {name: "tokens" for name in ("x", "experts", "weights", "residual", "result")}
OAI = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# A rounding of the gate's exponential may go the other way, and then one of the two projections.
BOUNDS = {BF16: 2e-3, F16: 3e-4, F32: 4e-6}
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]


def choose(kind: str, tokens: int, experts: int, top_k: int) -> Tensor:
    """int32 [tokens, top_k]: distinct experts a token; "one": expert 1 has all; "padded": empty places and tokens."""
    generator = torch.Generator().manual_seed(tokens)
    ranking = torch.rand(tokens, experts, generator=generator)
    if kind == "one":
        ranking[:, 1] += 2
    if kind == "few":
        ranking[:, : experts - top_k] -= 2
    chosen = ranking.argsort(1, descending=True)[:, :top_k].to(torch.int32)
    if kind == "padded":
        chosen[0, 0] = -1
        chosen[tokens // 2 :: 2] = -1
    return chosen


def make_tensors(normal, tokens, k, n, experts, top_k, kind, dtype, quantized, residual=True) -> dict[str, Any]:
    stacks = {"gate_up": normal(experts, 2 * n, k, dtype=F32, scale=k**-0.5),
              "down": normal(experts, k, n, dtype=F32, scale=n**-0.5)}
    tensors: dict[str, Any] = {"x": normal(tokens, k, dtype=dtype), "experts": choose(kind, tokens, experts, top_k)}
    tensors["weights"] = torch.where(tensors["experts"] < 0, math.nan, normal(tokens, top_k, dtype=F32).abs())
    for base, stack in stacks.items():
        if not quantized:
            tensors[base] = stack.to(dtype)
            continue
        parts = nvfp4_quantize_experts(stack)
        tensors |= {f"{base}_{name}": part for name, part in zip(("packed", "scale", "global_scale"), parts,
                                                                 strict=True)}
        tensors[f"{base}_global_scale"] *= 1 + torch.arange(stack.shape[1]) % 3
    return tensors | {"residual": normal(tokens, k, dtype=dtype) if residual else None}


def run(runner, name, tensors, attributes, tokens, everywhere=False) -> list[Any]:
    """Run on every distinct source, or on sm_90a's; check against the reference."""
    shapes = {"rows": ROWS, "symbols": {"tokens": tokens}}
    if everywhere:
        outcomes = runner.run_everywhere(BY_NAME[name], tensors, attributes, **shapes)
    else:
        outcomes = [runner.run_op(BY_NAME[name], tensors, attributes, SPEC, ARCH, **shapes)]
    for outcome in outcomes:
        assert max(outcome.errors) <= BOUNDS[tensors["x"].dtype], outcome.sources[0].name
    return outcomes


# Slots take few weight rows a program where a layer is small, so their interpreted runs are long.
CASES = [
    # template, tokens, k, n, experts, top_k, choice, attributes
    ("moe_nvfp4_slots", 1, 32, 16, 8, 2, "any", OAI),
    ("moe_nvfp4_slots", 3, 32, 32, 5, 1, "padded", {}),
    ("moe_nvfp4_slots", 16, 16, 16, 4, 2, "one", OAI),
    ("moe_nvfp4_group16", 17, 48, 16, 8, 4, "any", OAI),
    ("moe_nvfp4_group16", 18, 32, 32, 6, 3, "padded", {}),
    ("moe_nvfp4_group16", 33, 32, 16, 5, 2, "one", {}),
    ("moe_nvfp4_group64", 70, 32, 32, 8, 2, "few", OAI),
    ("moe_nvfp4_group64", 3, 80, 16, 4, 2, "padded", {}),
    ("moe_slots", 3, 24, 12, 5, 2, "padded", OAI),
    ("moe_group16", 17, 40, 20, 4, 2, "one", {}),
    ("moe_group64", 33, 24, 12, 8, 3, "any", OAI),
]
SLOW_CASES = [
    ("moe_nvfp4_slots", 1, 80, 48, 8, 4, "any", OAI),
    ("moe_nvfp4_slots", 5, 32, 32, 6, 3, "padded", OAI),
    ("moe_nvfp4_slots", 16, 320, 32, 8, 4, "any", {}),
    ("moe_slots", 16, 80, 40, 4, 4, "any", OAI),
    ("moe_nvfp4_group64", 131, 80, 48, 7, 4, "any", OAI),
    ("moe_group64", 131, 100, 50, 7, 4, "padded", OAI),
]


@pytest.mark.parametrize(("name", "tokens", "k", "n", "experts", "top_k", "kind", "attributes"), [
    *CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)
])
def test_matches_reference(runner, normal, name, tokens, k, n, experts, top_k, kind, attributes):
    tensors = make_tensors(normal, tokens, k, n, experts, top_k, kind, BF16, "nvfp4" in name)
    run(runner, name, tensors, attributes, tokens, everywhere=kind == "any")


@pytest.mark.parametrize("name", ["moe_nvfp4_slots", "moe_nvfp4_group16", "moe_slots", "moe_group64"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.slow
def test_other_dtypes_without_residual(runner, normal, name, dtype):
    tensors = make_tensors(normal, 2, 16, 16, 4, 2, "any", dtype, "nvfp4" in name, residual=False)
    tensors["experts"] = tensors["experts"].long()
    run(runner, name, tensors, OAI, 2)


@pytest.mark.parametrize("name", ["moe_nvfp4_slots", "moe_nvfp4_group16"])
def test_a_token_may_choose_an_expert_twice(runner, normal, name):
    tensors = make_tensors(normal, 2, 16, 16, 4, 3, "any", BF16, True)
    tensors["experts"] = torch.tensor([[2, 0, 2], [1, 1, 1]], dtype=torch.int32)
    run(runner, name, tensors, OAI, 2)


@pytest.mark.parametrize("name", ["moe_nvfp4_slots", "moe_nvfp4_group64"])
def test_strided_rows(runner, normal, name):
    """Rows of x, the choice and the residual inside wider buffers whose other columns are NaN or out of range."""
    tensors = make_tensors(normal, 2, 16, 16, 4, 2, "any", BF16, True)
    for key, garbage in (("x", math.nan), ("residual", math.nan), ("weights", math.nan), ("experts", 1 << 30)):
        wide = torch.full((2, tensors[key].shape[1] + 3), garbage, dtype=tensors[key].dtype)
        wide[:, : tensors[key].shape[1]] = tensors[key]
        tensors[key] = wide[:, : tensors[key].shape[1]]
    run(runner, name, tensors, OAI, 2)


@pytest.mark.parametrize("name", ["moe_nvfp4_slots", "moe_nvfp4_group16"])
def test_every_run_gives_the_same_bits(runner, normal, name):
    tensors = make_tensors(normal, 4, 16, 16, 4, 2, "any", BF16, True)
    first, second = (
        runner.run_op(BY_NAME[name], tensors, OAI, SPEC, ARCH, rows=ROWS, symbols={"tokens": 4}) for _ in range(2)
    )
    assert torch.equal(first.results[0].view(torch.int16), second.results[0].view(torch.int16))


def test_the_slots_of_later_pairs_do_nothing(interpreter, normal, call_of):
    """Programs of an expert's second pair leave their hidden rows alone: its weights are read once."""
    tensors = make_tensors(normal, 2, 16, 16, 4, 2, "any", BF16, True)
    tensors["experts"] = torch.tensor([[3, 1], [1, -1]], dtype=torch.int32)
    call = call_of("moe_nvfp4", tensors, OAI, ROWS, [tensors["x"]])
    source = BY_NAME["moe_nvfp4_slots"].emit(call, SPEC, ARCH)[0]
    pool = tensors | {"scratch:hidden": torch.full((4, 16), math.nan, dtype=BF16), "tokens": 2}
    programs = int(source.grid[0].replace("tokens", "2").split("*")[1]) // 2
    tiles = [(2 * programs + i, 0, 0) for i in range(programs)]
    values = [p.value for p in source.parameters]
    after = interpreter.run(source, [pool[v] for v in values], (4 * programs, 1, 1), tiles)
    assert bool(after[values.index("scratch:hidden")].isnan().all())


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_sort_gives_every_expert_its_pairs_in_order(interpreter, data):
    tokens, top_k, experts = (data.draw(st.integers(1, top)) for top in (40, 4, 9))
    choice = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    chosen = torch.tensor(data.draw(st.lists(choice, min_size=tokens, max_size=tokens)), dtype=torch.int32)
    constants = {"STRIDE": top_k, "TOP_K": top_k, "EXPERTS": experts, "BLOCK": 32}
    integers = Operand((1,), (1,), "int32")
    source = emit_kernel(
        name="sort", title="sort", tiles=[tile_sort_pairs], constants=constants, grid=(str(experts), "1", "1"),
        parameters=[pointer(name, integers) for name in ("experts", "pairs", "offsets")],
        body=f"tile_sort_pairs(tl.program_id(0), experts, pairs, offsets, {tokens}, {', '.join(constants)})",
    )
    empty = torch.full((tokens * top_k,), -7, dtype=torch.int32), torch.zeros(experts + 1, dtype=torch.int32)
    _, pairs, offsets = interpreter.run(source, [chosen, *empty], (experts, 1, 1))
    flat = chosen.flatten()
    expected = [torch.where(flat == e)[0] for e in range(experts)]
    assert offsets.tolist() == [0, *torch.tensor([len(e) for e in expected]).cumsum(0).tolist()]
    assert pairs[: offsets[-1]].tolist() == torch.cat(expected).tolist()
    assert bool((pairs[offsets[-1] :] == -7).all())


def test_tiles_belong_to_one_expert(interpreter):
    """Experts of 0, 5, 4, 0, 9 pairs in tiles of 4."""
    offsets = torch.tensor([0, 0, 5, 9, 9, 18], dtype=torch.int32)
    integers = Operand((1,), (1,), "int32")
    source = emit_kernel(
        name="find", title="find", tiles=[find_group], constants={}, grid=("8", "1", "1"),
        parameters=[pointer(name, integers) for name in ("offsets", "out")],
        body="""
        tile = tl.program_id(0)
        expert, begin, end = find_group(tile, offsets, 5, 8, 4)
        tl.store(out + 3 * tile, expert)
        tl.store(out + 3 * tile + 1, begin)
        tl.store(out + 3 * tile + 2, end)
        """,
    )
    found = interpreter.run(source, [offsets, torch.zeros(24, dtype=torch.int32)], (8, 1, 1))[1].view(8, 3).tolist()
    assert found[:6] == [[1, 0, 5], [1, 4, 5], [2, 5, 9], [4, 9, 18], [4, 13, 18], [4, 17, 18]]
    assert all(expert >= 5 for expert, _, _ in found[6:])


def _zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("change", "attributes", "words"), [
    ({"x": _zeros(2, 32, dtype=torch.float64)}, {}, "x is float64"),
    ({"x": _zeros(2, 16, 2)}, {}, "3 dimensions"),
    ({"residual": _zeros(2, 32, dtype=F32)}, {}, "residual is float32 and x bfloat16"),
    ({"experts": _zeros(2, 2, dtype=torch.uint8)}, {}, "experts are uint8"),
    ({"weights": _zeros(2, 2)}, {}, "weights bfloat16"),
    ({"experts": _zeros(2, 4, dtype=torch.int32)[:, ::2]}, {}, "rows of experts must be contiguous"),
    ({"experts": _zeros(2, 40, dtype=torch.int32)}, {}, "40 experts a token"),
    ({"gate_up_packed": _zeros(4, 32, 16, dtype=torch.int32)}, {}, "gate_up_packed is int32, not uint8"),
    ({"gate_up_scale": _zeros(4, 32, 2, dtype=torch.uint8)}, {}, "gate_up_scale is uint8, not float8_e4m3fn"),
    ({"down_packed": _zeros(4, 32, 16, dtype=torch.uint8)[:, :, ::2]}, {}, "down_packed must have"),
    ({"gate_up_packed": _zeros(4, 32, 17, dtype=torch.uint8)[:, :, :16]}, {}, "multiples of 4 bytes"),
    ({}, {"activation": "gelu"}, "activation gelu"),
], ids=str)
def test_refusals_say_why(call_of, normal, change, attributes, words):
    tensors = make_tensors(normal, 2, 32, 16, 4, 2, "any", BF16, True) | change
    call = call_of("moe_nvfp4", tensors, attributes, ROWS, [tensors["x"]])
    for template in TEMPLATES[:3]:
        assert words in template.refuse(call, SPEC, ARCH)


def test_dense_refusals_say_why(call_of, normal):
    tensors = make_tensors(normal, 2, 32, 16, 4, 2, "any", BF16, False)
    call = call_of("moe", tensors | {"down": tensors["down"].float()}, {}, ROWS, [tensors["x"]])
    assert TEMPLATES[3].refuse(call, SPEC, ARCH) == "down is float32, not bfloat16"


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    """Contiguous."""
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, tuple(inner), dtype)


def minimax_call(op: str, experts: int = 128, n: int = 3072, k: int = 6144, top_k: int = 4) -> OpCall:
    """The experts of MiniMax-M3.1-Flash."""
    choice = {"experts": operand("tokens", top_k, dtype="int32"), "weights": operand("tokens", top_k, dtype="float32")}
    stacks = {"gate_up": (2 * n, k), "down": (k, n)}
    weights = {base: operand(experts, *shape) for base, shape in stacks.items()}
    if op == "moe_nvfp4":
        weights = {f"{base}_packed": operand(experts, rows, cols // 2, dtype="uint8")
                   for base, (rows, cols) in stacks.items()}
        weights |= {f"{base}_scale": operand(experts, rows, cols // 16, dtype="float8_e4m3fn")
                    for base, (rows, cols) in stacks.items()}
        weights |= {f"{base}_global_scale": operand(experts, rows, dtype="float32")
                    for base, (rows, _) in stacks.items()}
    x = operand("tokens", k)
    return OpCall(op, {"x": x, **choice, **weights, "residual": x}, (x,), OAI)


PLACES = [
    pytest.param(t, a, id=a.name, marks=[] if a.name in ("sm_90a", "gfx950") else [pytest.mark.slow])
    for t in TARGETS if t.spec.backend for a in t.spec.architectures
]


@pytest.mark.parametrize(("target", "architecture"), PLACES)
@pytest.mark.parametrize("name", [
    "moe_nvfp4_slots", *(pytest.param(n, marks=pytest.mark.slow) for n in BY_NAME if n != "moe_nvfp4_slots")
])
@pytest.mark.slow
def test_compiles_within_the_limits(name, target, architecture):
    template = BY_NAME[name]
    call = minimax_call(template.op)
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        assert target.check(compiled) == [] and compiled.metadata["spills"] == 0
