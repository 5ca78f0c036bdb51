"""ioctl commands, functions' variants, tracepoint formats: small decoders of capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.ioctl import decode_command
from tracepipe.tracer import ENGINES, CaptureRequest, capture
from tracepipe.tracer.find.kernel import field_offsets


@pytest.mark.parametrize(
    ("command", "decoded"),
    [
        # _IOWR('F', 0x2b, 48 bytes): NVIDIA's allocation of an object
        (
            0xC030462B,
            {"dir": "read_write", "type": "F", "nr": 43, "size_bytes": 48, "request": "NV_ESC_RM_ALLOC"},
        ),
        (
            0xC00846D6,
            {"dir": "read_write", "type": "F", "nr": 214, "size_bytes": 8, "request": "NV_ESC_SYS_PARAMS"},
        ),
        (0x5401, {"dir": "none", "type": "T", "nr": 1, "size_bytes": 0}),  # TCGETS
        (0x40042408, {"dir": "write", "type": "$", "nr": 8, "size_bytes": 4}),  # PERF_EVENT_IOC_SET_BPF
        (0x80086601, {"dir": "read", "type": "f", "nr": 1, "size_bytes": 8}),  # FS_IOC_GETFLAGS
        (0x0001, {"dir": "none", "type": 0, "nr": 1, "size_bytes": 0}),  # /dev/nvidia-uvm's bare numbers
        (0x4600, {"dir": "none", "type": "F", "nr": 0, "size_bytes": 0}),  # FBIOGET_VSCREENINFO: not NVIDIA's
    ],
)
def test_commands(command: int, decoded: dict[str, Any]) -> None:
    assert decode_command(command) == {"cmd": command, **decoded}
    assert decode_command(command | 0xFFFFFFFF00000000)["cmd"] == command


def test_offsets_come_from_the_tracepoints_format(tmp_path: Path) -> None:
    folder = tmp_path / "events/sched/sched_switch"
    folder.mkdir(parents=True)
    (folder / "format").write_text(
        "name: sched_switch\nID: 372\nformat:\n"
        "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n"
        "\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:0;\n"
        "\tfield:__data_loc char[] filename;\toffset:24;\tsize:4;\tsigned:0;\n"
        "\tfield:long prev_state;\toffset:32;\tsize:8;\tsigned:1;\n"
    )
    assert field_offsets(tmp_path, "sched/sched_switch") == {
        "common_type": 0,
        "prev_comm": 8,
        "filename": 24,
        "prev_state": 32,
    }
    with pytest.raises(CaptureUnavailable, match="sched/sched_wakeup"):
        field_offsets(tmp_path, "sched/sched_wakeup")


def test_a_request_that_cannot_be_fulfilled_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as sink:
        with pytest.raises(TracepipeError, match="nothing to capture"):
            capture(CaptureRequest([]), sink, notify=print)
        with pytest.raises(TracepipeError, match="no capture method ktrace") as caught:
            capture(CaptureRequest(["true"], method="ktrace"), sink, notify=print)
    assert all(name in caught.value.hint for name in ENGINES)
