"""Command lines that the help of each command ends with.

Tests read all with the real parser, and run those on files.
"""

from __future__ import annotations

from collections.abc import Iterator

_EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "sudo tracepipe capture -o run.jsonl -- ./app",
        "tracepipe summary run.jsonl",
        "tracepipe convert run.jsonl",
        "tracepipe open run.pftrace",
    ),
    "capture": (
        "sudo tracepipe capture -- python train.py",
        "tracepipe capture --layers none --gpu kernels -o run.jsonl.zst -- ./app",
        "sudo tracepipe capture --pid 4242 --duration 10s",
    ),
    "live": (
        "sudo tracepipe live -- ./app",
        "sudo tracepipe capture -o - -- ./app | tracepipe live -",
    ),
    "convert": (
        "tracepipe convert run.jsonl",
        "tracepipe convert run.jsonl -o run.json",
        "tracepipe convert run.jsonl other.jsonl -o both.pftrace",
        "tracepipe convert ds --ranks 0,1 --from 1.2s --to 1.4s -o slow.pftrace",
    ),
    "open": ("tracepipe open run.pftrace",),
    "validate": ("tracepipe validate run.jsonl",),
    "cut": ("tracepipe cut run.jsonl --from 560ms --to 640ms -o part.jsonl",),
    "query": (
        "tracepipe query run.jsonl 'select name, dur from slice order by dur desc limit 5'",
        "tracepipe query run.jsonl --file slow.sql --format csv -o slow.csv",
        "tracepipe query ds 'select host, rank, sum(dur_ns) as ns from kernels group by all order by ns'",
    ),
    "dataset": ("tracepipe dataset build runs -o ds",),
    "dataset build": (
        "tracepipe dataset build runs -o ds",
        "tracepipe dataset build rank0.jsonl rank1.jsonl -o ds",
        "tracepipe dataset build s3://bucket/runs/ -o ds",
    ),
    "ranks": (
        "tracepipe ranks ds",
        "tracepipe ranks ds --step 12 --top 20",
        "tracepipe ranks ds --engine spark --master spark://head:7077 --json",
    ),
    "doctor": ("sudo tracepipe doctor",),
    "hooks": ("tracepipe hooks list", "sudo tracepipe hooks test uprobe:libc.so.6:malloc -- ls"),
    "hooks list": ("tracepipe hooks list", "sudo tracepipe hooks list 'nv*ioctl*'"),
    "hooks test": ("sudo tracepipe hooks test uprobe:libc.so.6:malloc -- ls",),
    "include": ('nvcc -I "$(tracepipe include)" app.cu',),
    "summary": ("tracepipe summary run.jsonl", "tracepipe summary run.jsonl --top 20 --sort p99"),
    "timeline": ("tracepipe timeline run.jsonl --start 560ms --end 640ms",),
    "layers": ("tracepipe layers run.jsonl", "tracepipe layers run.jsonl --call cudaMemcpy"),
    "gaps": ("tracepipe gaps run.jsonl --min 20us",),
    "diff": (
        "tracepipe diff run.jsonl other.jsonl",
        "tracepipe diff --a run.jsonl run2.jsonl --b other.jsonl other2.jsonl",
    ),
    "warps": ("tracepipe warps run.jsonl", "tracepipe warps run.jsonl --kernel vector"),
    "stalls": ("tracepipe stalls stalls.jsonl", "tracepipe stalls stalls.jsonl --warps run.jsonl"),
    "plot": ("tracepipe plot run.jsonl --what heatmap -o warps.png",),
    "report": ("tracepipe report run.jsonl -o run.html",),
    "export": ("tracepipe export run.jsonl --format csv -o tables",),
}


def examples_of(command: str) -> tuple[str, ...]:
    """Example lines of a command, which is named without the program. A report has at least the shortest."""
    return _EXAMPLES.get(command, (f"tracepipe {command} run.jsonl",))


def example_lines(command: str) -> Iterator[str]:
    """The lines at the end of a command's help."""
    yield " Examples:"
    yield ""
    for line in examples_of(command):
        yield f"   {line}"
