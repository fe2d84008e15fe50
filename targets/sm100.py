"""The Blackwell target (B200, B300): NVFP4 tensor cores, and QMUL4 to decode an NVFP4 cache."""

from __future__ import annotations

from mmcompile.core.formats.nvfp4_cache import TOKEN_QUAD
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._features import BLACKWELL_FAMILY, minimum_ptx
from mmcompile.targets._target import Target

_B200 = BLACKWELL_FAMILY | {"cvt_stochastic", "qmul4", "tcgen05_i8"}
_B300 = BLACKWELL_FAMILY | {"cvt_stochastic", "qmul4", "tcgen05_ld_red", "ex2_packed"}
_TILES = tuple((m, n) for m in (64, 128) for n in (8, 16, 32, 64, 128, 256))
_HALF = ((16, 8, 16), *((m, n, 16) for m, n in _TILES))

TARGET = Target(
    TargetSpec(
        name="sm100",
        description="NVIDIA Blackwell (B200 figures; B300 by its own binary)",
        backend="cuda",
        architectures=(
            Architecture("sm_100a", 100, _B200, minimum_ptx(_B200), ("10.0",)),
            Architecture("sm_103a", 103, _B300, minimum_ptx(_B300), ("10.3",)),
        ),
        warp_size=32,
        units=148,
        threads_per_unit=2048,
        registers_per_thread=255,
        shared_memory_per_block=227 * 1024,
        tensor_memory_columns=512,
        memory_bandwidth=8.0e12,
        mma_shapes={
            ("bfloat16", "bfloat16"): _HALF,
            ("float16", "float16"): _HALF,
            ("float8_e4m3fn", "float8_e4m3fn"): tuple((m, n, 32) for m, n in _TILES),
            ("float4_e2m1fn_x2", "float4_e2m1fn_x2"): tuple((128, n, 64) for n in (8, 16, 32, 64, 128, 256)),
        },
        scale_formats=("e4m3/16", "e8m0/32"),
        driver="NVIDIA driver 580 (CUDA 13.0) or newer",
        executed_on="never on hardware",
        cache_layouts=(TOKEN_QUAD,),
    )
)
