"""AMD GPUs through libamdhip64 with ctypes, to its documented C interface. Never run on hardware by its authors.

The calls and their order are those of HIP's module API (hipModuleLoadData, hipModuleGetFunction,
hipModuleLaunchKernel); kernel arguments follow Triton's launch convention, as on CUDA.
"""

from __future__ import annotations

import ctypes
import logging
import re
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from mmcompile.core.errors import ToolchainError

_LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_CAPTURE_THREAD_LOCAL = 1
_STREAM_NON_BLOCKING = 1
_PROPERTIES_SIZE = 8192

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "hipInit": (c_uint,),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetName": (c_char_p, c_int, c_int),
    "hipMalloc": (POINTER(c_void_p), c_size_t),
    "hipFree": (c_void_p,),
    "hipHostMalloc": (POINTER(c_void_p), c_size_t, c_uint),
    "hipHostFree": (c_void_p,),
    "hipMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "hipMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipStreamDestroy": (c_void_p,),
    "hipModuleLoadData": (POINTER(c_void_p), c_char_p),
    "hipModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "hipModuleLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "hipModuleUnload": (c_void_p,),
    "hipStreamBeginCapture": (c_void_p, c_int),
    "hipStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "hipGraphInstantiate": (POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_char_p, c_size_t),
    "hipGraphLaunch": (c_void_p, c_void_p),
    "hipGraphDestroy": (c_void_p,),
    "hipGraphExecDestroy": (c_void_p,),
}


def _load_library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
        library.hipGetErrorString.restype = c_char_p
        library.hipGetErrorString.argtypes = (c_int,)
        return library
    raise ToolchainError(
        "no HIP runtime on this machine (libamdhip64.so cannot be loaded)",
        fix="install ROCm, or load the artifact with device='cpu'",
    )


class HipDriver:
    """One GPU and one stream. See :class:`mmcompile.runtime.device_gpu.Driver`.

    Raises ToolchainError if there is no library or no GPU, and for every call that fails.
    """

    kind = "hip"

    def __init__(self, ordinal: int = 0) -> None:
        self._hip = _load_library()
        self._ordinal = ordinal
        self._call("hipInit", 0)
        count = c_int()
        self._call("hipGetDeviceCount", byref(count))
        if count.value <= ordinal:
            raise ToolchainError("no AMD GPU on this machine", fix="load the artifact with device='cpu'")
        self.activate()
        name = ctypes.create_string_buffer(256)
        self._call("hipDeviceGetName", name, 256, ordinal)
        self.device_name = name.value.decode()
        self.architecture = self._find_architecture()
        self._stream = self._handle("hipStreamCreateWithFlags", _STREAM_NON_BLOCKING)
        self._memory: list[int] = []
        self._host_memory: list[int] = []
        self._modules: dict[bytes, c_void_p] = {}
        self._graphs: list[c_void_p] = []
        logging.getLogger(__name__).warning("the HIP launcher has not been run on hardware by its authors")

    def _find_architecture(self) -> str:
        """The gfx name. It is searched in the properties record, as its place there differs between HIP versions."""
        properties = ctypes.create_string_buffer(_PROPERTIES_SIZE)
        versioned = getattr(self._hip, "hipGetDevicePropertiesR0600", None)
        query = versioned if versioned is not None else self._hip.hipGetDeviceProperties
        self._check(query(properties, c_int(self._ordinal)), "hipGetDeviceProperties")
        found = re.search(rb"gfx[0-9a-f]+[^\0]*", properties.raw)
        if found is None:
            raise ToolchainError("the HIP runtime does not name the GPU's architecture", where=self.device_name)
        return found[0].decode()

    def _check(self, status: int, function: str) -> None:
        if status != 0:
            message = self._hip.hipGetErrorString(status).decode()
            raise ToolchainError(f"the HIP runtime reports error {status}: {message}", where=function)

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(getattr(self._hip, function)(*arguments), function)

    def _handle(self, function: str, *arguments: Any) -> c_void_p:
        """Call a function whose first argument receives a handle."""
        handle = c_void_p()
        self._call(function, byref(handle), *arguments)
        return handle

    def activate(self) -> None:
        """See Driver."""
        self._call("hipSetDevice", self._ordinal)

    def allocate(self, size: int) -> int:
        """See Driver."""
        pointer = self._handle("hipMalloc", size).value or 0
        self._memory.append(pointer)
        return pointer

    def allocate_host(self, size: int) -> int:
        """See Driver."""
        address = self._handle("hipHostMalloc", size, 0).value or 0
        self._host_memory.append(address)
        return address

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        """See Driver."""
        self._call("hipMemcpyAsync", pointer, address, size, _HOST_TO_DEVICE, self._stream)

    def copy_to_host(self, address: int, pointer: int, size: int) -> None:
        """See Driver."""
        self._call("hipMemcpyAsync", address, pointer, size, _DEVICE_TO_HOST, self._stream)

    def fill_zero(self, pointer: int, size: int) -> None:
        """See Driver."""
        self._call("hipMemsetAsync", pointer, 0, size, self._stream)

    def synchronize(self) -> None:
        """See Driver."""
        self._call("hipStreamSynchronize", self._stream)

    def free_memory(self) -> int:
        """See Driver."""
        free, total = c_size_t(), c_size_t()
        self._call("hipMemGetInfo", byref(free), byref(total))
        return free.value

    def load_kernel(self, image: bytes, symbol: str, shared: int) -> c_void_p:
        """See Driver. LDS is dynamic in Triton's binaries; its size is given at the launch."""
        if image not in self._modules:
            self._modules[image] = self._handle("hipModuleLoadData", image)
        return self._handle("hipModuleGetFunction", self._modules[image], symbol.encode())

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
            self._call(
                "hipModuleLaunchCooperativeKernel", function, *grid, threads, 1, 1, shared, self._stream, parameters
            )
            return
        self._call("hipModuleLaunchKernel", function, *grid, threads, 1, 1, shared, self._stream, parameters, None)

    def begin_capture(self) -> None:
        """See Driver."""
        self._call("hipStreamBeginCapture", self._stream, _CAPTURE_THREAD_LOCAL)

    def end_capture(self) -> c_void_p:
        """See Driver."""
        graph = c_void_p()
        self._call("hipStreamEndCapture", self._stream, byref(graph))
        executable = self._handle("hipGraphInstantiate", graph, None, None, 0)
        self._call("hipGraphDestroy", graph)
        self._graphs.append(executable)
        return executable

    def replay(self, graph: Any) -> None:
        """See Driver."""
        self._call("hipGraphLaunch", graph, self._stream)

    def close(self) -> None:
        """See Driver."""
        self.synchronize()
        for graph in self._graphs:
            self._call("hipGraphExecDestroy", graph)
        for module in self._modules.values():
            self._call("hipModuleUnload", module)
        for pointer in self._memory:
            self._call("hipFree", pointer)
        for address in self._host_memory:
            self._call("hipHostFree", address)
        self._call("hipStreamDestroy", self._stream)
