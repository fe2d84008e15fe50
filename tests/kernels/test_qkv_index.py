"""QKV kernels with an indexer against their references: both caches, weight formats, LoRA deltas, empty slots."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.formats import mxfp8
from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.core.ops.linear import nvfp4_quantize
from mmcompile.core.ops.rope import rope
from mmcompile.core.spec import Architecture
from mmcompile.lower.select import Selector
from mmcompile.targets._kernels import qkv, qkv_index, two_step
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._target import Target

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# The sums run in another order, so a value may land on the other side of a rounding border (in float8: a large step).
BOUNDS = {BF16: 2e-3, F16: 3e-4, F32: 2e-6, F8: 4e-3}
ROWS = {name: "tokens" for name in ("qkv", "x", "delta", "positions", "slot_mapping", "result")}
BY_NAME = {t.name: t for t in (*qkv_index.TEMPLATES, *two_step.NARROW, *two_step.TEMPLATES)}
INSERT = BY_NAME["qk_norm_rope_insert_index"]
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]
PAGES, PAGE_SIZE, MAX_POSITIONS = 5, 8, 50

CASES = {
    # heads, kv heads, index heads, head_dim, rotary, k, dtype, cache dtype, index cache dtype
    "half rotary": (4, 1, 2, 32, 16, 64, BF16, BF16, BF16),
    "float8 caches": (2, 2, 1, 64, 32, 96, BF16, F8, F8),
    "odd sizes": (3, 1, 3, 20, 12, 96, F16, F16, F8),
    "full rotary": (2, 1, 2, 16, 16, 64, F32, F32, F32),
}


def make_tensors(case, tokens, *, weights=None, delta=False, seed=0):
    """Operands of a call; ``weights``: None for the form without projection, else "", "_nvfp4" or "_mxfp8"."""
    heads, kv_heads, index_heads, d, rotary, k, dtype, cache_dtype, index_dtype = CASES[case]
    g = torch.Generator().manual_seed(seed)
    width = (heads + 2 * kv_heads + index_heads + 1) * d
    weight = torch.randn(width, k, generator=g) * k**-0.5
    angle = torch.rand(MAX_POSITIONS, rotary // 2, generator=g) * 6.28
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=g)[:tokens]
    slots[tokens // 2 : tokens // 2 + tokens // 3] = -1
    tensors = {"qkv": torch.randn(tokens, width + 8, generator=g).to(dtype)[:, 8:]}
    if weights is not None:
        stored = {
            "": lambda: {"weight": weight.to(dtype)},
            "_nvfp4": lambda: dict(zip(("packed", "scale", "global_scale"), nvfp4_quantize(weight), strict=True)),
            "_mxfp8": lambda: dict(zip(("values", "scale"), mxfp8.encode(weight), strict=True)),
        }[weights]()
        tensors = {"x": torch.randn(tokens, k, generator=g).to(dtype), **stored, "bias": None}
    if delta:
        tensors["delta"] = torch.randn(tokens, width + 8, generator=g).to(dtype)[:, 8:]
    return {
        **tensors,
        **{name: (torch.randn(d, generator=g) * 0.3).to(dtype) for name in qkv_index.NORMS},
        "positions": torch.randint(0, MAX_POSITIONS, (tokens,), generator=g),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1).to(dtype),
        "kv_cache": torch.randn(PAGES, kv_heads, PAGE_SIZE, 2 * d, generator=g).to(cache_dtype),
        "index_cache": torch.randn(PAGES, PAGE_SIZE, d, generator=g).to(index_dtype),
        "slot_mapping": slots,
    }


def make_attributes(case, **more):
    names = ("num_heads", "num_kv_heads", "num_index_heads", "head_dim")
    gemma = {"eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False}
    return dict(zip(names, CASES[case][:4], strict=True)) | gemma | more


def check(outcome, dtype, tensors):
    """q and index_q within their bound; in both caches written slots within theirs, others untouched bit for bit."""
    assert len(outcome.errors) == 2 and max(outcome.errors) <= BOUNDS[dtype]
    slots = outcome.tensors["slot_mapping"]
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    written = written.reshape(PAGES, PAGE_SIZE)
    for name in ("kv_cache", "index_cache"):
        cache, expected, before = outcome.tensors[name], outcome.reference_tensors[name], tensors[name]
        if name == "kv_cache":
            cache, expected, before = (c.transpose(1, 2) for c in (cache, expected, before))
        rows, expected_rows = cache.float()[written], expected.float()[written]
        error = (rows - expected_rows).norm() / expected_rows.norm().clamp_min(1e-30)
        assert float(error) <= max(BOUNDS[dtype], BOUNDS[F8] if cache.dtype == F8 else 0.0), name
        assert torch.equal(cache.view(torch.uint8)[~written], before.view(torch.uint8)[~written])


def run(runner, template, case, tokens, *, everywhere=True, attributes=None, **options):
    tensors = make_tensors(case, tokens, **options)
    attributes, symbols = attributes or make_attributes(case), {"tokens": tokens}
    if everywhere:
        outcomes = runner.run_everywhere(template, tensors, attributes, rows=ROWS, symbols=symbols)
    else:
        outcomes = [runner.run_op(template, tensors, attributes, SPEC, ARCH, rows=ROWS, symbols=symbols)]
    for outcome in outcomes:
        check(outcome, CASES[case][6], tensors)
    return tensors, outcomes[0]


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("case", CASES)
def test_insertion_matches_reference(runner, case, tokens):
    run(runner, INSERT, case, tokens)


@pytest.mark.parametrize(("weights", "case", "tokens"), [
    ("", "half rotary", 7), ("", "odd sizes", 1), ("", "full rotary", 16), ("_nvfp4", "float8 caches", 5),
    ("_nvfp4", "full rotary", 3), ("_mxfp8", "half rotary", 1), ("_mxfp8", "float8 caches", 13),
    ("_mxfp8", "odd sizes", 3),
])
def test_projection_in_front_matches_reference(runner, weights, case, tokens):
    run(runner, BY_NAME[f"qkv_norm_rope_insert_index{weights}_skinny16"], case, tokens, weights=weights)


@pytest.mark.parametrize("weights", ["", "_nvfp4", "_mxfp8"])
def test_takes_32_tokens(runner, weights):
    template = BY_NAME[f"qkv_norm_rope_insert_index{weights}_skinny32"]
    run(runner, template, "half rotary", 21, weights=weights, everywhere=False)


@pytest.mark.parametrize("weights", ["", "_nvfp4", "_mxfp8"])
@pytest.mark.parametrize("form", ["skinny16", "two_step"])
def test_delta_is_added_before_the_norms(runner, form, weights):
    template, tokens = BY_NAME[f"qkv_norm_rope_insert_index{weights}_{form}"], 5
    _, with_delta = run(runner, template, "half rotary", tokens, weights=weights, delta=True, everywhere=False)
    _, without = run(runner, template, "half rotary", tokens, weights=weights, everywhere=False)
    assert not torch.equal(with_delta.results[1], without.results[1])


@pytest.mark.parametrize(("weights", "tokens"), [("", 3), ("_mxfp8", 40)])
def test_two_steps_match_reference(runner, weights, tokens):
    template = BY_NAME[f"qkv_norm_rope_insert_index{weights}_two_step{16 if tokens <= 16 else ''}"]
    run(runner, template, "half rotary", tokens, weights=weights, everywhere=False)


@pytest.mark.parametrize("template", [INSERT, BY_NAME["qkv_norm_rope_insert_index_skinny16"]], ids=lambda t: t.name)
def test_partial_rotary_leaves_the_rest_alone(runner, template):
    """Public bug 10 of the facts: a rotary width below head_dim that a fused kernel did not know."""
    weights = None if template is INSERT else ""
    tensors, outcome = run(runner, template, "half rotary", 4, weights=weights, everywhere=False)
    still = tensors | {"positions": torch.zeros_like(tensors["positions"])}
    still["cos_sin"] = torch.cat([torch.ones(MAX_POSITIONS, 8), torch.zeros(MAX_POSITIONS, 8)], 1).to(BF16)
    unturned = runner.run_op(template, still, make_attributes("half rotary"), SPEC, ARCH, rows=ROWS,
                             symbols={"tokens": 4})
    for turned, plain in zip(outcome.results, unturned.results, strict=True):
        assert torch.equal(turned[..., 16:], plain[..., 16:]) and not torch.equal(turned[..., :16], plain[..., :16])
        assert torch.equal(turned, rope(plain, tensors["positions"], tensors["cos_sin"]))


@pytest.mark.parametrize("weights", [None, ""])
def test_float8_caches_saturate(runner, weights):
    template = INSERT if weights is None else BY_NAME["qkv_norm_rope_insert_index_skinny16"]
    tensors = make_tensors("float8 caches", 4, weights=weights)
    for name in ("k_weight", "index_k_weight"):
        tensors[name] = tensors[name] * 1000
    outcome = runner.run_op(template, tensors, make_attributes("float8 caches"), SPEC, ARCH, rows=ROWS,
                            symbols={"tokens": 4})
    check(outcome, BF16, tensors)
    assert all(outcome.tensors[name].float().abs().max() == 448 for name in ("kv_cache", "index_cache"))


def test_llama_norms_and_other_page_sizes(runner):
    """The index cache may have pages of another size: slots count both the same way."""
    tensors = make_tensors("half rotary", 6, weights="")
    tensors["index_cache"] = tensors["index_cache"].reshape(PAGES * 2, PAGE_SIZE // 2, 32)
    attributes = make_attributes("half rotary", weight_offset=0.0, round_before_scale=True)
    template = BY_NAME["qkv_norm_rope_insert_index_skinny16"]
    outcome = runner.run_op(template, tensors, attributes, SPEC, ARCH, rows=ROWS, symbols={"tokens": 6})
    assert max(outcome.errors) <= BOUNDS[BF16]
    torch.testing.assert_close(outcome.tensors["index_cache"], outcome.reference_tensors["index_cache"])


@pytest.mark.parametrize(("change", "attributes", "words"), [
    ({"cos_sin": torch.zeros(9, 34)}, {}, "rotary width 34"),
    ({}, {"head_dim": 63}, "head_dim 63 is odd"),
    ({"index_cache": torch.zeros(2, 8, 64)}, {}, "index_cache must be [pages, page_size, 32], it is [2, 8, 64]"),
    ({"index_cache": torch.zeros(2, 8, 32, dtype=torch.int32)}, {}, "index_cache is int32"),
    ({"index_cache": torch.zeros(2, 32, 8).transpose(1, 2)}, {}, "static page layout"),
    ({"index_k_weight": torch.zeros(32, dtype=torch.int32)}, {}, "index_k_weight must be contiguous floats"),
    ({"weight": torch.zeros(288, 64, dtype=F32)}, {}, "weight is float32 and x bfloat16"),
    ({"delta": torch.zeros(4, 288, dtype=F32)}, {}, "residual is float32 and x bfloat16"),
])
def test_refusals_say_why(call_of, change, attributes, words):
    template = BY_NAME["qkv_norm_rope_insert_index_skinny16"]
    tensors = make_tensors("half rotary", 4, weights="") | change
    results = [torch.zeros(4, 4, 32, dtype=BF16), torch.zeros(4, 2, 32, dtype=BF16)]
    call = call_of(template.op, tensors, make_attributes("half rotary") | attributes, ROWS, results)
    assert words in template.refuse(call, SPEC, ARCH)


# MiniMax-M3's sizes, compiled for every architecture.
HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, HIDDEN, PAGE = 64, 4, 4, 128, 6144, 128
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
PLACES_TO_COMPILE = [
    pytest.param(target, architecture, id=architecture.name,
                 marks=[] if architecture is target.spec.architectures[0] else [pytest.mark.slow])
    for target in TARGETS for architecture in target.spec.architectures
]
QUICK = (("qk_norm_rope_insert_index", "bfloat16"), ("qkv_norm_rope_insert_index_mxfp8_skinny16", "float8_e4m3fn"))
KERNELS = [
    pytest.param(template, cache, id=f"{template.name}-{cache}",
                 marks=[] if (template.name, cache) in QUICK else [pytest.mark.slow])
    for template in (*qkv_index.TEMPLATES, *(t for t in qkv.TEMPLATES if "mxfp8" in t.op)) if template.max_tokens != 32
    for cache in ("bfloat16", "float8_e4m3fn")
]


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, tuple(inner), dtype)


def m3_call(template: KernelTemplate, cache: str) -> OpCall:
    """The call of MiniMax-M3 that ``template`` serves, with caches of the dtype ``cache``."""
    indexed = "index" in template.op
    width = (HEADS + 2 * KV_HEADS + (INDEX_HEADS + 1) * indexed) * HEAD_DIM
    weights: dict[str, dict[str, Operand | None]] = {
        "nvfp4": {"packed": operand(width, HIDDEN // 2, dtype="uint8"),
                  "scale": operand(width, HIDDEN // 16, dtype="float8_e4m3fn"),
                  "global_scale": operand(width, dtype="float32")},
        "mxfp8": {"values": operand(width, HIDDEN, dtype="float8_e4m3fn"),
                  "scale": operand(width, HIDDEN // 32, dtype="uint8")},
    }
    given = weights.get(template.op.rsplit("_", 1)[1], {"weight": operand(width, HIDDEN)})
    projection = {"x": operand("tokens", HIDDEN), **given, "bias": None}
    index_cache = {"index_cache": operand(1000, PAGE, HEAD_DIM, dtype=cache)} if indexed else {}
    operands = {
        **({"qkv": operand("tokens", width)} if template is INSERT else projection),
        **{name: operand(HEAD_DIM) for name in qkv_index.NORMS[: 4 if indexed else 2]},
        "positions": operand("tokens", dtype="int32"), "cos_sin": operand(8192, HEAD_DIM // 2),
        "kv_cache": operand(1000, KV_HEADS, PAGE, 2 * HEAD_DIM, dtype=cache), **index_cache,
        "slot_mapping": operand("tokens", dtype="int64"),
    }
    attributes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "eps": 1e-6,
                                  "weight_offset": 1.0, "round_before_scale": False}
    attributes |= {"num_index_heads": INDEX_HEADS} if indexed else {}
    heads = (HEADS, INDEX_HEADS) if indexed else (HEADS,)
    return OpCall(template.op, operands, tuple(operand("tokens", n, HEAD_DIM) for n in heads), attributes)


def test_the_choice_at_m3_sizes():
    """Wide heads with norms: 32 tokens would spill, and the projection is faster as a launch of its own."""
    for weights in ("", "_nvfp4", "_mxfp8"):
        op = f"qkv_norm_rope_insert_index{weights}"
        call = m3_call(BY_NAME[f"{op}_skinny32"], "bfloat16")
        assert "do not fit the registers" in BY_NAME[f"{op}_skinny32"].refuse(call, SPEC, ARCH)
        chosen, reason = Selector(SPEC, list_kernels(SPEC)).select(call, 512)
        assert [(c.template, c.max_tokens) for c in chosen] == [
            (f"{op}_two_step16", 16), (f"{op}_two_step32", 32), (f"{op}_two_step", None)
        ], reason


@pytest.mark.parametrize(("target", "architecture"), PLACES_TO_COMPILE)
@pytest.mark.parametrize(("template", "cache"), KERNELS)
@pytest.mark.slow
def test_m3_kernels_compile(template: KernelTemplate, cache: str, target: Target, architecture: Architecture):
    call = m3_call(template, cache)
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        warnings = target.check(compiled)
        assert compiled.metadata["spills"] == 0, warnings
