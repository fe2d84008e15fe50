"""Run an artifact's own binaries on a GPU of this machine, in the place of the interpreter of verify."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError
from mmcompile.core.kernel import KernelSource
from mmcompile.core.plan import Plan
from mmcompile.driver.verify_run import GUARD
from mmcompile.runtime.artifact import Artifact
from mmcompile.runtime.device_cuda import CudaDriver
from mmcompile.runtime.device_driver import PackedArguments
from mmcompile.targets._interpret import Argument
from mmcompile.targets._target import Target

_SPARE = 256
"""Bytes after every buffer, so that a faulty kernel meets memory of this process, not a fault."""


class DeviceRunner:
    """Launches kernels of one plan with CPU tensors as arguments: they go over, run, and come back.

    Raises ArtifactError if the plan has no binary for the GPU, ToolchainError if there is no GPU.
    """

    proof = "hardware"
    sampling = None
    guard = GUARD

    def __init__(self, artifact: Artifact, plan: Plan, target: Target) -> None:
        self._artifact, self._plan = artifact, plan
        self._driver = CudaDriver()
        found = [a.name for a in target.spec.architectures if self._driver.architecture in a.runs_on]
        if not found:
            raise ArtifactError(
                f"target {plan.target} does not run on {self._driver.device_name} ({self._driver.architecture})",
                fix="verify it in the interpreter, without --device",
            )
        self.architecture = found[0]

    def __enter__(self) -> DeviceRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.close()

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
        *,
        written: Collection[int] = (),
    ) -> list[Argument]:
        """Launch the whole grid of ``source.name``'s binary; returns the arguments as they are after the run."""
        assert programs is None, "a GPU runs whole grids"
        self._driver.activate()
        binary = self._plan.kernels[source.name].binaries[self.architecture]
        image = self._artifact.read_binary(source.name, binary)
        function = self._driver.load_kernel(image, binary.symbol, binary.shared)
        bases: dict[int, tuple[int, Tensor]] = {}
        values = [self._upload(a, bases) if isinstance(a, Tensor) else int(a) for a in arguments]
        count = grid[0] * grid[1] * grid[2]
        for size in (binary.global_scratch_size, binary.profile_scratch_size):
            values.append(self._driver.allocate(count * size) if size else 0)
        packed = PackedArguments(values)
        self._driver.launch(function, grid, binary.num_warps * binary.warp_size, binary.shared, packed.address)
        for pointer, storage in bases.values():
            self._driver.copy_to_host(storage.data_ptr(), pointer, storage.numel())
        self._driver.synchronize()
        results: list[Argument] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                flat = bases[argument.untyped_storage().data_ptr()][1].view(argument.dtype)
                results.append(flat.as_strided(argument.shape, argument.stride(), argument.storage_offset()))
            else:
                results.append(argument)
        self._driver.release_memory()
        return results

    def _upload(self, tensor: Tensor, bases: dict[int, tuple[int, Tensor]]) -> int:
        """Device address of the tensor's first element; its storage is copied once however many arguments share it."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in bases:
            host = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            pointer = self._driver.allocate(host.numel() + _SPARE)
            self._driver.copy_to_device(pointer, host.data_ptr(), host.numel())
            self._driver.synchronize()
            bases[key] = pointer, host
        return bases[key][0] + tensor.storage_offset() * tensor.element_size()
