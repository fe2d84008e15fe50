"""What a target is: a frozen table of facts. Code asks ``spec.has(feature)``, never for a target's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One binary flavour of a target, e.g. sm_103a of sm100.

    Attributes:
        name: toolchain spelling, e.g. "sm_100a", "gfx950".
        capability: what Triton's GPUTarget takes: 90, 100, 103, 107 or "gfx950".
        features: instruction features of this flavour, e.g. {"qmul4", "cvt_e2m1_f16x2"}.
        minimum_ptx: lowest PTX ISA version the emitted code needs, "" where there is no PTX.
        runs_on: device names (compute capability "9.0" or gfx name) that load this binary.
    """

    name: str
    capability: int | str
    features: frozenset[str]
    minimum_ptx: str
    runs_on: tuple[str, ...]


@dataclass(frozen=True)
class TargetSpec:
    """Facts about a target. Sizes in bytes, bandwidth in bytes per second, times in seconds.

    ``mma_shapes`` maps (a dtype, b dtype) to the (m, n, k) tiles its matrix unit takes; ``units`` is the number of
    SMs or CUs; ``backend`` is Triton's backend name ("cuda", "hip") or "" where no binary is made.

    ``cache_layouts``: tags of ``core.formats.nvfp4_cache`` in order of preference, of KV pages and of index keys; the
    first that a cache fits is taken, the linear ones where none does.
    """

    name: str
    description: str
    backend: str
    architectures: tuple[Architecture, ...]
    warp_size: int
    units: int
    threads_per_unit: int
    registers_per_thread: int
    shared_memory_per_block: int
    tensor_memory_columns: int
    memory_bandwidth: float
    mma_shapes: dict[tuple[str, str], tuple[tuple[int, int, int], ...]]
    scale_formats: tuple[str, ...]
    driver: str
    executed_on: str
    cache_layouts: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        """True if every architecture of the target has ``feature``."""
        return bool(self.architectures) and all(feature in a.features for a in self.architectures)
