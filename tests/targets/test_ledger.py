"""The instruction ledger: counting mnemonics in listings and holding them against promises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import LoweringError
from mmcompile.core.kernel import KernelSource
from mmcompile.targets._disassemble import check_ledger, count_instructions


def test_count_instructions():
    sass = (
        "        /*00e0*/              @!P0 LDG.E.128 R0, desc[UR4][R4.64] ;\n"
        "        /*00f0*/         { @UP0 QMUL4.E4M3x4.E2M1x4.E4M3x4.SATFINITE R1, R2, R3 ;\n"
        "        /*0100*/                   EXIT ;\n.L_x_1:\n"
    )
    assert count_instructions(sass, "cuda") == {
        "EXIT": 1,
        "LDG.E.128": 1,
        "QMUL4.E4M3x4.E2M1x4.E4M3x4.SATFINITE": 1,
    }
    ptx = (
        ".version 9.4\n$L__BB0:\n\t@%p1 bra $L__BB0;\n// add.f32 no\n"
        "{ .reg .b32 a; mov.b32 a, 1; add.u32 %r1, a, a; }\n"
        "\ttcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1;\n\tret;\n/* mul.f32\n x; */"
    )
    assert count_instructions(ptx, "ptx") == {
        "add.u32": 1,
        "bra": 1,
        "mov.b32": 1,
        "ret": 1,
        "tcgen05.mma.cta_group::1.kind::f16": 1,
    }
    gcn = "kernel:\n\ts_load_dwordx2 s[0:1], s[2:3]\n; v_add\n\t.set v_x, 1\n"
    gcn += "\tv_add_f32_e32 v0, v1, v2\n.LBB0:\n\ts_endpgm\n"
    assert count_instructions(gcn, "hip") == {"s_endpgm": 1, "s_load_dwordx2": 1, "v_add_f32_e32": 1}
    with pytest.raises(ValueError, match="syntax"):
        count_instructions("", "metal")


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["add.f32", "mul.f32", "FADD", "HMMA.16816"]), st.integers(1, 9)), st.booleans())
def test_ledger_promises(counts, expected):
    for pattern in ("f32", "HMMA"):
        source = KernelSource("probe", "", (), ("1", "1", "1"), ledger={pattern: expected})
        if any(pattern in name for name in counts) is expected:
            assert check_ledger(source, counts) == []
        else:
            with pytest.raises(LoweringError, match=pattern):
                check_ledger(source, counts)


def test_sass_promises_without_sass_are_warnings():
    source = KernelSource("probe", "", (), ("1", "1", "1"), ledger={"HMMA": True, "mma.sync": True})
    (warning,) = check_ledger(source, {"mma.sync": 1}, ["ptx"])
    assert "HMMA" in warning
    with pytest.raises(LoweringError, match="mma.sync"):
        check_ledger(source, {"HMMA": 1}, ["ptx"])
