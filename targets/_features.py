"""Instruction features: the names that kernels ask for, what each means, and one instruction that proves it.

A feature is claimed by an Architecture only if its example assembles for it; tests/targets/test_specs.py assembles
every claim and every refusal. "min PTX" is the ISA version that introduced the instruction.

| name | meaning | min PTX | example |
|---|---|---|---|
| mma_m16n8k16 | warp-level f16/bf16 matrix multiply | 7.0 | mma.sync.aligned.m16n8k16 |
| mul_bf16x2 | packed bf16 multiply | 7.8 | mul.rn.bf16x2 |
| ex2_bf16x2 | packed exp2 as an instruction, whatever its speed | 7.8 | ex2.approx.ftz.bf16x2 |
| ex2_packed | packed exp2 is ONE operation, so it doubles the rate | 7.8 | the same as MUFU.EX2.BF16x2 |
| cvt_e4m3_f16x2 | decode two E4M3 to f16 | 7.8 | cvt.rn.f16x2.e4m3x2 |
| cvt_f16x2_e4m3 | encode two f16 to E4M3 | 7.8 | cvt.rn.satfinite.e4m3x2.f16x2 |
| griddepcontrol | programmatic dependent launch | 7.8 | griddepcontrol.wait |
| tma | tensor copies by descriptor | 8.0 | cp.async.bulk.tensor.2d |
| setmaxnreg | move registers between warp groups | 8.0 | setmaxnreg.inc.sync.aligned.u32 |
| wgmma | warp-group matrix multiply of sm_90a | 8.0 | wgmma.mma_async.sync.aligned |
| cvt_e2m1_f16x2 | decode two E2M1 to f16 | 8.6 | cvt.rn.f16x2.e2m1x2 |
| cvt_f32_e2m1 | encode two f32 to E2M1 | 8.6 | cvt.rn.satfinite.e2m1x2.f32 |
| cvt_e2m1_bf16x2 | decode two E2M1 to bf16 | 9.2 | cvt.rn.bf16x2.e2m1x2 |
| cvt_e4m3_bf16x2 | decode two E4M3 to bf16 | 9.2 | cvt.rn.bf16x2.e4m3x2 |
| cvt_stochastic | stochastic rounding to E2M1 | 8.7 | cvt.rs.satfinite.e2m1x4.f32 |
| fma_f32x2 | two f32 multiply-adds in one operation | 8.6 | fma.rn.f32x2 |
| max3_f32 | maximum of three f32 | 8.8 | max.f32 d, a, b, c |
| redux_f32 | warp-wide f32 maximum | 8.6 | redux.sync.max.f32 |
| ld_global_v8 | 256-bit global load | 8.8 | ld.global.v8.b32 |
| cluster_launch_control | dynamic persistent scheduling | 8.6 | clusterlaunchcontrol.try_cancel |
| tcgen05 | tensor-memory matrix multiply | 8.6 | tcgen05.mma kind::f16 |
| tcgen05_block_scale | MMA on NVFP4 with E4M3 block-16 scales | 8.8 | kind::mxf4nvf4.block_scale.block16 |
| tcgen05_i8 | int8 tensor-memory matrix multiply | 8.6 | tcgen05.mma kind::i8 |
| tcgen05_ld_red | row maximum fused in the tensor-memory load | 8.8 | tcgen05.ld.red |
| tcgen05_collector_b | keep the B operand between multiplies | 9.4 | tcgen05.mma.collector::b::fill |
| qmul4 | four E2M1 by four E4M3 to four E4M3, one operation | 9.4 | mul.e4m3x4.e2m1x4.e4m3x4.satfinite |
| shared_memory_oversized | above 227 KB of shared memory by launch attribute | 9.4 | (a limit, no instruction) |
| cvt_scalef32_fp4 | decode two E2M1, scale = power of two | - | v_cvt_scalef32_pk_bf16_fp4 |
| cvt_scalef32_fp8 | decode two E4M3, scale = power of two | - | v_cvt_scalef32_pk_bf16_fp8 |
| cvt_pk_bf16_f32 | round two f32 to bf16 | - | v_cvt_pk_bf16_f32 |
| pk_mul_f32 | two f32 multiplies in one operation | - | v_pk_mul_f32 |
| dot2_bf16 | two-element bf16 dot product to f32 | - | v_dot2_f32_bf16 |
| mfma_16x16x32_bf16 | wave-level bf16 matrix multiply | - | v_mfma_f32_16x16x32_bf16 |
| mfma_scale_f8f6f4 | MMA on FP8/FP6/FP4 with E8M0 block-32 scales | - | v_mfma_scale_f32_16x16x128_f8f6f4 |
| ds_read_tr | transposing read of local memory | - | ds_read_b64_tr_b16 |
| permlane_swap | swap halves of a wave between registers | - | v_permlane32_swap_b32 |
| load_to_lds_b128 | 128-bit load straight into local memory | - | buffer_load_dwordx4 ... lds |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One instruction feature.

    Attributes:
        name: what kernels ask for with ``"name" in architecture.features``.
        minimum_ptx: ISA version that introduced it, "" on AMD.
        example: an instruction over the probe's registers (see ``mmcompile.targets._assemble``); "" for a limit.
        sass: what the disassembly must then hold, where assembling alone proves too little.
    """

    name: str
    minimum_ptx: str
    example: str
    sass: str = ""


_MMA = "tcgen05.mma.cta_group::1.kind::"
_TRY_CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
_TMA = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"

