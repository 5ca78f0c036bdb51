"""The byte layout of the `kernels` engine's records, which `native/kernel_records.h` describes."""

from __future__ import annotations

import struct
from typing import Final

KIND_HELLO: Final = 40
KIND_KERNEL: Final = 41
KIND_COPY: Final = 42
KIND_SET: Final = 43
KIND_CALL: Final = 44
KIND_CALL_NAME: Final = 45
KIND_ANY: Final = 46
KIND_MEMORY: Final = 47
KIND_TAKEN: Final = 48
LAYERS: Final = {
    KIND_KERNEL: "gpu_kernel",
    KIND_COPY: "transfer",
    KIND_SET: "transfer",
    KIND_CALL: "userspace",
    KIND_MEMORY: "memory",
}
"""Kinds of the records that become events → layer."""

HELLO: Final = struct.Struct("<IIQQQ")
KERNEL: Final = struct.Struct("<QQQQ4I3I3I3I7I")
COPY: Final = struct.Struct("<QQQQ6I4B4x")
SET: Final = struct.Struct("<QQQQ7I4x")
CALL: Final = struct.Struct("<QQQ5I4x")
MEMORY: Final = struct.Struct("<QQQ6I")
TAKEN: Final = struct.Struct("<QQ")
CALL_NAME: Final = struct.Struct("<II")

# CUpti_ActivityMemcpyKind and …MemoryKind of cupti_activity.h.
DIRECTIONS: Final = ("copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORIES: Final = ("", "pageable", "pinned", "device", "array", "managed", "device_static", "managed_static")
