"""Every command of docs/coming-from.md runs as it stands there, and answers what the page says it does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.pages import ANYWHERE, ON_KPROBES, run_lines, section_blocks, sections
from tests.support.standin import needs, why_not
from tracepipe.hooks.sets import names_hooks
from tracepipe.tracer.find.kernel import no_kprobes

ROOT = Path(__file__).parents[2]
PAGE = "docs/coming-from.md"
# What the users of each tracer have.
RECORDINGS = {
    "trace.txt": "bpftime-kernel_trace/input.txt",
    "timestamps.txt": "bpftime-late-lane/input.txt",
    "trace.jsonl": "layered-launch/input.jsonl",
    "events.txt": "cuda-table-sample/input.txt",
}
PROGRAMS = {
    "infer.py": """\
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4096))
""",
    "serve.py": """\
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
while True:
    cuda.cuInit(0)
    time.sleep(0.01)
""",
}
# What is printed where a page says that a question is answered.
ANSWERS = {
    "kernel_trace": ["thread=[1,0,0]", "254"],
    "kernelretsnoop": ["lane 31", "in one warp"],
    "A full-stack CUDA tracer": ["cuLaunchKernel", "never freed", '"type":"userspace"', "\n786432\n"],
    "Tables of CUDA events": ["cudaMalloc", "1.00 MiB", "TIME(ms)"],
    "Hooks in the kernel": ["tracepoint:dma_fence:dma_fence_signaled", "malloc"],
}


def exits(late_ns: int) -> str:
    """50 launches of a warp in kernelretsnoop's lines; every 8th lane is late by so much."""
    lines = []
    for launch in range(50):
        for thread in range(32):
            at_ns = 1749147474550000000 + launch * 100_000 + thread * 5 + (late_ns if thread % 8 == 7 else 0)
            lines.append(f"Thread ({thread}, 0, 0) timestamp: {at_ns}\n")
    return "".join(lines)


@pytest.fixture
def folder(tmp_path: Path, standin: Path) -> Path:
    """Where the commands are run."""
    for name, source in RECORDINGS.items():
        shutil.copy(ROOT / "fixtures" / source, tmp_path / name)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "before.txt").write_text(exits(700), encoding="utf-8")
    (tmp_path / "after.txt").write_text(exits(0), encoding="utf-8")
    for file in standin.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def test_every_page_has_answers_that_are_looked_for() -> None:
    assert sections(PAGE) == list(ANSWERS)


@pytest.mark.ebpf
@needs("prebuilt")
@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq (apt install jq)")
@pytest.mark.parametrize("section", ANSWERS)
def test_the_commands_of_a_page_run(section: str, folder: Path) -> None:
    lines = [line for place, some in section_blocks(PAGE, section) if place == ANYWHERE for line in some]
    printed = run_lines(lines, folder)
    assert "Traceback" not in printed
    assert [answer for answer in ANSWERS[section] if answer not in printed] == []


def test_hooks_of_kprobes_run_where_they_are_or_are_well_formed(tmp_path: Path, vec_add: str) -> None:
    found = section_blocks(PAGE, "Hooks in the kernel")
    lines = [line for place, some in found if place == ON_KPROBES for line in some]
    assert lines
    if no_kprobes() or why_not("prebuilt"):
        hooks = [word for line in lines for word in line.split("'") if word.startswith("kprobe:")]
        assert len(hooks) == len(lines)
        assert all(names_hooks(hook) for hook in hooks)
        return
    shutil.copy(vec_add, tmp_path)
    run_lines(lines, tmp_path)
