"""Which warps the warps engine is asked to record, and what it is spared."""

from __future__ import annotations

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.tracer.gpu.choice import LAST, check_warps, read_range, warp_defines, warp_environment
from tracepipe.tracer.request import CaptureRequest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5", (5, 5)),
        ("0", (0, 0)),
        ("0-131", (0, 131)),
        ("7-7", (7, 7)),
        ("100-", (100, LAST)),
        (f"0-{LAST}", (0, LAST)),
    ],
)
def test_a_range_has_both_its_ends(text: str, found: tuple[int, int]) -> None:
    assert read_range(text, "--blocks", "blocks", 0) == found


@pytest.mark.parametrize(
    "text",
    ["", "-", "-5", "9-3", "1-2-3", "0x10", "1,2", " 5", "5 ", "٣", "1-٣", str(LAST + 1), f"0-{LAST + 1}"],
)
def test_an_invalid_range_is_refused_with_examples(text: str) -> None:
    with pytest.raises(TracepipeError, match=r"--blocks .* is not a range of blocks") as refusal:
        read_range(text, "--blocks", "blocks", 0)
    assert "9, 9-19 or 9-" in refusal.value.hint


def test_launches_are_counted_from_1() -> None:
    with pytest.raises(TracepipeError, match="not a range of launches"):
        check_warps(CaptureRequest(gpu_launches="0-3"))
    check_warps(CaptureRequest(gpu_launches="1-3", gpu_blocks="0-3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CaptureRequest(gpu_kernels="("), "--kernel '\\(' is not a regular expression"),
        (CaptureRequest(gpu_launches="9-3"), "--launches '9-3'"),
        (CaptureRequest(gpu_blocks="all"), "--blocks 'all'"),
        (CaptureRequest(gpu_memory_bytes=0), "--gpu-memory of 0 bytes"),
        (CaptureRequest(gpu_memory_bytes=(1 << 20) - 1), "--gpu-memory"),
        (CaptureRequest(gpu_warps=0), "--gpu-warps 0"),
        (CaptureRequest(gpu_launches_per_kernel=-1), "--launches-per-kernel -1"),
        (CaptureRequest(calls="x"), "Unknown choice of calls: 'x'"),
        (CaptureRequest(gpu_warp_marks="attn"), "--warp-marks 'attn' names no device function"),
        (CaptureRequest(gpu_warp_marks="attn::fwd:"), "'attn::fwd:' names no device function"),
        (CaptureRequest(gpu_warp_marks="attn:(x"), "--warp-marks '\\(x' is not a regular expression"),
        (CaptureRequest(gpu_kernels="x", gpu_warp_marks="attn:f"), "both name kernels"),
    ],
)
def test_options_that_the_library_could_not_use_are_refused(options: CaptureRequest, message: str) -> None:
    with pytest.raises(TracepipeError, match=message):
        check_warps(options)


def test_unset_options_are_left_to_the_library() -> None:
    assert warp_environment(CaptureRequest()) == {"TRACEPIPE_GPU_CALLS": "all"}
    assert warp_defines(CaptureRequest()) == {}


@pytest.mark.parametrize(
    ("marks", "kernels", "called"),
    [
        ("attn:softmax", "attn", "softmax"),
        ("ns::attn:ns::(soft|hard)max", "ns::attn", "ns::(soft|hard)max"),
        ("(?:a|b):f", "(?:a|b)", "f"),
        (":^f", "", "^f"),
        ("k:f:g", "k", "f:g"),
    ],
)
def test_marks_name_kernels_and_what_they_call(marks: str, kernels: str, called: str) -> None:
    options = CaptureRequest(gpu_warp_marks=marks)
    check_warps(options)
    expected = {
        "TRACEPIPE_GPU_KERNELS": kernels,
        "TRACEPIPE_GPU_CALLED": called,
        "TRACEPIPE_GPU_CALLS": "all",
    }
    assert warp_environment(options) == {name: value for name, value in expected.items() if value}


def test_the_request_is_passed_to_the_library() -> None:
    options = CaptureRequest(
        gpu_kernels="attn",
        gpu_launches="10-20",
        gpu_blocks="5",
        gpu_memory_bytes=64 << 20,
        gpu_warps=500,
        gpu_launches_per_kernel=3,
        calls="none",
    )
    assert warp_environment(options) == {
        "TRACEPIPE_GPU_KERNELS": "attn",
        "TRACEPIPE_GPU_LAUNCHES": "10-20",
        "TRACEPIPE_GPU_BLOCKS": "5-5",
        "TRACEPIPE_GPU_MEMORY": str(64 << 20),
        "TRACEPIPE_GPU_BUDGET": "500",
        "TRACEPIPE_GPU_PER_KERNEL": "3",
        "TRACEPIPE_GPU_CALLS": "none",
    }
    assert warp_defines(options) == {"TRACEPIPE_FIRST_BLOCK": 5, "TRACEPIPE_LAST_BLOCK": 5}
