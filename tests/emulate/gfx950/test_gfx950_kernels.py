"""Kernels as Triton emits them for gfx950, executed: numbers, schedules, races, and planted faults."""

from __future__ import annotations

import dataclasses
import re
import struct

import numpy as np
import pytest
from gfx950_support import E4M3, from_bf16, launch, run_snippet, to_bf16, unpack_fp4

from mmcompile.emulate.faults import EmulationFault

MODES = [
    {},
    {"late": True, "check_races": True},
    {"schedule": "warp", "seed": 3, "late": True},
    {"schedule": "interleaved"},
]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def kernels(compiled):
    """Every kernel of this file by a short name."""
    scaled = {"a": "*bf16", "b": "*u8", "c": "*fp32", "inner": "i32"}
    tile = {"M": 16, "N": 64, "K": 128}
    listed = {
        "add": ("add_vectors", {"a": "*fp32", "b": "*fp32", "c": "*fp32", "count": "i32"}, {"BLOCK": 1024}),
        "norm": (
            "rms_norm",
            {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "columns": "i32", "eps": "fp32"},
            {"BLOCK": 1024},
        ),
        "softmax": ("softmax", {"x": "*fp32", "y": "*fp32", "columns": "i32"}, {"BLOCK": 1024}),
        "dot": ("dot", {"a": "*bf16", "b": "*bf16", "c": "*fp32", "inner": "i32"}, {"M": 64, "N": 64, "K": 64}),
        "bytes": (
            "dot", {"a": "*fp8e4nv", "b": "*fp8e4nv", "c": "*fp32", "inner": "i32"}, {"M": 64, "N": 64, "K": 128},
        ),
        "nvfp4": ("dot_nvfp4", {"a": "*bf16", "b": "*u32", "scales": "*fp8e4nv", "c": "*fp32", "inner": "i32"}, tile),
        "wrong": ("dot_scaled_weights", {**scaled, "scales": "*fp8e4nv"}, {**tile, "GROUP": 16}),
        "mxfp4": ("dot_scaled_weights", {**scaled, "scales": "*u8"}, {**tile, "GROUP": 32}),
        "barrier": ("grid_barrier", {"counter": "*i32", "data": "*fp32"}, {"PROGRAMS": 8, "BLOCK": 256, "DRAIN": 1}),
        "hazard": ("grid_barrier", {"counter": "*i32", "data": "*fp32"}, {"PROGRAMS": 8, "BLOCK": 256, "DRAIN": 0}),
    }  # fmt: skip

    def find(name):
        function, signature, constants = listed[name]
        order = {"wrong": "abscales", "mxfp4": "abscales"}.get(name)
        if order:
            signature = {k: signature[k] for k in ("a", "b", "scales", "c", "inner")}
        return compiled(function, signature, constants)

    return find


@pytest.mark.parametrize("mode", MODES, ids=["program", "late", "warp", "interleaved"])
def test_add_vectors(kernels, rng, mode):
    a, b = rng.standard_normal((2, 5000)).astype(np.float32)
    c = np.zeros_like(a)
    report = launch(kernels("add"), 5, [a, b, c, 5000], inputs=2, unknown=(2,), **mode)
    assert np.array_equal(c, a + b)
    assert report.instructions > 5000 and report.coverage > 0.8 and not report.unchecked


