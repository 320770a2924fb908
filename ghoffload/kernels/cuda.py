"""Loading csrc's machine code on a device and starting its kernels, by the driver interface.

Importing needs neither a driver nor cuda-bindings; the first launch does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build

UNASKED_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a block may have without asking for it."""


class Start:
    """A kernel with its grid and the memory of its parameters, to be started any number of times.

    Making it builds and loads the kernel's module if need be.

    Args:
        source: of ``csrc/<source>.cu``, without suffix.
        kernel: its extern "C" name.
        device: CUDA device index.
        blocks: number of blocks.
        threads: threads of a block.
        parameters: one array for each kernel parameter, holding its bytes. A start copies them
            before it returns, so they may be changed between two.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        KernelBuildError: the kernel could not be compiled or loaded, or the device has less shared
            memory for a block.
    """

    __slots__ = ("_address", "_addresses", "_arguments", "_kernel", "_loaded", "_memory")

    def __init__(
        self,
        source: str,
        kernel: str,
        device: int,
        *,
        blocks: int,
        threads: int,
        parameters: Sequence[npt.NDArray[Any]],
        shared_bytes: int = 0,
    ) -> None:
        loaded = self._loaded = _loaded_device(device)
        function = loaded.function(source, kernel)
        if shared_bytes > UNASKED_SHARED_BYTES:
            with loaded.current():
                loaded.allow_shared(source, kernel, shared_bytes)
        self._memory = tuple(parameters)
        self._addresses = np.array([p.ctypes.data for p in parameters], dtype=np.uint64)
        self._address = int(self._addresses.ctypes.data)
        self._arguments = (function, blocks, 1, 1, threads, 1, 1, shared_bytes)
        self._kernel = kernel

    def __call__(self, stream: int) -> None:
        """Queue the kernel on a raw ``CUstream`` handle of its device.

        Raises:
            RuntimeError: the driver refused the launch; the message names the kernel.
        """
        loaded = self._loaded
        with loaded.current():
            (status,) = loaded.driver.cuLaunchKernel(*self._arguments, stream, self._address, 0)
        if int(status) != 0:
            raise loaded.refusal(self._kernel, self._arguments[1], status)


def launch(
    source: str,
    kernel: str,
    device: int,
    *,
    blocks: int,
    threads: int,
    parameters: Sequence[npt.NDArray[Any]],
    stream: int,
    shared_bytes: int = 0,
) -> None:
    """Start a kernel once: as ``Start``, and with its errors."""
    Start(
        source,
        kernel,
        device,
        blocks=blocks,
        threads=threads,
        parameters=parameters,
        shared_bytes=shared_bytes,
    )(stream)


def launch_words(
    source: str,
    kernel: str,
    device: int,
    *,
    blocks: int,
    threads: int,
    words: Sequence[int],
    stream: int,
) -> None:
    """As ``launch``, of parameters that are integers or addresses of up to 64 bits each.

    Not negative. A kernel reads as many of a word's bytes as its parameter has, the lowest first.
    """
    loaded = _loaded_device(device)
    count = len(words)
    memory = (ctypes.c_uint64 * count)(*words)
    first = ctypes.addressof(memory)
    addresses = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
    function = loaded.function(source, kernel)
    with loaded.current():
        (status,) = loaded.driver.cuLaunchKernel(
            *(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(addresses), 0)
        )
    if int(status) != 0:
        raise loaded.refusal(kernel, blocks, status)


def device_index(tensor: Tensor) -> int:
    """The CUDA device a launch on ``tensor`` runs on; the current one for pinned host memory."""
    return tensor.get_device() if tensor.is_cuda else torch.cuda.current_device()


def capability(device: int) -> tuple[int, int]:
    """The device's compute capability."""
    return _loaded_device(device).capability


def shared_memory(device: int) -> int:
    """The most bytes of shared memory that a block of this device may have."""
    return _loaded_device(device).shared_memory


def preload(device: int, sources: Sequence[str] = ("prepare", "adamw", "pack", "norm")) -> None:
    """Build and load modules now, so that no launch does (as a CUDA graph capture needs).

    Raises:
        KernelBuildError: a module could not be compiled or loaded.
    """
    for source in sources:
        _loaded_device(device).module(source)


