"""Memory of gfx950: buffer bounds, local memory, scratch, atomics, and the faults of each."""

from __future__ import annotations

import numpy as np
import pytest
from gfx950_support import Snippet, launch, make_snippet, run_snippet

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.machine import list_unknown

LANES = np.arange(64)


def expect_fault(kind, body, outputs=("v10",), inputs=(LANES,), **options):
    with pytest.raises(EmulationFault) as caught:
        run_snippet(body, list(inputs), list(outputs), **options)
    assert caught.value.kind == kind, caught.value.message
    assert caught.value.line > 0
    return caught.value


def test_buffer_bounds_give_zero_and_drop():
    body = """s_mov_b32 s8, s6
        s_and_b32 s9, s7, 0xffff
        s_mov_b32 s10, 128
        s_mov_b32 s11, 0x27000
        buffer_store_dword v1, v250, s[8:11], 0 offen
        s_mov_b32 s8, s4
        s_and_b32 s9, s5, 0xffff
        s_mov_b32 s10, 200
        buffer_load_dwordx2 v[10:11], v250, s[8:11], 0 offen
        s_waitcnt vmcnt(0)"""
    snippet = make_snippet(body + "\nglobal_store_dword v250, v11, s[6:7] offset:256", 1)
    result = np.zeros((2, 64), np.uint32)
    launch(snippet, 1, [(LANES + 1).astype(np.uint32), result], inputs=1)
    assert result[0].tolist() == [k + 1 if k < 32 else 0 for k in range(64)]
    assert result[1].tolist() == [k + 2 if k < 49 else 0 for k in range(64)]


def test_buffer_inside_records_must_exist():
    body = """s_mov_b32 s8, s4
        s_and_b32 s9, s5, 0xffff
        s_mov_b32 s10, 0x7ffffffe
        s_mov_b32 s11, 0x27000
        buffer_load_dword v10, v250, s[8:11], 0 offen offset:4
        s_waitcnt vmcnt(0)"""
    fault = expect_fault("out of bounds", body)
    assert "byte 256" in fault.what


def test_global_bounds_and_read_only():
    expect_fault("out of bounds", "global_load_dword v10, v250, s[4:5] offset:4\ns_waitcnt vmcnt(0)")
    expect_fault("read-only", "global_store_dword v250, v1, s[4:5]\nv_mov_b32_e32 v10, 0")


def test_local_memory_bounds_and_initialisation():
    expect_fault("out of bounds", "ds_write_b32 v250, v1 offset:772\nv_mov_b32_e32 v10, 0")
    fault = expect_fault("uninitialised", "ds_read_b32 v10, v250\ns_waitcnt lgkmcnt(0)")
    assert "global_store" in fault.text


def test_undefined_registers_may_move_but_not_decide():
    run_snippet("v_mov_b32_e32 v11, v20\nv_and_b32_e32 v10, 0, v11", [LANES], ["v10"])
    expect_fault("uninitialised", "v_mov_b32_e32 v10, v20")
    expect_fault("uninitialised", "global_load_dword v10, v20, s[4:5]\ns_waitcnt vmcnt(0)")
    expect_fault("uninitialised", "v_cmp_eq_u32_e32 vcc, 0, v20\ns_and_saveexec_b64 s[8:9], vcc\nv_mov_b32_e32 v10, 0")
    expect_fault("uninitialised", "s_cmp_eq_u32 s30, 0\ns_cbranch_scc1 .LX\nv_mov_b32_e32 v10, 0\n.LX:")


def test_registers_in_flight():
    load = "global_load_dword v10, v250, s[4:5]\n"
    assert "s_endpgm" in make_snippet("").assembly
    expect_fault("in flight", load + "v_mov_b32_e32 v11, v10\ns_waitcnt vmcnt(0)")
    expect_fault("in flight", load + "v_mov_b32_e32 v10, 0")
    expect_fault(
        "in flight", load + "global_load_dword v11, v250, s[4:5]\ns_waitcnt vmcnt(1)\nv_add_u32_e32 v10, v10, v11"
    )
    run_snippet(
        load + "global_load_dword v11, v250, s[4:5]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v10, v10", [LANES], ["v10"]
    )
    expect_fault("in flight", "s_load_dword s8, s[4:5], 0x0\nv_mov_b32_e32 v10, s8")
    two = "ds_write_b32 v250, v1\ns_load_dword s8, s[4:5], 0x0\nds_read_b32 v10, v250\ns_waitcnt lgkmcnt(1)\n"
    expect_fault("in flight", two + "v_mov_b32_e32 v11, s8\ns_waitcnt lgkmcnt(0)")