_ALL = (
    Feature(
        "mma_m16n8k16",
        "7.0",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {f0,f1,f2,f3}, {r0,r1,r2,r3}, {r4,r5}, {f0,f1,f2,f3};",
    ),
    Feature("mul_bf16x2", "7.8", "mul.rn.bf16x2 r0, r1, r2;"),
    Feature("ex2_bf16x2", "7.8", "ex2.approx.ftz.bf16x2 r0, r1;"),
    Feature("ex2_packed", "7.8", "ex2.approx.ftz.bf16x2 r0, r1;", sass="MUFU.EX2.BF16x2"),
    Feature("cvt_e4m3_f16x2", "7.8", "cvt.rn.f16x2.e4m3x2 r0, h1;"),
    Feature("cvt_f16x2_e4m3", "7.8", "cvt.rn.satfinite.e4m3x2.f16x2 h1, r1;"),
    Feature("griddepcontrol", "7.8", "griddepcontrol.wait;"),
    Feature("tma", "8.0", f"{_TMA} [r1], [d1, {{r2, r3}}], [r4];"),
    Feature("setmaxnreg", "8.0", "setmaxnreg.inc.sync.aligned.u32 64;"),
    Feature(
        "wgmma", "8.0", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {f0,f1,f2,f3}, d1, d2, 1, 1, 1, 0, 0;"
    ),
    Feature("cvt_e2m1_f16x2", "8.6", "cvt.rn.f16x2.e2m1x2 r0, b1;"),
    Feature("cvt_f32_e2m1", "8.6", "cvt.rn.satfinite.e2m1x2.f32 b1, f1, f2;"),
    Feature("cvt_e2m1_bf16x2", "9.2", "cvt.rn.bf16x2.e2m1x2 r0, b1;"),
    Feature("cvt_e4m3_bf16x2", "9.2", "cvt.rn.bf16x2.e4m3x2 r0, h1;"),
    Feature("cvt_stochastic", "8.7", "cvt.rs.satfinite.e2m1x4.f32 h1, {f0,f1,f2,f3}, r1;"),
    Feature("fma_f32x2", "8.6", "fma.rn.f32x2 d1, d1, d2, d3;"),
    Feature("max3_f32", "8.8", "max.f32 f0, f1, f2, f3;"),
    Feature("redux_f32", "8.6", "redux.sync.max.f32 f0, f1, 0xffffffff;"),
    Feature("ld_global_v8", "8.8", "ld.global.v8.b32 {r0,r1,r2,r3,r4,r5,r6,r7}, [d1];"),
    Feature("cluster_launch_control", "8.6", f"{_TRY_CANCEL} [r1], [r2];"),
    Feature("tcgen05", "8.6", f"{_MMA}f16 [r1], d1, d2, r2, p1;"),
    Feature("tcgen05_block_scale", "8.8", f"{_MMA}mxf4nvf4.block_scale.block16 [r1], d1, d2, r2, [r3], [r4], p1;"),
    Feature("tcgen05_i8", "8.6", f"{_MMA}i8 [r1], d1, d2, r2, p1;"),
    Feature("tcgen05_ld_red", "8.8", "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {r0,r5}, r6, [r1];"),
    Feature("tcgen05_collector_b", "9.4", f"{_MMA}f8f6f4.collector::b::fill [r1], d1, d2, r2, p1;"),
    Feature("qmul4", "9.4", "mul.e4m3x4.e2m1x4.e4m3x4.satfinite r0, h1, r2;", sass="QMUL4"),
    Feature("shared_memory_oversized", "9.4", ""),
    Feature("cvt_scalef32_fp4", "", "v_cvt_scalef32_pk_bf16_fp4 v0, v1, 1.0"),
    Feature("cvt_scalef32_fp8", "", "v_cvt_scalef32_pk_bf16_fp8 v0, v1, 1.0"),
    Feature("cvt_pk_bf16_f32", "", "v_cvt_pk_bf16_f32 v0, v1, v2"),
    Feature("pk_mul_f32", "", "v_pk_mul_f32 v[0:1], v[2:3], v[4:5]"),
    Feature("dot2_bf16", "", "v_dot2_f32_bf16 v0, v1, v2, v3"),
    Feature("mfma_16x16x32_bf16", "", "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]"),
    Feature(
        "mfma_scale_f8f6f4",
        "",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21 op_sel_hi:[0,0,0]",
    ),
    Feature("ds_read_tr", "", "ds_read_b64_tr_b16 v[0:1], v2"),
    Feature("permlane_swap", "", "v_permlane32_swap_b32 v0, v1"),
    Feature("load_to_lds_b128", "", "buffer_load_dwordx4 v0, s[0:3], 0 offen lds"),
)

FEATURES: dict[str, Feature] = {feature.name: feature for feature in _ALL}

HOPPER = frozenset(
    {
        "mma_m16n8k16",
        "mul_bf16x2",
        "ex2_bf16x2",
        "cvt_e4m3_f16x2",
        "cvt_f16x2_e4m3",
        "griddepcontrol",
        "tma",
        "setmaxnreg",
        "wgmma",
    }
)
BLACKWELL_FAMILY = (HOPPER - {"wgmma"}) | {
    "cvt_e2m1_f16x2",
    "cvt_f32_e2m1",
    "cvt_e2m1_bf16x2",
    "cvt_e4m3_bf16x2",
    "fma_f32x2",
    "max3_f32",
    "redux_f32",
    "ld_global_v8",
    "cluster_launch_control",
    "tcgen05",
    "tcgen05_block_scale",
}
CDNA4 = frozenset(name for name, feature in FEATURES.items() if not feature.minimum_ptx)


def minimum_ptx(features: Iterable[str]) -> str:
    """The lowest PTX ISA version that has every one of ``features``; "" if none of them is a PTX instruction."""
    versions = [FEATURES[name].minimum_ptx for name in features if FEATURES[name].minimum_ptx]
    return max(versions, key=lambda text: tuple(map(int, text.split("."))), default="")
