"""NVIDIA GPUs through the CUDA driver API (package cuda-bindings); nothing of torch.cuda is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmcompile.core.errors import ToolchainError

_STATIC_SHARED_LIMIT = 48 * 1024


def _import_driver() -> Any:
    """The module of driver calls; ToolchainError if the package is not installed."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        raise ToolchainError(
            "the device 'cuda' needs the package cuda-bindings", fix="run `pip install 'mmcompile[nvidia]'`"
        ) from None


class CudaDriver:
    """The primary context of a GPU and one stream. See :class:`mmcompile.runtime.device_gpu.Driver`.

    Raises ToolchainError if there is no package, no driver or no GPU, and for every call that fails.
    """

    kind = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        self._cu = _import_driver()
        try:
            self._check(self._cu.cuInit(0))
        except RuntimeError as error:  # cuda-bindings raises it where libcuda.so cannot be loaded
            raise ToolchainError(
                f"no CUDA driver on this machine ({str(error).splitlines()[0]})",
                fix="install the NVIDIA driver, or load the artifact with device='cpu'",
            ) from None
        if self._check(self._cu.cuDeviceGetCount()) <= ordinal:
            raise ToolchainError("no NVIDIA GPU on this machine", fix="load the artifact with device='cpu'")
        self._device = self._check(self._cu.cuDeviceGet(ordinal))
        self._context = self._check(self._cu.cuDevicePrimaryCtxRetain(self._device))
        self.activate()
        attribute = self._cu.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.architecture = f"{major}.{minor}"
        name = self._check(self._cu.cuDeviceGetName(128, self._device))
        self.device_name = name.split(b"\0")[0].decode()
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._check(self._cu.cuStreamCreate(flags))
        self._memory: list[Any] = []
        self._host_memory: list[int] = []
        self._modules: dict[bytes, Any] = {}
        self._graphs: list[Any] = []

    def _attribute(self, attribute: Any) -> int:
        return int(self._check(self._cu.cuDeviceGetAttribute(attribute, self._device)))

    def _check(self, result: tuple[Any, ...]) -> Any:
        """The value of a driver call; ToolchainError if its status is not success."""
        status = result[0]
        if int(status) != 0:
            _, text = self._cu.cuGetErrorString(status)
            message = text.decode() if text else str(status)
            raise ToolchainError(f"the CUDA driver reports {status.name}: {message}", where="CUDA driver API")
        return result[1] if len(result) == 2 else result[1:]

    def activate(self) -> None:
        """See Driver."""
        self._check(self._cu.cuCtxSetCurrent(self._context))

    def allocate(self, size: int) -> int:
        """See Driver."""
        pointer = self._check(self._cu.cuMemAlloc(size))
        self._memory.append(pointer)
        return int(pointer)

    def allocate_host(self, size: int) -> int:
        """See Driver."""
        address = int(self._check(self._cu.cuMemHostAlloc(size, 0)))
        self._host_memory.append(address)
        return address

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        """See Driver."""
        self._check(self._cu.cuMemcpyHtoDAsync(pointer, address, size, self._stream))

    def copy_to_host(self, address: int, pointer: int, size: int) -> None:
        """See Driver."""
        self._check(self._cu.cuMemcpyDtoHAsync(address, pointer, size, self._stream))

    def fill_zero(self, pointer: int, size: int) -> None:
        """See Driver."""
        self._check(self._cu.cuMemsetD8Async(pointer, 0, size, self._stream))

    def synchronize(self) -> None:
        """See Driver."""
        self._check(self._cu.cuStreamSynchronize(self._stream))

    def free_memory(self) -> int:
        """See Driver."""
        free, _ = self._check(self._cu.cuMemGetInfo())
        return int(free)

    def load_kernel(self, image: bytes, symbol: str, shared: int) -> Any:
        """See Driver. Dynamic shared memory above 48 KB has to be allowed once for each function."""
        if image not in self._modules:
            self._modules[image] = self._check(self._cu.cuModuleLoadData(image))
        function = self._check(self._cu.cuModuleGetFunction(self._modules[image], symbol.encode()))
        if shared > _STATIC_SHARED_LIMIT:
            attribute = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self._cu.cuFuncSetAttribute(function, attribute, shared))
        return function

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: int,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        """See Driver."""
        if cooperative:
            launch = self._cu.cuLaunchCooperativeKernel
            self._check(launch(function, *grid, threads, 1, 1, shared, self._stream, parameters))
            return
        if early:
            configuration = self._configure_early(grid, threads, shared)
            self._check(self._cu.cuLaunchKernelEx(configuration, function, parameters, 0))
            return
        result = self._cu.cuLaunchKernel(function, *grid, threads, 1, 1, shared, self._stream, parameters, 0)
        self._check(result)

    def _configure_early(self, grid: tuple[int, int, int], threads: int, shared: int) -> Any:
        """Programmatic dependent launch: the kernel waits by griddepcontrol where it has to."""
        attribute = self._cu.CUlaunchAttribute()
        attribute.id = self._cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        configuration = self._cu.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = grid
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = threads, 1, 1
        configuration.sharedMemBytes, configuration.hStream = shared, self._stream
        configuration.attrs, configuration.numAttrs = [attribute], 1
        return configuration

    def begin_capture(self) -> None:
        """See Driver."""
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(self._cu.cuStreamBeginCapture(self._stream, mode))

    def end_capture(self) -> Any:
        """See Driver."""
        graph = self._check(self._cu.cuStreamEndCapture(self._stream))
        executable = self._check(self._cu.cuGraphInstantiate(graph, 0))
        self._check(self._cu.cuGraphDestroy(graph))
        self._graphs.append(executable)
        return executable

    def replay(self, graph: Any) -> None:
        """See Driver."""
        self._check(self._cu.cuGraphLaunch(graph, self._stream))

    def release_memory(self) -> None:
        """Free all device memory that was allocated so far."""
        for pointer in self._memory:
            self._check(self._cu.cuMemFree(pointer))
        self._memory.clear()

    def close(self) -> None:
        """See Driver. The primary context is released, not destroyed: torch may share it."""
        self.synchronize()
        for graph in self._graphs:
            self._check(self._cu.cuGraphExecDestroy(graph))
        for module in self._modules.values():
            self._check(self._cu.cuModuleUnload(module))
        self.release_memory()
        for address in self._host_memory:
            self._check(self._cu.cuMemFreeHost(address))
        self._check(self._cu.cuStreamDestroy(self._stream))
        self._check(self._cu.cuDevicePrimaryCtxRelease(self._device))
