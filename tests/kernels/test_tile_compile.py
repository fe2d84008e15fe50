"""The attention, rotary, gather, sampling and generated kernels compile for every target, within its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.core.region import Region, Step
from mmcompile.core.spec import Architecture
from mmcompile.targets._kernels import attention, embedding, expressions, pointwise, rope, sampling, swiglu
from mmcompile.targets._target import Target

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, PAGE = 576, 1536, 9, 3, 64, 49152, 64
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
PLACES = [
    pytest.param(target, architecture, id=architecture.name,
                 marks=[] if architecture is target.spec.architectures[0] else [pytest.mark.slow])
    for target in TARGETS for architecture in target.spec.architectures
]
TEMPLATES = (*attention.TEMPLATES, *rope.TEMPLATES, *embedding.TEMPLATES, *swiglu.TEMPLATES, *sampling.TEMPLATES)


def operand(*shape: int | str, dtype: str = "bfloat16", row: int = 0) -> Operand:
    """Contiguous, or rows that are ``row`` elements apart."""
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, (row or inner[0], *inner[1:]), dtype)


QKV_ROW = (HEADS + 2 * KV_HEADS) * HEAD_DIM
Q = operand("tokens", HEADS, HEAD_DIM)
K = operand("tokens", KV_HEADS, HEAD_DIM, row=QKV_ROW)
ROTARY = {"positions": operand("tokens", dtype="int64"), "cos_sin": operand(8192, HEAD_DIM, dtype="float32")}
CACHE = {"kv_cache": operand(1000, KV_HEADS, PAGE, 2 * HEAD_DIM), "slot_mapping": operand("tokens", dtype="int64")}
HALF = operand("tokens", INTERMEDIATE, row=2 * INTERMEDIATE)
SAMPLING = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "seed": "int64", "positions": "int32"}
BLOCK_TABLE = Operand(("batch", "max_blocks"), ("max_blocks", 1), "int32")
PAGED = {"q": Q, "kv_cache": CACHE["kv_cache"], "block_table": BLOCK_TABLE,
         "seq_lens": operand("batch", dtype="int32"), "query_start": operand("batch + 1", dtype="int32")}
OPERANDS: dict[str, dict[str, Operand | None]] = {
    "paged_attention": PAGED,
    "rope": {"x": Operand(("tokens", HEADS, HEAD_DIM), (QKV_ROW, HEAD_DIM, 1), "bfloat16"), **ROTARY},
    "insert_kv": {"k": K, "v": K, **CACHE},
    "qk_norm_rope_insert": {"qkv": operand("tokens", QKV_ROW), "q_weight": operand(HEAD_DIM), "k_weight": None,
                            **ROTARY, **CACHE},
    "embedding": {"ids": operand("tokens", dtype="int64"), "weight": operand(VOCABULARY, HIDDEN)},
    "gather_last": {"x": operand("tokens", HIDDEN), "query_start": PAGED["query_start"]},
    "swiglu": {"gate": HALF, "up": HALF},
    "sample": {"logits": operand("batch", VOCABULARY),
               **{name: operand("batch", dtype=dtype) for name, dtype in SAMPLING.items()}},
}
RESULTS = {"paged_attention": (Q,), "rope": (Q,), "insert_kv": (), "qk_norm_rope_insert": (Q,),
           "embedding": (operand("tokens", HIDDEN),), "gather_last": (operand("batch", HIDDEN),),
           "swiglu": (operand("tokens", INTERMEDIATE),), "sample": (operand("batch", dtype="int32"),)}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "paged_attention": {"scale": 0.125, "window": 0},
    "qk_norm_rope_insert": {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "eps": 1e-5},
}


def smollm2_call(template: KernelTemplate) -> OpCall:
    phase = {"phase": "prefill" if template.name.endswith("prefill") else "decode"}
    attributes = ATTRIBUTES.get(template.op, {}) | phase
    return OpCall(template.op, OPERANDS[template.op], RESULTS[template.op], attributes)


def generated_call(kind: str) -> OpCall:
    """A region with every unary step, or with every reduction, of rows of one hidden state."""
    x, dtype = operand("tokens", HIDDEN), "bfloat16"
    if kind == "pointwise":
        ops = ("gelu", "tanh", "erf", "exp2", "log2", "sin", "cos", "sqrt", "rsqrt", "round", "reciprocal", "sigmoid")
        steps = [Step(f"s{i}", op, (f"s{i - 1}" if i else "in0",), dtype) for i, op in enumerate(ops)]
        steps += [Step("p", "pow", (steps[-1].name, 1.5), dtype), Step("m", "maximum", ("p", "in0"), dtype)]
        results, outputs = (x,), ("m",)
    else:
        kept = {"keepdim": True}
        steps = [Step("a", "amax", ("in0",), dtype, kept), Step("b", "sub", ("in0", "a"), dtype),
                 Step("v", "var", ("b",), dtype, kept), Step("c", "mul", ("b", "v"), dtype),
                 Step("s", "softmax", ("c",), dtype), Step("i", "argmax", ("s",), "int64"),
                 Step("l", "log_softmax", ("c",), dtype)]
        results, outputs = (x, operand("tokens", dtype="int64"), x), ("s", "i", "l")
    region = Region(("in0",), tuple(steps), outputs)
    return OpCall(kind, {"in0": x}, results, region.to_json())


def compile_all(template: KernelTemplate, call: OpCall, target: Target, architecture: Architecture) -> None:
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        assert target.check(compiled) == []


@pytest.mark.parametrize(("target", "architecture"), PLACES)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_smollm2_kernels_compile(template: KernelTemplate, target: Target, architecture: Architecture):
    compile_all(template, smollm2_call(template), target, architecture)


@pytest.mark.parametrize(("target", "architecture"), PLACES)
@pytest.mark.parametrize("template", pointwise.TEMPLATES, ids=lambda t: t.name)
def test_generated_kernels_compile(template: KernelTemplate, target: Target, architecture: Architecture):
    compile_all(template, generated_call(template.op), target, architecture)


def test_helpers_are_named_as_they_are_called():
    assert {h.fn.__name__ for h in expressions.HELPERS} >= {"tanh", "round_half_even", "row_softmax"}
