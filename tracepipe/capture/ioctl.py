"""ioctl commands taken apart, and the names of those of NVIDIA's driver.

include/uapi/asm-generic/ioctl.h, for x86-64 and aarch64:

    31  30 29          16 15       8 7        0
    ┌─────┬──────────────┬──────────┬──────────┐
    │ dir │ size, bytes  │ type     │ nr       │
    └─────┴──────────────┴──────────┴──────────┘
"""

from __future__ import annotations

_DIRECTIONS = ("none", "write", "read", "read_write")

# NVIDIA open-gpu-kernel-modules: src/nvidia/arch/nvalloc/unix/include/nv-ioctl-numbers.h (NV_IOCTL_MAGIC,
# numbers from NV_IOCTL_BASE 200) and nv_escape.h in the same folder.
_NVIDIA_MAGIC = ord("F")
_NVIDIA_NAMES = {
    0x27: "NV_ESC_RM_ALLOC_MEMORY",
    0x28: "NV_ESC_RM_ALLOC_OBJECT",
    0x29: "NV_ESC_RM_FREE",
    0x2A: "NV_ESC_RM_CONTROL",
    0x2B: "NV_ESC_RM_ALLOC",
    0x32: "NV_ESC_RM_CONFIG_GET",
    0x33: "NV_ESC_RM_CONFIG_SET",
    0x34: "NV_ESC_RM_DUP_OBJECT",
    0x35: "NV_ESC_RM_SHARE",
    0x37: "NV_ESC_RM_CONFIG_GET_EX",
    0x38: "NV_ESC_RM_CONFIG_SET_EX",
    0x39: "NV_ESC_RM_I2C_ACCESS",
    0x41: "NV_ESC_RM_IDLE_CHANNELS",
    0x4A: "NV_ESC_RM_VID_HEAP_CONTROL",
    0x4D: "NV_ESC_RM_ACCESS_REGISTRY",
    0x4E: "NV_ESC_RM_MAP_MEMORY",
    0x4F: "NV_ESC_RM_UNMAP_MEMORY",
    0x52: "NV_ESC_RM_GET_EVENT_DATA",
    0x54: "NV_ESC_RM_ALLOC_CONTEXT_DMA2",
    0x56: "NV_ESC_RM_ADD_VBLANK_CALLBACK",
    0x57: "NV_ESC_RM_MAP_MEMORY_DMA",
    0x58: "NV_ESC_RM_UNMAP_MEMORY_DMA",
    0x59: "NV_ESC_RM_BIND_CONTEXT_DMA",
    0x5C: "NV_ESC_RM_EXPORT_OBJECT_TO_FD",
    0x5D: "NV_ESC_RM_IMPORT_OBJECT_FROM_FD",
    0x5E: "NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO",
    200: "NV_ESC_CARD_INFO",
    201: "NV_ESC_REGISTER_FD",
    206: "NV_ESC_ALLOC_OS_EVENT",
    207: "NV_ESC_FREE_OS_EVENT",
    209: "NV_ESC_STATUS_CODE",
    210: "NV_ESC_CHECK_VERSION_STR",
    211: "NV_ESC_IOCTL_XFER_CMD",
    212: "NV_ESC_ATTACH_GPUS_TO_FD",
    213: "NV_ESC_QUERY_DEVICE_INTR",
    214: "NV_ESC_SYS_PARAMS",
    217: "NV_ESC_EXPORT_TO_DMABUF_FD",
}


def decode_command(command: int) -> dict[str, int | str]:
    """`{cmd, dir, type, nr, size_bytes}` of an ioctl command, and `request` where NVIDIA's numbers name it.

    `type` is a character where it is printable ASCII, as in `'F'`. Other drivers (frame buffers) use that
    type too: `request` is the name that the command has if the file is NVIDIA's.
    """
    command &= 0xFFFFFFFF
    magic, number = command >> 8 & 0xFF, command & 0xFF
    decoded: dict[str, int | str] = {
        "cmd": command,
        "dir": _DIRECTIONS[command >> 30],
        "type": chr(magic) if 0x20 < magic < 0x7F else magic,
        "nr": number,
        "size_bytes": command >> 16 & 0x3FFF,
    }
    if magic == _NVIDIA_MAGIC and number in _NVIDIA_NAMES:
        decoded["request"] = _NVIDIA_NAMES[number]
    return decoded
