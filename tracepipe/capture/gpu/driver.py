"""What the CUDA driver says of itself and of the GPUs, asked in a child process.

libcuda is loaded by a child, as whom the command runs: a driver that hangs or crashes ends the child alone.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_TIMEOUT_S = 30  # cuInit of a machine with eight GPUs and no persistence daemon takes some seconds
_KEPT = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "LANG")

# Attributes 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h.
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
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 128, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        answer["gpus"].append([name.value.decode(errors="replace"), major.value, minor.value])
print(json.dumps(answer))
"""

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its name, `NVIDIA H200`, and the architecture of its code, `sm_90`."""

    name: str
    architecture: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's CUDA version, (0, 0) without one; the GPUs; and why there are none."""

    cuda: Version = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    error: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those of the GPUs, each once."""
        return tuple(dict.fromkeys(gpu.architecture for gpu in self.gpus))


@dataclass(frozen=True)
class Owner:
    """The user that the command runs as, who owns what is built for it: under sudo, the one who called it."""

    uid: int
    gid: int
    home: Path

    @cached_property
    def run_as(self) -> dict[str, Any]:
        """Arguments of `subprocess.run` that make a child this user's."""
        if os.geteuid() == self.uid:
            return {}
        name = pwd.getpwuid(self.uid).pw_name
        return {"user": self.uid, "group": self.gid, "extra_groups": os.getgrouplist(name, self.gid)}


def owner() -> Owner:
    """Who the command runs as."""
    uid, caller = os.geteuid(), os.environ.get("SUDO_UID", "")
    if uid == 0 and caller.isdigit() and int(caller) != 0:
        try:
            user = pwd.getpwuid(int(caller))
            return Owner(user.pw_uid, user.pw_gid, Path(user.pw_dir))
        except KeyError:
            pass  # of no user here: a capture refuses it later
    return Owner(uid, os.getegid(), Path.home())


def ask_driver() -> Driver:
    """The driver's answers. Whatever goes wrong is in `error`."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=environment,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is the capture's
            **owner().run_as,
        )
    except subprocess.TimeoutExpired:
        return Driver(error=f"libcuda gave no answer in {_TIMEOUT_S} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(error=f"libcuda could not be asked: {error}")
    return driver_of(done.returncode, done.stdout, done.stderr)


def driver_of(returncode: int, answer: bytes, errors: bytes) -> Driver:
    """A driver by the child's answer, such as `{"cuda":13000,"gpus":[["NVIDIA H200",9,0]],"error":""}`."""
    if returncode < 0:
        return Driver(error=f"loading libcuda ended with signal {-returncode}")
    try:
        told = json.loads(answer)
        gpus = tuple(Gpu(name, f"sm_{major}{minor}") for name, major, minor in told["gpus"])
        return Driver((told["cuda"] // 1000, told["cuda"] % 1000 // 10), gpus, told["error"])
    except (ValueError, KeyError, TypeError):
        lines = errors.decode(errors="replace").strip().splitlines()
        return Driver(error=f"libcuda gave no answer: {lines[-1] if lines else 'nothing'}")
