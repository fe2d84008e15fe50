"""Tuned decode linears where one instruction converts two codes: emulated assembly for Blackwell and Rubin."""

from __future__ import annotations

import pytest
import torch

from mmcompile.core.discover import load_module
from mmcompile.core.formats.nvfp4_fragments import LAYOUTS
from mmcompile.lower.select import Selector, common_architecture
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._kernels.linear import Blocks
from mmcompile.targets._tuned.fragments_gemm import emit_fragments_gemm
from mmcompile.targets._tuned.linear_configs import must_hold
from mmcompile.targets._tuned.linear_fragments import FRAGMENTS, emit_fragments, emit_rows, want_fragments
from mmcompile.targets._tuned.linear_ptx import decode_word
from tests.kernels.conftest import poisoned_like, relative_error
from tests.kernels.test_linear_lanes import (
    BF16,
    BOUNDS,
    CASES,
    F16,
    ROW_CASES,
    arranged,
    decode_everything,
    describe,
    error_of,
    make_tensors,
    reference,
)

TARGETS = {name: load_module("targets", name).TARGET for name in ("sm90", "sm100", "sm107", "gfx950")}
PAIRS = LAYOUTS["pairs"]


def select(names, cases):
    """(target, case) as parameters, those of ``names`` in the fast run, the others in the nightly one."""
    return [
        pytest.param(target, case, id=f"{target}, {case}", marks=[] if (target, case) in names else pytest.mark.slow)
        for target in ("sm100", "sm107")
        for case in cases
    ]


@pytest.mark.parametrize(("name", "case"), select({("sm100", "gate and up")}, CASES))
def test_fragments_match_reference(name, case):
    *shape, config = CASES[case]
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_fragments(call, 1 if shape[0] <= 8 else 2, config, pairs=True)
    want = reference(tensors, shape[3])
    assert error_of(source, arranged(tensors, "pairs"), result, want, TARGETS[name]) <= BOUNDS[shape[6]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), select(set(), ROW_CASES))
def test_rows_match_reference(name, case):
    *shape, config = ROW_CASES[case]
    tensors = make_tensors(*shape, quantized=False)
    call, result = describe(tensors, shape[3])
    (source,) = emit_rows(call, 1 if shape[0] <= 8 else 2, config)
    assert error_of(source, tensors, result, reference(tensors, shape[3]), TARGETS[name]) <= BOUNDS[shape[6]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_code_with_every_scale_is_exact(dtype):
    """The assembly that decode and prefill share."""
    text = decode_word(str(dtype).removeprefix("torch."), pairs=True)
    assert torch.equal(*decode_everything(TARGETS["sm100"], dtype, "pairs", text))


@pytest.mark.slow
def test_gemm_reads_fragments(interpreter):
    shape, blocks = (9, 96, 256, "swiglu", True, True, BF16), Blocks(32, 64, 64, 4, 2)
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_fragments_gemm(call, blocks, {}, pairs=True)
    values = {**arranged(tensors, "pairs"), "result": poisoned_like(result), "tokens": shape[0]}
    after = interpreter.run(source, [values[p.value] for p in source.parameters], (2, 1, 1))
    out = after[[p.value for p in source.parameters].index("result")]
    assert relative_error(out, reference(tensors, shape[3]).to(BF16)) <= BOUNDS[BF16]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm100", "sm107"])
def test_the_gemm_of_tensor_memory_reads_fragments(name):
    """The blocks of prefill, by tcgen05."""
    spec = TARGETS[name].spec
    tensors = make_tensors(35, 192, 512, "swiglu", True, True, BF16, quantized=True)
    call, result = describe(tensors, "swiglu", PAIRS)
    (source,) = FRAGMENTS[-1].emit(call, spec, common_architecture(spec))
    assert source.ledger == {"UTCHMMA": True}
    want = reference(tensors, "swiglu")
    assert error_of(source, arranged(tensors, "pairs"), result, want, TARGETS[name]) <= BOUNDS[BF16]


@pytest.mark.parametrize("name", ["sm100", "sm107"])
def test_the_layout_decides_which_kernels_serve(name):
    spec = TARGETS[name].spec
    tensors = make_tensors(4, 32, 512, "none", False, False, BF16, quantized=True)
    chosen = {}
    for layout in ("linear", PAIRS, "nvfp4_fragments_bfloat16"):
        call, _ = describe(tensors, "none", layout)
        found, reason = Selector(spec, list_kernels(spec)).select(call, 512)
        chosen[layout] = [f.template for f in found]
    assert chosen["linear"][0] == "linear_nvfp4_skinny16"
    assert chosen[PAIRS] == [f"linear_nvfp4_fragments{n}" for n in (8, 16, 32, "")]
    assert chosen["nvfp4_fragments_bfloat16"] == [] and "has the layout nvfp4_fragments_bfloat16" in reason
    call, _ = describe(tensors, "none")
    assert Selector(spec, list_kernels(spec)).propose_layouts(call) == dict.fromkeys(("packed", "scale"), PAIRS)
    assert Selector(spec, list_kernels(spec), portable=True).propose_layouts(call) == {}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 24, 256, "none", False, False, BF16), "not made of tiles"),
        ((4, 48, 256, "swiglu", False, False, BF16), "gate rows are not made of tiles"),
        ((4, 32, 256, "none", False, False, torch.float32), "x is float32"),
    ],
)
def test_near_misses_stay_row_major(shape, reason):
    spec = TARGETS["sm100"].spec
    arch = common_architecture(spec)
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3])
    assert want_fragments(call, spec, arch) == {}
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3], PAIRS)
    assert reason in FRAGMENTS[0].refuse(call, spec, arch)


def test_loads_are_held_where_lanes_alone_ask_for_too_little():
    held = {name: must_hold(target.spec) for name, target in TARGETS.items() if name != "gfx950"}
    assert held == {"sm90": False, "sm100": True, "sm107": True}
    spec = TARGETS["sm107"].spec
    tensors = make_tensors(1, 32, 1024, "none", False, False, BF16, quantized=True)
    call, _ = describe(tensors, "none", PAIRS)
    (source,) = FRAGMENTS[0].emit(call, spec, common_architecture(spec))
    assert "HOLD = tl.constexpr(True)" in source.text and source.ledger["E2M1"] is True


def test_a_conversion_needs_codes_and_scales_of_the_dtype():
    """Hopper converts scales, but no codes: it keeps the bits of its dtype."""
    call, _ = describe(make_tensors(1, 32, 256, "none", False, False, F16, quantized=True), "none")
    for name, flavour in (("sm90", "float16"), ("sm100", "pairs")):
        spec = TARGETS[name].spec
        wish = want_fragments(call, spec, common_architecture(spec))
        assert wish == dict.fromkeys(("packed", "scale"), LAYOUTS[flavour])