def _describe(driver: Any, status: Any) -> str:
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{(name or b'?').decode()}: {(text or b'?').decode()}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class _Current:
    """Makes a context current and restores the one before; nothing where it already is."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        status, now = self._driver.cuCtxGetCurrent()
        self._pushed = int(status) != 0 or int(now) != int(self._context)
        if self._pushed:
            self._driver.cuCtxPushCurrent(self._context)

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._driver.cuCtxPopCurrent()


class _Device:
    """The modules and functions loaded in one device's primary context (the one torch uses)."""

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise KernelBuildError(
                f"CUDA kernels need the driver bindings; pip install cuda-bindings ({error})"
            ) from error
        self.driver = driver
        self._index = index
        try:
            started = driver.cuInit(0)
        except Exception as error:  # cuda-bindings' own class, where there is no driver library
            raise KernelBuildError(f"CUDA kernels need NVIDIA's driver: {error}") from error
        self._check(started, "cuInit")
        self._device = self._check(driver.cuDeviceGet(index), "cuDeviceGet")
        self._context = self._check(
            driver.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain"
        )
        major, minor, self.shared_memory = map(
            self._attribute,
            (
                "COMPUTE_CAPABILITY_MAJOR",
                "COMPUTE_CAPABILITY_MINOR",
                "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
            ),
        )
        self.capability = (major, minor)
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._shared: dict[tuple[str, str], int] = {}  # the most each may use, where asked for
        self._lock = threading.RLock()

    def _check(self, result: tuple[Any, ...], what: str) -> Any:
        if result[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise KernelBuildError(
                f"{what} on cuda:{self._index} failed: {_describe(self.driver, result[0])}"
            )
        return result[1] if len(result) > 1 else None

    def _attribute(self, name: str) -> int:
        which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        result = self.driver.cuDeviceGetAttribute(which, self._device)
        return int(self._check(result, f"cuDeviceGetAttribute of {name}"))

    def refusal(self, kernel: str, blocks: int, status: Any) -> RuntimeError:
        """The error of a launch that the driver refused."""
        return RuntimeError(
            f"launch of {kernel} on cuda:{self._index} ({blocks} blocks) failed: "
            f"{_describe(self.driver, status)}"
        )

    def current(self) -> _Current:
        return _Current(self.driver, self._context)

    def module(self, source: str) -> Any:
        with self._lock:
            if source not in self._modules:
                arch = build.architecture(*self.capability)
                cubin = build.cubin(source, arch)
                with self.current():
                    result = self.driver.cuModuleLoadData(cubin.code)
                    if int(result[0]) != 0 and cubin.origin == "package":
                        refused = _describe(self.driver, result[0])
                        cubin = self._compiled_here(source, arch, cubin, refused)
                        result = self.driver.cuModuleLoadData(cubin.code)
                    self._modules[source] = self._check(
                        result,
                        f"loading {source}.cu (built by NVRTC {_dotted(cubin.compiler)}, which "
                        "needs a driver of its CUDA major version or newer)",
                    )
            return self._modules[source]

    def _compiled_here(
        self, source: str, arch: str, packaged: build.Cubin, refused: str
    ) -> build.Cubin:
        """What takes the place of packaged code that the driver will not load, as an older one."""
        try:
            return build.cubin(source, arch, use_packaged=False)
        except KernelBuildError as error:
            raise KernelBuildError(
                f"loading the packaged {source}.cu (built by NVRTC {_dotted(packaged.compiler)}, "
                f"which needs a driver of its CUDA major version or newer) on cuda:{self._index} "
                f"failed: {refused}; and it could not be compiled here: {error}"
            ) from error

    def function(self, source: str, kernel: str) -> Any:
        found = self._functions.get((source, kernel))
        if found is None:
            with self._lock, self.current():
                found = self._check(
                    self.driver.cuModuleGetFunction(self.module(source), kernel.encode()),
                    f"finding {kernel} in {source}.cu",
                )
                self._functions[source, kernel] = found
        return found

    def allow_shared(self, source: str, kernel: str, nbytes: int) -> None:
        """Ask for more than 48 KB of shared memory, once for each kernel and size."""
        if self._shared.get((source, kernel), 0) >= nbytes:
            return
        attribute = self.driver.CUfunction_attribute
        self._check(
            self.driver.cuFuncSetAttribute(
                self.function(source, kernel),
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                nbytes,
            ),
            f"giving {kernel} {nbytes:,} bytes of shared memory",
        )
        self._shared[source, kernel] = nbytes


@lru_cache(None)
def _loaded_device(index: int) -> _Device:
    return _Device(index)
