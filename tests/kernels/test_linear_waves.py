"""Tuned decode linears for waves of 64: emulator and interpreter against the reference, and what the assembly holds."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mmcompile.core.discover import load_module
from mmcompile.core.formats import nvfp4
from mmcompile.core.formats.nvfp4_fragments import LAYOUTS, WAVE
from mmcompile.core.kernel import Parameter
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel
from mmcompile.lower.select import Selector
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._kernels.linear import Blocks
from mmcompile.targets._tuned.linear_mfma import (
    ROWS,
    WAVES,
    Waves,
    choose_waves,
    emit_wave_rows,
    emit_waves,
    want_waves,
)
from mmcompile.targets._tuned.linear_waves import decode_lanes
from mmcompile.targets._tuned.waves_gemm import emit_waves_gemm
from tests.kernels.conftest import poisoned_like, relative_error
from tests.kernels.test_linear_lanes import (
    BF16,
    BOUNDS,
    F16,
    arranged,
    describe,
    error_of,
    make_tensors,
    mark_slow,
    reference,
)

TARGET = load_module("targets", "gfx950").TARGET
SPEC, ARCH = TARGET.spec, TARGET.spec.architectures[0]
CASES = {
    # tokens, weight rows, k, activation, bias, residual, dtype, waves
    "one token": (1, 32, 512, "none", False, False, BF16, Waves(2)),
    "waves without work": (8, 32, 768, "none", False, True, BF16, Waves(2)),
    "gate and up": (11, 32, 768, "swiglu", True, True, BF16, Waves(2)),
    "32 rows": (16, 64, 512, "none", True, False, BF16, Waves(1, paired=True)),
    "float16": (3, 32, 512, "none", False, True, F16, Waves(2)),
}


ROW_CASES = {
    "one token": (1, 32, 512, "none", False, False, BF16, Waves(2)),
    "tail of k and of rows": (7, 72, 584, "none", False, True, BF16, Waves(4)),
    "gate and up": (11, 80, 512, "swiglu", True, True, BF16, Waves(2)),
    "tail of 32 rows": (9, 40, 64, "none", True, False, F16, Waves(1, paired=True)),
}


def interpret(interpreter, source, tensors, result, grid):
    values = {**tensors, "result": poisoned_like(result), "tokens": len(tensors["x"])}
    after = interpreter.run(source, [values[p.value] for p in source.parameters], grid)
    return after[[p.value for p in source.parameters].index("result")]


@pytest.mark.parametrize("case", mark_slow(CASES, {"gate and up"}))
def test_decode_matches_reference(case):
    *shape, waves = case
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_waves(call, waves)
    want = reference(tensors, shape[3])
    assert error_of(source, arranged(tensors, WAVE), result, want, TARGET) <= BOUNDS[shape[6]]


@pytest.mark.parametrize("case", mark_slow(ROW_CASES, set()))
def test_rows_match_reference(case):
    *shape, waves = case
    tensors = make_tensors(*shape, quantized=False)
    call, result = describe(tensors, shape[3])
    (source,) = emit_wave_rows(call, waves)
    assert error_of(source, tensors, result, reference(tensors, shape[3]), TARGET) <= BOUNDS[shape[6]]


@pytest.mark.slow
def test_rows_go_through_no_local_memory():
    call, _ = describe(make_tensors(1, 32, 512, "none", False, False, BF16, quantized=False), "none")
    (source,) = emit_wave_rows(call, Waves(2))
    names = re.findall(r"^\s+([a-z]\w+)", TARGET.compile(source, ARCH).assembly, re.MULTILINE)
    products = [i for i, name in enumerate(names) if name == "v_mfma_f32_16x16x32_bf16"]
    assert len(products) == 8 and names[: products[0]].count("global_load_dwordx4") == 16
    assert not [name for name in names[: products[-1]] if name.startswith("ds_")]


def test_rows_are_refused_where_no_lane_loads_16_bytes():
    call, _ = describe(make_tensors(4, 32, 100, "none", False, False, BF16, quantized=False), "none")
    assert "no multiple of 8" in ROWS[0].refuse(call, SPEC, ARCH)
    call, _ = describe(make_tensors(4, 32, 64, "none", False, False, BF16, quantized=False), "none")
    found, _ = Selector(SPEC, list_kernels(SPEC)).select(call, 512)
    assert [f.template for f in found] == ["linear_wave_rows16", "linear_skinny32", "linear_gemm"]


@pytest.mark.slow
@pytest.mark.parametrize("case", mark_slow(CASES, set(CASES)))
def test_interpreter_matches_reference(interpreter, case):
    *shape, waves = case
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_waves(call, waves)
    grid = (shape[1] // (32 if waves.paired or shape[3] == "swiglu" else 16), 1, 1)
    out = interpret(interpreter, source, arranged(tensors, WAVE), result, grid)
    assert relative_error(out, reference(tensors, shape[3]).to(result.dtype)) <= BOUNDS[shape[6]]


@pytest.mark.slow
def test_parts_of_the_tokens():
    """35 tokens are 16, 16 and 3, with every operand that has a row a token."""
    tensors = make_tensors(35, 32, 256, "none", True, True, BF16, quantized=True)
    call, result = describe(tensors, "none")
    (source,) = emit_waves(call, Waves(1), parts=True)
    want = reference(tensors, "none")
    assert error_of(source, arranged(tensors, WAVE), result, want, TARGET) <= BOUNDS[BF16]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0**80, 2.0**-80])
def test_bfloat16_activations_beyond_the_range_of_float16(size):
    tensors = make_tensors(2, 16, 256, "none", False, False, BF16, quantized=True)
    tensors["x"] = tensors["x"] * size
    call, result = describe(tensors, "none")
    (source,) = emit_waves(call, Waves(1))
    want = reference(tensors, "none")
    assert error_of(source, arranged(tensors, WAVE), result, want, TARGET) <= BOUNDS[BF16]


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)], ids=str)
def test_every_code_with_every_scale_is_exact(dtype):
    """In every place of a lane's words; the assembly that decode and prefill share."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = nvfp4.pack_codes(torch.stack([codes.roll(n) for n in range(16)]).repeat(1, 2))  # [16, 32]
    scales = torch.arange(1, 127, dtype=torch.uint8)[:, None].repeat(1, 16).repeat_interleave(2).contiguous()
    name = str(dtype).removeprefix("torch.")
    source = emit_kernel(
        name="decode", title="decode", tiles=[decode_lanes], constants={"DTYPE": f"tl.{name}"},
        parameters=[Parameter("words", "*i32", "words"), Parameter("scales", "*fp8e4nv", "scales"),
                    Parameter("out", f"*{'bf16' if dtype == BF16 else 'fp16'}", "out")],
        body="""
        row = tl.program_id(0) * 64 + tl.arange(0, 64)
        codes = tl.load(words + (row % 16 * 4)[:, None] + tl.arange(0, 4)[None, :])
        scale = tl.load(scales + (row % 2016 * 2)[:, None] + tl.arange(0, 2)[None, :])
        tl.store(out + (row * 32)[:, None] + tl.arange(0, 32)[None, :], decode_lanes(codes, scale, DTYPE))
        """,
        grid=("32", "1", "1"), num_warps=1,
    )  # fmt: skip
    compiled = TARGET.compile(source, ARCH)
    memory, out = DeviceMemory(), np.zeros(2048 * 64, np.uint8)
    inputs = [memory.register(t.numpy().view(np.uint8).reshape(-1), "input") for t in (packed, scales)]
    place = memory.register(out, "out", writable=True, known=False)
    run_kernel(Launch(compiled.assembly, compiled.metadata["name"], (32, 1, 1), 64, compiled.metadata["shared"],
                      [*inputs, place, 0, 0], memory))  # fmt: skip
    got = torch.from_numpy(memory.contents(place).copy()).view(dtype).view(2048, 32)[:2016].double()
    factors = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    want = nvfp4.decode_e2m1(nvfp4.unpack_codes(packed)).double() * factors[:, None, None]
    assert torch.equal(got.view(126, 16, 32), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(9, 192, 256, "swiglu", True, True, BF16), (70, 80, 512, "none", False, True, BF16)],
    ids=["swiglu", "tail"],
)
def test_gemm_reads_waves(interpreter, shape):
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_waves_gemm(call, Blocks(64, 128, 128, 4, 2), {})
    want, moved = reference(tensors, shape[3]), arranged(tensors, WAVE)
    grid = (-(-shape[0] // 64) * -(-shape[1] // 128), 1, 1)
    out = interpret(interpreter, source, moved, result, grid)
    assert relative_error(out, want.to(result.dtype)) <= BOUNDS[shape[6]]
    assert error_of(source, moved, result, want, TARGET) <= BOUNDS[BF16]


def list_instructions(k, waves, tokens=1, dtype=BF16):
    call, _ = describe(make_tensors(tokens, 32, k, "none", False, False, dtype, quantized=True), "none")
    (source,) = emit_waves(call, waves)
    compiled = TARGET.compile(source, ARCH)
    assert TARGET.check(compiled) == [] and compiled.metadata["spills"] == 0
    return [line.split(";")[0].strip() for line in compiled.assembly.splitlines() if re.match(r"\s+[a-z]+_", line)]


def test_loads_are_ahead_of_the_arithmetic():
    """Two steps: 2 x (2 of codes, 8 of x, 16 bytes a lane each) are on their way before anything is decoded.

    The first multiplication waits for none of the second step; no operand goes through local memory.
    """
    lines = list_instructions(1024, Waves(2))
    names = [line.split()[0] for line in lines]
    first = names.index("v_cvt_scalef32_pk_f32_fp4")
    assert names[:first].count("global_load_dwordx4") == 20
    waits = [line for line in lines[: names.index("v_mfma_f32_16x16x32_bf16")] if "vmcnt" in line]
    assert waits and all(int(re.search(r"vmcnt\((\d+)\)", line)[1]) >= 10 for line in waits)
    between = names[first : len(names) - names[::-1].index("v_mfma_f32_16x16x32_bf16")]
    assert not [name for name in between if name.startswith(("ds_", "global_load", "s_barrier", "s_cbranch"))]
    counts = {name: names.count(name) for name in set(names)}
    # 32 codes a lane in each of two chunks of two steps: a conversion, a product and a rounding for two of them.
    assert counts["v_cvt_scalef32_pk_f32_fp4"] == 64 and counts["v_pk_mul_f32"] <= 68
    assert counts["v_cvt_pk_bf16_f32"] <= 68 and counts["v_mfma_f32_16x16x32_bf16"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "k"), [(4096, 4096), (4096, 14336), (128, 6144)])
def test_no_register_is_spilled(rows, k):
    """Those with the most waves, the most steps, and both tiles."""
    activation = "swiglu" if rows == 128 else "none"
    tensors = make_tensors(1, rows, k, activation, False, False, BF16, quantized=True)
    call, _ = describe(tensors, activation, LAYOUTS[WAVE])
    (source,) = WAVES[0].emit(call, SPEC, ARCH)
    assert TARGET.compile(source, ARCH).metadata["spills"] == 0


@pytest.mark.slow
def test_an_mfma_keeps_its_distance_from_assembly_that_writes_its_operands():
    """Two cycles between a VALU's write and an MFMA's read; LLVM sees to it elsewhere."""
    lines = [line for line in list_instructions(512, Waves(1), dtype=F16) if not line.startswith("v_mov")]
    written: dict[int, int] = {}
    for place, line in enumerate(lines):
        if line.startswith("v_pk_mul_f16"):
            written[int(re.match(r"v_pk_mul_f16 v(\d+)", line)[1])] = place
        if line.startswith("v_mfma"):
            operands = [range(int(a), int(b) + 1) for a, b in re.findall(r"v\[(\d+):(\d+)\]", line)[1:3]]
            for register in (r for operand in operands for r in operand if r in written):
                assert any(between.startswith("s_nop 1") for between in lines[written[register] : place])


@pytest.mark.parametrize(
    ("rows", "k", "swiglu", "expected"),
    [
        (2048, 2048, False, Waves(8)),
        (2048, 8192, False, Waves(8)),
        (3072, 4096, True, Waves(8, paired=True)),
        (6144, 4096, False, Waves(16)),
        (16384, 2048, True, Waves(8, paired=True)),
        (128256, 2048, False, Waves(4, paired=True)),
        (32784, 256, False, Waves(1)),
    ],
)
def test_configurations_follow_a_rule(rows, k, swiglu, expected):
    assert choose_waves(rows, k, swiglu, SPEC.units) == expected


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 24, 256, "none", False, False, BF16), "not made of tiles"),
        ((4, 32, 320, "none", False, False, BF16), "not made of tiles"),
        ((4, 48, 256, "swiglu", False, False, BF16), "gate rows are not made of tiles"),
        ((4, 32, 256, "none", False, False, torch.float32), "x is float32"),
    ],
)
def test_near_misses_stay_row_major(shape, reason):
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3])
    assert want_waves(call, SPEC, ARCH) == {}
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3], LAYOUTS[WAVE])
    assert reason in WAVES[0].refuse(call, SPEC, ARCH)


