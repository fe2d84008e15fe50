"""Tuned experts of sm90: emulated assembly against reference and portable kernels, choice by shape, refusals."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mmcompile.core.discover import load_module
from mmcompile.core.formats import nvfp4_fragments
from mmcompile.core.ops.moe_nvfp4 import moe_nvfp4
from mmcompile.lower.select import Selector
from mmcompile.targets._kernels import moe
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._tuned.moe_fragments import TEMPLATES
from tests.kernels.conftest import evaluate, guard_is_intact, make_call, poisoned_like, relative_error
from tests.kernels.emulated import run_emulated
from tests.kernels.test_moe import BOUNDS, OAI, ROWS, make_tensors, minimax_call

TARGET = load_module("targets", "sm90").TARGET
SPEC, ARCH = TARGET.spec, TARGET.spec.architectures[0]
BY_NAME = {t.name.removeprefix("moe_nvfp4_"): t for t in (*TEMPLATES, *moe.TEMPLATES)}
BF16, F16 = torch.bfloat16, torch.float16

CASES = {
    # template, tokens, k, n, experts, top_k, choice, attributes, dtype
    "empty places": ("slot_lanes", 3, 256, 256, 4, 2, "padded", OAI, BF16),
    "one token": ("only_token", 1, 512, 768, 4, 3, "any", OAI, BF16),
    "eight places": ("only_token", 1, 256, 256, 8, 8, "any", {}, F16),
    "one expert has all": ("slot_lanes", 16, 512, 256, 8, 4, "one", OAI, BF16),
    "five tokens": ("slot_lanes", 5, 256, 512, 32, 3, "any", {}, BF16),
    "more pairs than columns": ("group_lanes32", 20, 256, 256, 4, 1, "one", {}, BF16),
    "pairs of 16 experts": ("group_lanes32", 18, 512, 256, 16, 2, "padded", OAI, F16),
    "narrow tiles": ("fragments64_128", 70, 256, 256, 8, 2, "padded", OAI, BF16),
    "more pairs than a tile": ("fragments128", 140, 512, 256, 4, 2, "one", {}, BF16),
}


def poison_unused(tensors):
    """NaN scales in the experts that nobody chose; an error of reading them shows in every result."""
    chosen = torch.unique(tensors["experts"][tensors["experts"] >= 0])
    unused = [e for e in range(len(tensors["down_packed"])) if e not in chosen]
    for base in ("gate_up", "down"):
        tensors[f"{base}_scale"].view(torch.uint8)[unused] = 0x7F
        tensors[f"{base}_global_scale"][unused] = math.nan
    return tensors


def describe(tensors, attributes, tag=None):
    """The call, with the weights in fragment order if it is so wanted or ``tag`` is given."""
    call = make_call("moe_nvfp4", tensors, attributes, ROWS, [tensors["x"].contiguous()])
    wanted = TEMPLATES[0].layouts(call, SPEC, ARCH)
    for name in wanted:
        operand = call.operands[name]
        call.operands[name] = dataclasses.replace(operand, layout=wanted[name] if tag is None else tag)
    return call


def run(template, call, tensors):
    """The result of a template in the emulator."""
    tokens = len(tensors["x"])
    arranged = {n: nvfp4_fragments.arrange_as(tensors[n], operand.layout) for n, operand in call.operands.items()
                if operand is not None and operand.layout != "linear"}  # fmt: skip
    pool = {**tensors, **arranged, "result": poisoned_like(tensors["x"].contiguous()), "tokens": tokens}
    for scratch in template.scratch(call, SPEC):
        shape = [evaluate(size, {"tokens": tokens}) for size in scratch.shape]
        pool[f"scratch:{scratch.name}"] = poisoned_like(torch.empty(shape, dtype=getattr(torch, scratch.dtype)))
    assert template.refuse(call, SPEC, ARCH) is None
    run_emulated(TARGET, template.emit(call, SPEC, ARCH), pool, {"tokens": tokens}, {"result"})
    assert guard_is_intact(pool["result"])
    return pool["result"]


def swap_gate_and_up(tensors):
    turned = {n: torch.cat(t.view(t.dtype).chunk(2, 1)[::-1], 1) for n, t in tensors.items() if "gate_up" in n}
    return tensors | turned


@pytest.mark.parametrize("case", [
    pytest.param(c, id=n, marks=[] if n == "empty places" else pytest.mark.slow) for n, c in CASES.items()
])
def test_matches_reference(normal, case):
    name, *shape, attributes, dtype = case
    tensors = poison_unused(make_tensors(normal, *shape, dtype, True))
    result = run(BY_NAME[name], describe(tensors, attributes), tensors)
    assert relative_error(result, moe_nvfp4(**tensors, **attributes)) <= BOUNDS[dtype]
    # Near misses are far off: the other order of gate and up, the other activation, the scales of another expert.
    others = [{}, OAI] if not attributes else [OAI, {}]
    assert relative_error(result, moe_nvfp4(**swap_gate_and_up(tensors), **attributes)) > 0.05
    assert relative_error(result, moe_nvfp4(**tensors, **others[1])) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("tuned", "portable", "tokens"), [("slot_lanes", "slots", 2), ("fragments128", "group64", 20)])
def test_agrees_with_the_portable_kernels(normal, tuned, portable, tokens):
    """Both in the emulator: fragments and row-major weights, a choice in int64, rows inside wider buffers of NaN."""
    tensors = poison_unused(make_tensors(normal, tokens, 256, 256, 8, 2, "padded", BF16, True))
    tensors["experts"] = tensors["experts"].long()
    for key, garbage in (("x", math.nan), ("residual", math.nan), ("weights", math.nan), ("experts", 1 << 30)):
        wide = torch.full((tokens, tensors[key].shape[1] + 8), garbage, dtype=tensors[key].dtype)
        wide[:, : tensors[key].shape[1]] = tensors[key]
        tensors[key] = wide[:, : tensors[key].shape[1]]
    first, second = (
        run(BY_NAME[name], describe(tensors, OAI, tag), tensors) for name, tag in ((tuned, None), (portable, "linear"))
    )
    assert relative_error(first, second) <= BOUNDS[BF16]


def call_of(experts, n, k, top_k, layout=True):
    call = minimax_call("moe_nvfp4", experts, n, k, top_k)
    wanted = TEMPLATES[0].layouts(call, SPEC, ARCH)
    return dataclasses.replace(call, operands={
        name: dataclasses.replace(o, layout=wanted.get(name, "linear") if layout else "linear") if o else None
        for name, o in call.operands.items()
    })  # fmt: skip


@pytest.mark.parametrize(("shape", "expected"), [
    ((128, 3072, 6144, 4), ["only_token", "slot_lanes", "group_lanes256", "fragments64_1024", "fragments128"]),
    ((8, 14336, 4096, 2), ["only_token", "slot_lanes", "group_lanes32", "fragments64_128", "fragments128"]),
    ((128, 768, 2048, 8), ["only_token", "slot_lanes", "group_lanes128", "fragments64_512", "fragments128"]),
    ((4, 512, 512, 2), ["only_token", "slot_lanes", "fragments128"]),
    ((64, 512, 512, 10), ["slot_lanes", "group_lanes32", "fragments64_256", "fragments128"]),
], ids=["MiniMax-M3", "Mixtral-8x7B", "Qwen3-30B-A3B", "few experts", "ten places"])  # fmt: skip
def test_choice_by_shape(shape, expected):
    chosen, _ = Selector(SPEC, list_kernels(SPEC)).select(call_of(*shape), 8192)
    assert [c.template.removeprefix("moe_nvfp4_") for c in chosen] == expected
    assert all("atomic" not in source.text for c in chosen for source in c.sources)


@pytest.mark.parametrize(("shape", "reason"), [
    ((32, 2880, 2880, 4), "[5760, 2880] is not made of tiles of 16 rows by 256"),
    ((8, 272, 512, 2), "[512, 272] is not made of tiles of 16 rows by 256"),
])
def test_other_shapes_stay_portable_and_say_why(shape, reason):
    call = call_of(*shape)
    chosen, _ = Selector(SPEC, list_kernels(SPEC)).select(call, 8192)
    assert [c.template for c in chosen] == [f"moe_nvfp4_{name}" for name in ("slots", "group16", "group64")]
    assert all(reason in c.reason for c in chosen)
    assert Selector(SPEC, list_kernels(SPEC)).propose_layouts(call) == {}


def test_the_layout_decides_which_kernels_serve():
    selector = Selector(SPEC, list_kernels(SPEC))
    chosen, _ = selector.select(call_of(8, 512, 512, 2, layout=False), 512)
    assert chosen[0].template == "moe_nvfp4_slots" and "the experts are row-major" in chosen[0].reason
    call = call_of(8, 512, 512, 2)
    call.operands["down_scale"] = dataclasses.replace(call.operands["down_scale"], layout="nvfp4_fragments_float16")
    chosen, reason = selector.select(call, 512)
    assert chosen == () and "down_scale has the layout nvfp4_fragments_float16, not nvfp4_fragments_bfloat16" in reason
    assert "moe_nvfp4_slots: gate_up_packed has the layout nvfp4_fragments_bfloat16" in reason
    assert Selector(SPEC, list_kernels(SPEC), portable=True).propose_layouts(call) == {}


def test_near_misses_stay_row_major():
    """Padded scale columns, another activation, fp32 activations: no fragments."""
    call = minimax_call("moe_nvfp4", 8, 512, 512, 2)
    assert len(TEMPLATES[0].layouts(call, SPEC, ARCH)) == 4
    padded = dataclasses.replace(call.operands["down_scale"], strides=(512 * 48, 48, 1))
    for change, attributes, reason in (
        ({"down_scale": padded}, OAI, "down_scale lies in a wider buffer"),
        ({}, {"activation": "gelu"}, "activation gelu"),
        ({name: dataclasses.replace(call.operands["x"], dtype="float32") for name in ("x", "residual")}, OAI, "x is"),
    ):
        other = dataclasses.replace(call, operands=call.operands | change, attributes=attributes)
        assert TEMPLATES[0].layouts(other, SPEC, ARCH) == {}
        assert all(reason in template.refuse(other, SPEC, ARCH) for template in TEMPLATES)


@pytest.mark.parametrize("name", ["sm100", "sm107", "gfx950"])
def test_other_targets_keep_experts_row_major(name):
    spec = load_module("targets", name).TARGET.spec
    call = minimax_call("moe_nvfp4")
    assert Selector(spec, list_kernels(spec)).propose_layouts(call) == {}
