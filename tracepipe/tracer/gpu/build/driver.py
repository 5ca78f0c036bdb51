"""Asks the CUDA driver in a child process for its version and its GPUs.

The child runs as the user of the command. A driver that hangs or crashes ends only the child.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from tracepipe.sudo import sudo_user

_TIMEOUT_S = 30  # cuInit of a machine with eight GPUs and no persistence daemon takes some seconds
_KEPT = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LANG")

# Attributes of cuda.h: 75 and 76 CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR,
# 16 CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT. Of an SM: 39 …MAX_THREADS_PER_MULTIPROCESSOR,
# 106 …MAX_BLOCKS_PER_MULTIPROCESSOR, 82 …MAX_REGISTERS_PER_MULTIPROCESSOR,
# 81 …MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 111 …RESERVED_SHARED_MEMORY_PER_BLOCK. One that the driver does
# not know is 0.
_CHILD = """
import ctypes, json
answer = {"cuda": 0, "gpus": [], "error": ""}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    answer["error"] = str(error)
else:
    number = ctypes.c_int()
    if not cuda.cuDriverGetVersion(ctypes.byref(number)):
        answer["cuda"] = number.value
    result = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number))
    if result:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(text))
        answer["error"] = "cuInit: " + (text.value or str(result).encode()).decode()
    for index in range(0 if result else number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        uuid = (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 128, device)
        numbers = []
        for attribute in (75, 76, 16, 39, 106, 82, 81, 111):
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            numbers.append(value.value)
        has_uuid = hasattr(cuda, "cuDeviceGetUuid") and not cuda.cuDeviceGetUuid(uuid, device)
        digits = bytes(uuid).hex() if has_uuid else ""
        answer["gpus"].append([name.value.decode(errors="replace"), digits, *numbers])
print(json.dumps(answer))
"""

Version = tuple[int, int]
_WARP_THREADS: Final = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with its name, `NVIDIA H200`, and the architecture of its code, `sm_90`.

    `uuid` is as nvidia-smi writes it; "" and 0 stand for what the driver did not report. `limits` are those
    of an SM, in the form of a header.
    """

    name: str
    architecture: str
    uuid: str = ""
    sm_count: int = 0
    limits: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's CUDA version, (0, 0) without a driver; the GPUs; and why there are none."""

    cuda: Version = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    error: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures of the GPUs, each once."""
        return tuple(dict.fromkeys(gpu.architecture for gpu in self.gpus))

    @property
    def is_broken(self) -> bool:
        """Whether GPUs are expected and there are none; an empty `CUDA_VISIBLE_DEVICES` is not a fault."""
        return not self.gpus and bool(self.error) and "CUDA_ERROR_NO_DEVICE" not in self.error

    @property
    def listed(self) -> list[dict[str, Any]]:
        """The GPUs in the form of a header: index, name, uuid, sm_count, the limits of an SM."""
        known = [
            {"name": gpu.name, "uuid": gpu.uuid, "sm_count": gpu.sm_count, **gpu.limits} for gpu in self.gpus
        ]
        return [
            {"index": index, **{key: value for key, value in gpu.items() if value}}
            for index, gpu in enumerate(known)
        ]


@dataclass(frozen=True)
class Owner:
    """The user who runs the command and owns what is built for it: under sudo, the user who called sudo."""

    uid: int
    gid: int
    home: Path

    @cached_property
    def run_as(self) -> dict[str, Any]:
        """Arguments of `subprocess.run` that run a child as this user."""
        if os.geteuid() == self.uid:
            return {}
        name = pwd.getpwuid(self.uid).pw_name
        return {"user": self.uid, "group": self.gid, "extra_groups": os.getgrouplist(name, self.gid)}


def owner() -> Owner:
    """The user who runs the command. Raises TracepipeError."""
    user = sudo_user()
    if user is not None:
        return Owner(user.pw_uid, user.pw_gid, Path(user.pw_dir))
    return Owner(os.geteuid(), os.getegid(), Path.home())


def driver_environment() -> dict[str, str]:
    """The environment of a program that asks the driver, so that it counts GPUs as the command does."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def ask_driver() -> Driver:
    """Ask the driver. A failure is stated in `error`."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=driver_environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the capture alone
            **owner().run_as,
        )
    except subprocess.TimeoutExpired:
        return Driver(error=f"libcuda did not answer within {_TIMEOUT_S} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(error=f"the program that asks libcuda could not run: {error}")
    return driver_of(done.returncode, done.stdout, done.stderr)


def driver_of(returncode: int, answer: bytes, errors: bytes) -> Driver:
    """The driver that the child's answer describes.

    Such an answer is `{"cuda":13000,"gpus":[["NVIDIA H200","b823ecbd…",9,0,132,2048,32,65536,233472,1024]],
    "error":""}`.
    """
    if returncode < 0:
        return Driver(error=f"loading libcuda ended with signal {-returncode}")
    try:
        found = json.loads(answer)
        gpus = tuple(
            Gpu(
                name,
                f"sm_{major}{minor}",
                uuid_text(bytes.fromhex(uuid)),
                sm_count,
                limits_of(major, minor, threads // _WARP_THREADS, *limits),
            )
            for name, uuid, major, minor, sm_count, threads, *limits in found["gpus"]
        )
        return Driver((found["cuda"] // 1000, found["cuda"] % 1000 // 10), gpus, found["error"])
    except (ValueError, KeyError, TypeError):
        lines = errors.decode(errors="replace").strip().splitlines()
        return Driver(error=f"libcuda did not answer: {lines[-1] if lines else 'nothing'}")


def limits_of(
    major: int, minor: int, warps: int, blocks: int, registers: int, shared_bytes: int, reserved_bytes: int
) -> dict[str, int | str]:
    """The limits of an SM, in the form of a header; 0 stands for one that is not known."""
    limits = {
        "compute_capability": f"{major}.{minor}" if major else 0,
        "max_warps_per_sm": warps,
        "max_blocks_per_sm": blocks,
        "registers_per_sm": registers,
        "shared_bytes_per_sm": shared_bytes,
        "reserved_shared_bytes": reserved_bytes,
    }
    return {key: value for key, value in limits.items() if value}


def uuid_text(raw: bytes) -> str:
    """A UUID as nvidia-smi writes it: `GPU-b823ecbd-bb17-cfb3-e35b-411dfeab51f3`; "" for none."""
    return f"GPU-{UUID(bytes=raw)}" if raw else ""
