"""The CPU target: no binaries; a plan runs with the operations' PyTorch references."""

from __future__ import annotations

from mmcompile.core.spec import TargetSpec
from mmcompile.targets._target import Target

TARGET = Target(
    TargetSpec(
        name="cpu",
        description="any CPU, by the operations' references",
        backend="",
        architectures=(),
        warp_size=1,
        units=1,
        threads_per_unit=1,
        registers_per_thread=0,
        shared_memory_per_block=0,
        tensor_memory_columns=0,
        memory_bandwidth=50e9,
        mma_shapes={},
        scale_formats=("e4m3/16", "e8m0/32"),
        driver="",
        executed_on="any CPU",
    )
)
