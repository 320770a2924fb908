"""Starting csrc/bandwidth.cu's kernels, by address: what they copy need not be a torch tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ghoffload.kernels import cuda

SOURCE = "bandwidth"
ALIGNMENT = 16
"""Bytes; what addresses must be multiples of."""
BULK_SHARED_BYTES = 6 * 16384
"""Dynamic shared memory of a block of ``move_bulk``: its STAGES times CHUNK."""

_THREADS = 512
_BULK_THREADS = 32


def copy(
    destination: int,
    source: int,
    nbytes: int,
    *,
    bulk: bool,
    blocks: int,
    device: int,
    stream: int,
) -> None:
    """Queue a copy by ``blocks`` blocks of a kernel.

    Args:
        destination: address the device can write, a multiple of 16.
        source: address it can read, a multiple of 16; the same as ``destination``, or apart.
        nbytes: any number from 0.
        bulk: by bulk copies through shared memory (compute capability 9.0 or later) instead of
            loads and stores.
        blocks: 1 or more.
        device: CUDA device index.
        stream: a raw ``CUstream`` handle of that device.

    Raises:
        ValueError: a bad address, size or number of blocks.
        KernelBuildError: the kernels could not be built or loaded.
        RuntimeError: the driver refused the launch.
    """
    _check(nbytes, blocks, destination, source)
    parameters = (_word(destination), _word(source), np.array([nbytes], dtype=np.int64))
    if bulk:
        _launch_bulk(parameters, blocks, device, stream)
    else:
        cuda.launch(
            SOURCE,
            "move_words",
            device,
            blocks=blocks,
            threads=_THREADS,
            parameters=parameters,
            stream=stream,
        )


def read(sink: int, source: int, nbytes: int, *, blocks: int, device: int, stream: int) -> None:
    """Queue a read of ``nbytes // 16 * 16`` bytes.

    ``sink`` is the address of 4 bytes that take up the exclusive or of all 32-bit words. The other
    arguments and the errors are those of ``copy``.
    """
    _check(nbytes, blocks, source)
    cuda.launch(
        SOURCE,
        "read_words",
        device,
        blocks=blocks,
        threads=_THREADS,
        parameters=(_word(sink), _word(source), np.array([nbytes], dtype=np.int64)),
        stream=stream,
    )


def nothing(*, device: int, stream: int) -> None:
    """Queue a kernel that does nothing."""
    cuda.launch(SOURCE, "nothing", device, blocks=1, threads=1, parameters=(), stream=stream)


def spin(nanoseconds: int, *, device: int, stream: int) -> None:
    """Queue a kernel that takes ``nanoseconds`` of the device's clock."""
    if nanoseconds < 0:
        raise ValueError(f"nanoseconds expects 0 or more, got {nanoseconds}")
    cuda.launch(
        SOURCE,
        "spin",
        device,
        blocks=1,
        threads=1,
        parameters=(_word(nanoseconds),),
        stream=stream,
    )


_allowed: set[int] = set()  # devices where move_bulk may use its shared memory


def _launch_bulk(parameters: tuple[Any, ...], blocks: int, device: int, stream: int) -> None:
    # Not cuda.launch: more than 48 KB of shared memory is asked for once and given each time.
    loaded = cuda._loaded_device(device)
    driver = loaded.driver
    function = loaded.function(SOURCE, "move_bulk")
    addresses = np.array([p.ctypes.data for p in parameters], dtype=np.uint64)
    with loaded.current():
        if device not in _allowed:
            attribute = driver.CUfunction_attribute
            loaded._check(
                driver.cuFuncSetAttribute(
                    function,
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    BULK_SHARED_BYTES,
                ),
                f"asking for {BULK_SHARED_BYTES:,} bytes of shared memory",
            )
            _allowed.add(device)
        (status,) = driver.cuLaunchKernel(
            function,
            *(blocks, 1, 1, _BULK_THREADS, 1, 1),
            BULK_SHARED_BYTES,
            stream,
            addresses.ctypes.data,
            0,
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"launch of move_bulk on cuda:{device} ({blocks} blocks) failed: "
            f"{cuda._describe(driver, status)}"
        )


def _word(value: int) -> Any:
    return np.array([value], dtype=np.uint64)


def _check(nbytes: int, blocks: int, *addresses: int) -> None:
    for address in addresses:
        if address % ALIGNMENT:
            raise ValueError(f"expected an address that is a multiple of 16, got {address:#x}")
    if nbytes < 0:
        raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
    if blocks < 1:
        raise ValueError(f"blocks expects 1 or more, got {blocks}")