def test_the_layout_decides_which_kernels_serve():
    tensors = make_tensors(4, 32, 512, "none", False, False, BF16, quantized=True)
    chosen = {}
    for layout in ("linear", LAYOUTS[WAVE], LAYOUTS["pairs"]):
        call, _ = describe(tensors, "none", layout)
        found, reason = Selector(SPEC, list_kernels(SPEC)).select(call, 512)
        chosen[layout] = [f.template for f in found]
    assert chosen["linear"][0] == "linear_nvfp4_skinny16"
    assert chosen[LAYOUTS[WAVE]] == ["linear_nvfp4_waves16", "linear_nvfp4_waves32", "linear_nvfp4_waves"]
    assert chosen[LAYOUTS["pairs"]] == [] and "has the layout nvfp4_fragments_pairs" in reason
    call, _ = describe(tensors, "none")
    wish = Selector(SPEC, list_kernels(SPEC)).propose_layouts(call)
    assert wish == dict.fromkeys(("packed", "scale"), LAYOUTS[WAVE])
    assert Selector(SPEC, list_kernels(SPEC), portable=True).propose_layouts(call) == {}
    hopper = load_module("targets", "sm90").TARGET.spec
    call, _ = describe(tensors, "none", LAYOUTS[WAVE])
    assert "lacks" in WAVES[0].refuse(call, hopper, hopper.architectures[0])
