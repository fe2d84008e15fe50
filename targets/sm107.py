"""The Rubin target: no QMUL4, twice the MMA depth, 327 KB of shared memory by opt-in, packed exp2."""

from __future__ import annotations

from mmcompile.core.formats.nvfp4_cache import TOKEN_QUAD
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._features import BLACKWELL_FAMILY, minimum_ptx
from mmcompile.targets._target import Target

_RUBIN = BLACKWELL_FAMILY | {
    "cvt_stochastic",
    "ex2_packed",
    "shared_memory_oversized",
    "tcgen05_collector_b",
    "tcgen05_ld_red",
}
_N = (8, 16, 32, 64, 128, 256)
_HALF = ((16, 8, 16), *((m, n, 16) for m in (64, 128) for n in _N))

TARGET = Target(
    TargetSpec(
        name="sm107",
        description="NVIDIA Rubin, with a family binary that Blackwell loads too",
        backend="cuda",
        architectures=(
            Architecture("sm_107a", 107, _RUBIN, minimum_ptx(_RUBIN), ("10.7",)),
            Architecture("sm_100f", 100, BLACKWELL_FAMILY, minimum_ptx(BLACKWELL_FAMILY), ("10.7", "10.3", "10.0")),
        ),
        warp_size=32,
        # NVIDIA's announcement of the product, not a measurement: the runtime must ask the device for its SMs.
        units=224,
        threads_per_unit=1024,
        registers_per_thread=255,
        shared_memory_per_block=327 * 1024,
        tensor_memory_columns=576,
        memory_bandwidth=22e12,
        mma_shapes={
            ("bfloat16", "bfloat16"): _HALF,
            ("float16", "float16"): _HALF,
            ("float8_e4m3fn", "float8_e4m3fn"): (
                *((64, n, 32) for n in _N),
                *((128, n, k) for n in _N for k in (32, 64)),
            ),
            ("float4_e2m1fn_x2", "float4_e2m1fn_x2"): tuple((128, n, 128) for n in _N),
        },
        scale_formats=("e4m3/16", "e8m0/32", "ue5m3/16"),
        driver="NVIDIA driver for CUDA 13.4 (r615) or newer",
        executed_on="never on hardware",
        cache_layouts=(TOKEN_QUAD,),
    )
)