@pytest.mark.parametrize("late", [False, True])
def test_local_memory_forms(late):
    body = """v_lshlrev_b32_e32 v2, 3, v0
        ds_write_b32 v250, v1
        ds_write2_b32 v2, v1, v1 offset0:64 offset1:65
        s_waitcnt lgkmcnt(0)
        ds_read2_b32 v[10:11], v250 offset0:0 offset1:64
        ds_read_b64 v[12:13], v2 offset:256
        ds_read_u8 v14, v250
        s_waitcnt lgkmcnt(0)
        ds_read_u16_d16_hi v14, v250
        s_waitcnt lgkmcnt(0)"""
    values = LANES * 3 + 0x100
    a, b, c, d, e = run_snippet(body, [values], ["v10", "v11", "v12", "v13", "v14"], late=late)
    assert (a == values).all() and (b == values[LANES // 2]).all()
    assert (c == values).all() and (d == values).all()
    assert (e == ((values & 0xFF) | values << 16)).all()


@pytest.mark.parametrize(("bits", "dtype"), [(16, np.uint16), (8, np.uint8)])
def test_transposing_reads(bits, dtype):
    """Four (or eight) rows of sixteen elements in a group of sixteen lanes; lane c receives column c.

    The ISA text has no figure; where Triton puts the operands of a product of bytes settles it, see
    ``test_dot_of_bytes`` in test_gfx950_kernels.py.
    """
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 64), dtype=np.uint32)
    body = f"""v_lshlrev_b32_e32 v3, 3, v0
        ds_write2_b32 v3, v1, v2 offset0:0 offset1:1
        s_waitcnt lgkmcnt(0)
        ds_read_b64_tr_b{bits} v[10:11], v3
        s_waitcnt lgkmcnt(0)"""
    got = np.stack(run_snippet(body, list(words), ["v10", "v11"]), axis=1)
    memory = np.ascontiguousarray(words.T).reshape(-1).view(dtype).reshape(4, 64 // bits, 16)
    for lane in range(64):
        assert got[lane].view(dtype).tolist() == memory[lane // 16, :, lane % 16].tolist()


@pytest.mark.parametrize("walks", [True, False])
def test_polling_is_asking_for_the_same(walks):
    """Synchronising loads in a loop: 300 one after the other, or for ever of one address that nobody writes."""
    body = f"""s_movk_i32 s8, 300
        v_mov_b32_e32 v2, 0
        .Lloop:
        global_load_dword v10, v2, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_add_u32_e32 v2, {4 if walks else 0}, v2
        v_and_b32_e32 v2, 0xff, v2
        s_barrier
        s_add_i32 s8, s8, {-1 if walks else 0}
        s_cmp_lg_u32 s8, 0
        s_cbranch_scc1 .Lloop"""
    if walks:
        (result,) = run_snippet(body, [LANES], ["v10"])
        assert (result == 299 % 64).all()
    else:
        assert "poll without any change" in expect_fault("deadlock", body).what


@pytest.mark.parametrize(("address", "kind"), [("v20", ""), ("v21", "uninitialised")])
def test_undefined_high_half_of_an_addend(address, kind):
    """The low dword of a 64-bit sum does not depend on the high dword of what is added."""
    body = f"""v_mov_b32_e32 v10, v1
        v_mad_u64_u32 v[20:21], s[8:9], v1, 4, v[10:11]
        global_load_dword v12, {address}, s[4:5]
        s_waitcnt vmcnt(0)"""
    if kind:
        expect_fault(kind, body, inputs=(LANES * 0,))
    else:
        assert (run_snippet(body, [LANES * 0], ["v12"])[0] == 0).all()


def test_load_into_local_memory():
    body = """s_mov_b32 m0, 256
        v_lshrrev_b32_e32 v2, 1, v250
        v_and_b32_e32 v2, 0x7c, v2
        global_load_lds_dword v2, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b32 v10, v250 offset:256
        s_waitcnt lgkmcnt(0)"""
    for late in (False, True):
        (result,) = run_snippet(body, [LANES + 9], ["v10"], late=late)
        assert (result == (LANES // 2) + 9).all()


def test_scratch():
    body = """scratch_store_dword off, v1, off offset:16
        scratch_load_dword v10, off, off offset:16
        s_waitcnt vmcnt(0)"""
    (result,) = run_snippet(body, [LANES + 3], ["v10"])
    assert (result == LANES + 3).all()
    expect_fault("out of bounds", "scratch_store_dword off, v1, off offset:64\nv_mov_b32_e32 v10, 0")


def test_atomics():
    body = """v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 1
        global_atomic_add v10, v2, v3, s[6:7] offset:256 sc0
        global_atomic_umax v2, v1, s[6:7] offset:260
        global_atomic_smin v2, v1, s[6:7] offset:264
        ds_write_b32 v2, v2
        s_waitcnt lgkmcnt(0)
        ds_add_rtn_u32 v11, v2, v1
        s_waitcnt vmcnt(0) lgkmcnt(0)
        v_mov_b32_e32 v4, 5
        v_mov_b32_e32 v5, 64
        s_mov_b64 exec, 1
        global_atomic_cmpswap v12, v2, v[4:5], s[6:7] offset:256 sc0
        s_mov_b64 exec, -1
        s_waitcnt vmcnt(0)"""
    snippet = make_snippet(
        body + "\nglobal_store_dword v250, v10, s[6:7]\nglobal_store_dword v250, v11, s[6:7] offset:512", 1
    )
    values, result = (LANES * 7 % 64 + 5).astype(np.uint32), np.zeros((3, 64), np.uint32)
    result[1, 2] = 50
    launch(snippet, 1, [values, result], inputs=1)
    assert sorted(result[0].tolist()) == list(range(64))
    assert result[1, :3].tolist() == [5, 68, 5]
    assert result[2].tolist() == [0, *np.cumsum(values[:-1]).tolist()]


def test_unknown_instructions_are_listed():
    unknown = "v_frobnicate_b32 v1, v2\n"
    snippet = make_snippet(f"{unknown}v_mov_b32_e32 v3, v0\n{unknown}v_add_f16_e64 v1, v2, v3 op_sel:[1,0,0]")
    found = list_unknown(snippet.assembly, "snippet")
    assert [(u.form, u.count) for u in found] == [("v_frobnicate_b32", 2), ("v_add_f16_e64 op_sel", 1)]
    with pytest.raises(EmulationFault) as caught:
        launch(snippet, 1, [np.zeros(64, np.uint32)] * 2)
    assert caught.value.kind == "unknown instruction" and caught.value.line == found[0].line


def test_trap_deadlock_and_barriers():
    expect_fault("trap", "s_trap 2\nv_mov_b32_e32 v10, 0")
    spin = """v_mov_b32_e32 v10, 0
        .LSPIN:
        global_load_dword v11, v10, s[6:7] sc1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s8, v11
        s_cmp_eq_u32 s8, 7
        s_cbranch_scc0 .LSPIN"""
    expect_fault("deadlock", spin)
    leave = """v_readfirstlane_b32 s8, v0
        v_mov_b32_e32 v10, 0
        s_cmp_eq_u32 s8, 0
        s_cbranch_scc1 .LOUT
        s_barrier
        .LOUT:"""
    expect_fault("divergent barrier", leave, threads=128, inputs=(np.arange(128),))


def test_calls():
    body = """s_getpc_b64 s[8:9]
        s_add_u32 s8, s8, .LFUNCTION@rel32@lo+4
        s_addc_u32 s9, s9, .LFUNCTION@rel32@hi+12
        s_swappc_b64 s[30:31], s[8:9]
        s_branch .LEND
        .LFUNCTION:
        v_add_u32_e32 v10, 5, v1
        s_setpc_b64 s[30:31]
        .LEND:"""
    (result,) = run_snippet(body, [LANES], ["v10"])
    assert (result == LANES + 5).all()


@pytest.mark.parametrize("clock", ["s_memrealtime", "s_memtime"])
def test_clocks_advance_and_return_like_scalar_loads(clock):
    body = f"""{clock} s[8:9]
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v10, 0
        .LLOOP:
        v_add_u32_e32 v10, 1, v10
        v_readfirstlane_b32 s14, v10
        {clock} s[10:11]
        s_waitcnt lgkmcnt(0)
        s_sub_u32 s12, s10, s8
        s_subb_u32 s13, s11, s9
        s_cmp_lt_u32 s12, 100
        s_cbranch_scc1 .LLOOP
        v_mov_b32_e32 v11, s12
        v_mov_b32_e32 v12, s13"""
    rounds, low, high = run_snippet(body, [LANES], ["v10", "v11", "v12"])
    assert (rounds > 5).all() and (rounds < 50).all()
    assert (low >= 100).all() and (low < 150).all() and (high == 0).all()
    fault = expect_fault("in flight", f"{clock} s[8:9]\nv_mov_b32_e32 v10, s9")
    assert "s9" in fault.what


def test_the_runtime_fills_in_hidden_arguments():
    """tl.num_programs reads a hidden argument."""
    hidden = "  - .args:\n" + "".join(
        f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: {kind}\n"
        for offset, size, kind in (
            (0, 8, "global_buffer"), (8, 8, "global_buffer"), (16, 4, "hidden_block_count_x"),
            (20, 4, "hidden_block_count_z"), (24, 2, "hidden_group_size_x"), (26, 2, "hidden_remainder_x"),
        )
    )  # fmt: skip
    body = """s_load_dwordx2 s[8:9], s[0:1], 0x10
        s_load_dword s10, s[0:1], 0x18
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v10, s8
        v_mov_b32_e32 v11, s9
        v_mov_b32_e32 v12, s10"""
    plain = make_snippet(body, 0, ["v10", "v11", "v12"])
    before, after = plain.assembly.split("  - .args:\n")
    text = before.replace("kernarg_size 16", "kernarg_size 32") + hidden + after[after.index("    .group_segment") :]
    result = np.zeros((3, 64), np.uint32)
    launch(Snippet(text), (3, 1, 2), [np.zeros((1, 64), np.uint32), result], inputs=1)
    assert (result[0] == 3).all() and (result[1] == 2).all() and (result[2] == 64).all()
