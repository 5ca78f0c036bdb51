"""What is known of the driver API's functions beyond their names: results, and arguments worth keeping.

Source: the CUDA Driver API reference, https://docs.nvidia.com/cuda/cuda-driver-api/ — enum CUresult and the
functions' signatures.
"""

from __future__ import annotations

RESULT_NAMES: dict[int, str] = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    4: "CUDA_ERROR_DEINITIALIZED",
    34: "CUDA_ERROR_STUB_LIBRARY",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    200: "CUDA_ERROR_INVALID_IMAGE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    217: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    218: "CUDA_ERROR_INVALID_PTX",
    221: "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    300: "CUDA_ERROR_INVALID_SOURCE",
    301: "CUDA_ERROR_FILE_NOT_FOUND",
    302: "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    400: "CUDA_ERROR_INVALID_HANDLE",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    500: "CUDA_ERROR_NOT_FOUND",
    600: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    701: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    704: "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
    708: "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    720: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    904: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
    908: "CUDA_ERROR_TIMEOUT",
    999: "CUDA_ERROR_UNKNOWN",
}

_VARIANTS = ("_ptsz", "_ptds", "_v2", "_v3", "_v4")  # ABI versions and default-stream variants

# cuLaunchKernel's first seven parameters: function, grid x y z, block x y z.
_LAUNCHES = frozenset({"cuLaunchKernel", "cuLaunchCooperativeKernel"})

# Function → (argument, position). Positions are below 4: the registers that are recorded.
_ARGUMENTS: dict[str, tuple[tuple[str, int], ...]] = {
    "cuMemAlloc": (("size_bytes", 1),),
    "cuMemAllocAsync": (("size_bytes", 1),),
    "cuMemAllocHost": (("size_bytes", 1),),
    "cuMemAllocManaged": (("size_bytes", 1),),
    "cuMemHostAlloc": (("size_bytes", 1),),
    "cuMemHostRegister": (("host", 0), ("size_bytes", 1)),
    "cuMemFree": (("device", 0),),
    "cuMemFreeAsync": (("device", 0), ("stream", 1)),
    "cuMemFreeHost": (("host", 0),),
    "cuMemcpy": (("to", 0), ("from", 1), ("size_bytes", 2)),
    "cuMemcpyAsync": (("to", 0), ("from", 1), ("size_bytes", 2), ("stream", 3)),
    "cuMemcpyHtoD": (("to", 0), ("from", 1), ("size_bytes", 2)),
    "cuMemcpyDtoH": (("to", 0), ("from", 1), ("size_bytes", 2)),
    "cuMemcpyDtoD": (("to", 0), ("from", 1), ("size_bytes", 2)),
    "cuMemcpyHtoDAsync": (("to", 0), ("from", 1), ("size_bytes", 2), ("stream", 3)),
    "cuMemcpyDtoHAsync": (("to", 0), ("from", 1), ("size_bytes", 2), ("stream", 3)),
    "cuMemcpyDtoDAsync": (("to", 0), ("from", 1), ("size_bytes", 2), ("stream", 3)),
    "cuMemsetD8": (("to", 0), ("count", 2)),
    "cuMemsetD16": (("to", 0), ("count", 2)),
    "cuMemsetD32": (("to", 0), ("count", 2)),
    "cuMemsetD8Async": (("to", 0), ("count", 2), ("stream", 3)),
    "cuMemsetD16Async": (("to", 0), ("count", 2), ("stream", 3)),
    "cuMemsetD32Async": (("to", 0), ("count", 2), ("stream", 3)),
    "cuStreamSynchronize": (("stream", 0),),
    "cuStreamQuery": (("stream", 0),),
    "cuStreamDestroy": (("stream", 0),),
    "cuStreamWaitEvent": (("stream", 0), ("event", 1)),
    "cuEventRecord": (("event", 0), ("stream", 1)),
    "cuEventQuery": (("event", 0),),
    "cuEventSynchronize": (("event", 0),),
    "cuEventDestroy": (("event", 0),),
    "cuGraphLaunch": (("graph", 0), ("stream", 1)),
    "cuModuleUnload": (("module", 0),),
    "cuCtxSetCurrent": (("context", 0),),
    "cuCtxPushCurrent": (("context", 0),),
    "cuCtxDestroy": (("context", 0),),
}


def is_launch(symbol: str) -> bool:
    """Whether `symbol` takes cuLaunchKernel's first seven parameters."""
    return _plain(symbol) in _LAUNCHES


def arguments_of(symbol: str) -> tuple[tuple[str, int], ...]:
    """Names and positions of the arguments of `symbol` that are kept; empty for most."""
    return _ARGUMENTS.get(_plain(symbol), ())


def _plain(symbol: str) -> str:
    """`cuMemcpyHtoD_v2_ptds` → `cuMemcpyHtoD`."""
    while True:
        for variant in _VARIANTS:
            if symbol.endswith(variant):
                symbol = symbol[: -len(variant)]
                break
        else:
            return symbol