@pytest.mark.parametrize("mode", MODES, ids=["program", "late", "warp", "interleaved"])
def test_rms_norm(kernels, rng, mode):
    x, weight = to_bf16(rng.standard_normal((6, 1000))), to_bf16(rng.standard_normal(1000))
    y = np.zeros((6, 1000), np.uint16)
    launch(kernels("norm"), 6, [x, weight, y, 1000, struct.pack("<f", 1e-6)], inputs=2, unknown=(2,), **mode)
    wide = from_bf16(x)
    expected = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6) * from_bf16(weight)
    assert np.allclose(from_bf16(y), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("mode", MODES, ids=["program", "late", "warp", "interleaved"])
def test_softmax(kernels, rng, mode):
    x = rng.standard_normal((6, 1000)).astype(np.float32)
    y = np.zeros_like(x)
    launch(kernels("softmax"), 6, [x, y, 1000], inputs=1, unknown=(1,), **mode)
    e = np.exp(x - x.max(1, keepdims=True))
    assert np.allclose(y, e / e.sum(1, keepdims=True), rtol=1e-5)


def run_dot(kernel, rng, **mode):
    a, b = to_bf16(rng.standard_normal((64, 256))), to_bf16(rng.standard_normal((256, 64)))
    c = np.zeros((64, 64), np.float32)
    launch(kernel, 1, [a, b, c, 256], inputs=2, unknown=(2,), **mode)
    return np.abs(c - from_bf16(a) @ from_bf16(b)).max()


@pytest.mark.parametrize("mode", MODES, ids=["program", "late", "warp", "interleaved"])
def test_dot(kernels, rng, mode):
    assert run_dot(kernels("dot"), rng, **mode) < 1e-4


def test_dot_of_bytes(kernels, rng):
    """Triton reads B of a product of fp8 by ds_read_b64_tr_b8: its layout of B settles what that instruction does."""
    kernel = kernels("bytes")
    assert "ds_read_b64_tr_b8" in kernel.assembly
    a, b = (rng.integers(0, 0x60, (64, 128), dtype=np.uint8) for _ in range(2))
    c = np.zeros((64, 64), np.float32)
    launch(kernel, 1, [a, b.reshape(128, 64), c, 128], inputs=2, unknown=(2,))
    expected = E4M3[a] @ E4M3[b.reshape(128, 64)]
    assert np.abs(c - expected).max() < 1e-6 * np.abs(expected).max()


def test_unchecked_names_what_the_kernel_uses(kernels, rng):
    a, b, c = to_bf16(rng.standard_normal((64, 64))), to_bf16(rng.standard_normal((64, 64))), np.zeros((64, 64), "f4")
    for races in (False, True):
        report = launch(kernels("dot"), 1, [a, b, c, 64], inputs=2, check_races=races)
        found = [[part in sentence for sentence in report.unchecked] for part in ("order and width", "read as done")]
        assert len(report.unchecked) == 1 + races and sum(found[0]) == 1 and sum(found[1]) == races
    x, y = rng.standard_normal((1, 1000)).astype(np.float32), np.zeros((1, 1000), np.float32)
    assert any("1 ulp" in sentence for sentence in launch(kernels("softmax"), 1, [x, y, 1000], inputs=1).unchecked)


def run_weights(kernel, rng, group, decode, scales):
    a, packed = to_bf16(rng.standard_normal((16, 256))), rng.integers(0, 256, (64, 128), dtype=np.uint8)
    c = np.zeros((16, 64), np.float32)
    launch(kernel, 1, [a, packed, scales, c, 256], inputs=3, unknown=(3,), late=True, check_races=True)
    expected = from_bf16(a) @ (unpack_fp4(packed) * decode(scales).repeat(group, 1)).T
    return np.abs(c - expected).max() / np.abs(expected).max()


def test_nvfp4_decoding_is_exact(kernels, rng):
    scales = rng.integers(0x30, 0x48, (64, 16), dtype=np.uint8)
    assert run_weights(kernels("nvfp4"), rng, 16, lambda s: E4M3[s], scales) < 1e-6


def test_known_miscompile_is_noticed(kernels, rng):
    """Triton 3.9: dot_scaled(bf16, e2m1) with e4m3 scales uses only the exponents of the scales."""
    scales = rng.integers(0x30, 0x48, (64, 16), dtype=np.uint8)
    assert run_weights(kernels("wrong"), rng, 16, lambda s: E4M3[s], scales) > 0.05
    powers = scales & 0x78
    assert run_weights(kernels("wrong"), rng, 16, lambda s: E4M3[s], powers) < 1e-6
    exponents = rng.integers(124, 130, (64, 8), dtype=np.uint8)
    assert run_weights(kernels("mxfp4"), rng, 32, lambda s: 2.0 ** (s.astype(float) - 127), exponents) < 1e-6


def test_swapped_nibbles_are_noticed(kernels, rng):
    kernel = kernels("nvfp4")
    text = kernel.assembly.replace("op_sel:[1,0,0]", "op_sel:[?]").replace("op_sel:[0,1,0]", "op_sel:[1,0,0]")
    swapped = dataclasses.replace(kernel, assembly=text.replace("op_sel:[?]", "op_sel:[0,1,0]"))
    assert swapped.assembly != kernel.assembly
    scales = rng.integers(0x30, 0x48, (64, 16), dtype=np.uint8)
    assert run_weights(swapped, rng, 16, lambda s: E4M3[s], scales) > 0.05


# ---------------------------------------------------------------------- grid barriers


def run_barrier(kernel, **mode):
    counter, data = np.zeros(4, np.int32), np.zeros(2 * 8 * 256, np.float32)
    launch(kernel, 8, [counter, data], schedule="interleaved", **mode)
    blocks = data.reshape(2, 8, 256)
    return np.array_equal(blocks[1], np.arange(256) + ((np.arange(8) + 1) % 8)[:, None])


@pytest.mark.parametrize("seed", range(3))
def test_grid_barrier(kernels, seed):
    assert run_barrier(kernels("barrier"), seed=seed, check_races=True)
    assert run_barrier(kernels("barrier"), seed=seed, late=True)


def test_stores_of_other_waves_in_flight_are_a_race(kernels):
    """tl.debug_barrier does not drain: wave 0 may publish the flag before the stores of the others are performed."""
    with pytest.raises(EmulationFault) as caught:
        run_barrier(kernels("hazard"), check_races=True)
    assert caught.value.kind == "race"
    assert not all(run_barrier(kernels("hazard"), seed=seed, late=True) for seed in range(4))


@pytest.mark.parametrize("fence", ["buffer_wbl2", "buffer_inv"])
def test_missing_fences_are_races(kernels, fence):
    with pytest.raises(EmulationFault) as caught:
        run_barrier(remove(kernels("barrier"), rf"\t{fence} .*"), check_races=True)
    assert caught.value.kind == "race"


def test_too_few_programs_deadlock(kernels):
    counter, data = np.zeros(4, np.int32), np.zeros(2 * 8 * 256, np.float32)
    with pytest.raises(EmulationFault) as caught:
        launch(kernels("barrier"), 7, [counter, data], schedule="interleaved")
    assert caught.value.kind == "deadlock"


# ---------------------------------------------------------------------- planted faults


def remove(kernel, pattern, which=None):
    """Turn instructions into comments, keeping the line numbers: all of them, or one."""
    places = [m.span() for m in re.finditer(pattern, kernel.assembly)]
    assert places
    text = kernel.assembly
    for position, (start, end) in enumerate(places):
        if which is None or position == which:
            text = text[:start] + ";" * (end - start) + text[end:]
    return dataclasses.replace(kernel, assembly=text)


def test_missing_barrier_is_a_race(kernels, rng):
    with pytest.raises(EmulationFault) as caught:
        run_dot(remove(kernels("dot"), r"\ts_barrier"), rng, check_races=True)
    assert caught.value.kind == "race" and "local memory" in caught.value.what


@pytest.mark.parametrize("count", ["vmcnt", "lgkmcnt"])
def test_missing_waits_are_noticed(kernels, rng, count):
    kernel = kernels("dot")
    total = len(re.findall(rf"\ts_waitcnt {count}\(\d+\)\n", kernel.assembly))
    found = []
    chosen = range(0, total, max(1, total // 5))
    for which in chosen:
        try:
            error = run_dot(remove(kernel, rf"\ts_waitcnt {count}\(\d+\)(?=\n)", which), rng, check_races=True)
            found.append("wrong" if error > 1e-4 else "")
        except EmulationFault as fault:
            found.append(fault.kind)
    assert found and set(found) & {"in flight", "race"}
    assert sum(map(bool, found)) >= 0.8 * len(found), found


@pytest.mark.parametrize("drained", [True, False])
def test_undrained_local_writes_do_not_pass_a_barrier(drained):
    wait = "s_waitcnt lgkmcnt(0)" if drained else "s_nop 0"
    body = f"""ds_write_b32 v250, v1
        {wait}
        s_barrier
        v_xor_b32_e32 v2, 0x100, v250
        ds_read_b32 v10, v2
        s_waitcnt lgkmcnt(0)"""
    values = np.arange(128)
    if drained:
        (result,) = run_snippet(body, [values], ["v10"], threads=128, check_races=True)
        assert (result == values ^ 64).all()
        return
    with pytest.raises(EmulationFault) as caught:
        run_snippet(body, [values], ["v10"], threads=128, check_races=True)
    assert caught.value.kind == "race" and "local memory" in caught.value.what


def test_off_by_one_bound_is_noticed(kernels, rng):
    a, b = rng.standard_normal((2, 999)).astype(np.float32)
    with pytest.raises(EmulationFault) as caught:
        launch(kernels("add"), 1, [a, b, np.zeros_like(a), 1000], inputs=2)
    assert caught.value.kind == "out of bounds" and "byte 3996" in caught.value.what
