"""ioctl commands: their parts, and NVIDIA's names for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracepipe.hooks.ioctl import decode_command


@pytest.mark.parametrize(
    ("command", "request_name"),
    [
        (0xC030462B, "NV_ESC_RM_ALLOC"),
        (0xC020462A, "NV_ESC_RM_CONTROL"),
        (0xC008462A, "NV_ESC_RM_CONTROL"),  # of any size: it differs between versions
        (0xC00846D6, "NV_ESC_SYS_PARAMS"),
        (0x30000001, "UVM_INITIALIZE"),
        (37, "UVM_REGISTER_GPU"),
        (2047, "UVM_IS_8_SUPPORTED"),
        (0xC0106D00, "NVKMS_IOCTL_IOWR"),
        (0xC0246443, "DRM_IOCTL_NVIDIA_GET_DEV_INFO"),
        (0xC0146443, "DRM_IOCTL_NVIDIA_GET_DEV_INFO"),  # until 535
    ],
)
def test_commands_of_nvidias_driver_have_its_names(command: int, request_name: str) -> None:
    assert decode_command(command)["request"] == request_name


@pytest.mark.parametrize(
    "command",
    [
        0x5401,  # TCGETS
        0x4600,  # FBIOGET_VSCREENINFO: the type of NVIDIA's, none of its numbers
        1,  # FIBMAP
        2,  # FIGETBSZ
        0xC0406443,  # type 'd', NVIDIA's number, another driver's size
        0x30000003,
        0x40000025,  # UVM_REGISTER_GPU's number in a command with a direction
        0x1125,  # and with a type
    ],
)
def test_other_commands_have_no_name(command: int) -> None:
    assert "request" not in decode_command(command)


def test_a_bare_command_number_is_decoded() -> None:
    assert decode_command(0x30000001) == {
        "cmd": 0x30000001,
        "dir": "none",
        "type": 0,
        "nr": 1,
        "size_bytes": 0x3000,
        "request": "UVM_INITIALIZE",
    }


def test_upper_bits_of_the_register_are_not_part_of_a_command() -> None:
    assert decode_command(0xFFFFFFFF00000025) == decode_command(0x25)


def test_names_are_read_when_the_first_command_needs_them() -> None:
    program = (
        "from tracepipe.hooks import ioctl;"
        "print(ioctl._nvidia_names.cache_info().currsize);"
        "ioctl.decode_command(37); ioctl.decode_command(38);"
        "print(ioctl._nvidia_names.cache_info().misses)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "1"]
