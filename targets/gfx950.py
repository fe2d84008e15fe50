"""The CDNA 4 target (MI355X): waves of 64; NVFP4 is decoded exactly to bf16 before the bf16 matrix multiply."""

from __future__ import annotations

from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._features import CDNA4
from mmcompile.targets._target import Target

_HALF = ((16, 16, 32), (32, 32, 16))
_SCALED = ((16, 16, 128), (32, 32, 64))

TARGET = Target(
    TargetSpec(
        name="gfx950",
        description="AMD Instinct MI355X (CDNA 4)",
        backend="hip",
        architectures=(Architecture("gfx950", "gfx950", CDNA4, "", ("gfx950",)),),
        warp_size=64,
        units=256,
        threads_per_unit=2048,
        registers_per_thread=512,
        shared_memory_per_block=160 * 1024,
        tensor_memory_columns=0,
        memory_bandwidth=8.0e12,
        mma_shapes={
            ("bfloat16", "bfloat16"): _HALF,
            ("float16", "float16"): _HALF,
            ("float8_e4m3fn", "float8_e4m3fn"): _SCALED,
            ("float4_e2m1fn_x2", "float4_e2m1fn_x2"): _SCALED,
        },
        scale_formats=("e8m0/32",),
        driver="ROCm with gfx950 support (libamdhip64)",
        executed_on="never on hardware",
    )
)
