"""The Hopper target (H100, H200): software decode of NVFP4; the one target that is run and timed on hardware."""

from __future__ import annotations

from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._features import HOPPER, minimum_ptx
from mmcompile.targets._target import Target

_WGMMA_N = (8, 16, 32, 64, 128, 256)
_HALF = ((16, 8, 16), *((64, n, 16) for n in _WGMMA_N))

TARGET = Target(
    TargetSpec(
        name="sm90",
        description="NVIDIA Hopper (H200 figures)",
        backend="cuda",
        architectures=(Architecture("sm_90a", 90, HOPPER, minimum_ptx(HOPPER), ("9.0",)),),
        warp_size=32,
        units=132,
        threads_per_unit=2048,
        registers_per_thread=255,
        shared_memory_per_block=227 * 1024,
        tensor_memory_columns=0,
        memory_bandwidth=4.8e12,
        mma_shapes={
            ("bfloat16", "bfloat16"): _HALF,
            ("float16", "float16"): _HALF,
            ("float8_e4m3fn", "float8_e4m3fn"): tuple((64, n, 32) for n in _WGMMA_N),
        },
        scale_formats=(),
        cache_layouts=(SM90, SM90_INDEX),
        driver="NVIDIA driver 580 (CUDA 13.0) or newer",
        executed_on="NVIDIA H200",
    )
)
