"""Every snippet of docs/recipes.md runs as it stands there, and gives what the recording holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import tracepipe
from tests.support.pages import blocks
from tests.support.program import PYTHONPATH

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "fixtures/capture-h200/input.jsonl"
# An empty line parts two commands of a block.
SNIPPETS = [part for block in blocks("docs/recipes.md") for part in re.split(r"\n\n", block.text)]
TRACEPIPE = f'tracepipe() {{ {sys.executable} -m tracepipe "$@" 2>/dev/null; }}\n'

pytestmark = pytest.mark.skipif(shutil.which("jq") is None, reason="no jq (apt install jq)")

Records = list[dict[str, Any]]


def of(records: Records, kind: str, phase: str = "") -> Records:
    return [one for one in records if one["type"] == kind and phase in ("", one.get("phase"))]


def counted(names: list[str]) -> Callable[[str], bool]:
    """Whether text is what `uniq -c` says of names, in any order of equals, or the first ten."""

    def is_it(text: str) -> bool:
        found = {name: int(count) for count, name in (line.split() for line in text.splitlines())}
        expected = Counter(names)
        least = min(found.values())
        most = len(found) in (10, len(expected)) and all(
            name in found or count <= least for name, count in expected.items()
        )
        return most and all(expected[name] == count for name, count in found.items())

    return is_it


def lengths(records: Records) -> list[float]:
    """How long calls of the CUDA libraries took, µs: each end with the last open begin of its thread."""
    found, stacks = [], dict[int, list[int]]()
    for one in of(records, "userspace"):
        if one["phase"] == "B":
            stacks.setdefault(one["tid"], []).append(one["ts_ns"])
        elif one["phase"] == "E" and stacks.get(one["tid"]):
            found.append((one["ts_ns"] - stacks[one["tid"]].pop()) / 1000)
    return sorted(found, reverse=True)


def lines(text: str) -> Records:
    return [json.loads(line) for line in text.splitlines()]


def sizes(records: Records) -> list[int]:
    return [one["args"]["size"] for one in of(records, "memory") if one["name"] == "alloc"]


def launches_us(records: Records) -> list[float]:
    times_ns = [one["ts_ns"] for one in of(records, "userspace", "B") if one["name"] == "cuLaunchKernel"]
    return [(after - before) / 1000 for before, after in pairwise(times_ns)]


def copied(records: Records) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in of(records, "transfer"):
        found[one["name"]] += one["args"]["size"] if "gpu" not in one else 0
    return dict(found)


def failed(records: Records) -> Records:
    ends = [one for one in of(records, "userspace", "E") if one.get("args", {}).get("result", 0)]
    return [{key: one[key] for key in ("name", "tid", "args")} for one in ends]


# A part of each snippet, in their order → whether what it printed is right, by the records themselves.
RIGHT: dict[str, Callable[[str, Records], bool]] = {
    "-r .type": lambda text, records: counted([one["type"] for one in records])(text),
    "| .name' run": lambda text, records: counted([one["name"] for one in of(records, "userspace", "B")])(
        text
    ),
    "foreach": lambda text, records: [one["us"] for one in lines(text)] == lengths(records)[:10],
    "{allocations:": lambda text, records: (
        json.loads(text) == {"allocations": len(sizes(records)), "bytes": sum(sizes(records))}
    ),
    "group_by": lambda text, records: (
        {one["direction"]: one["bytes"] for one in lines(text)} == copied(records)
    ),
    "address:": lambda text, records: (
        [one["size"] for one in lines(text)] == sorted(sizes(records), reverse=True)[:5]
    ),
    "mean_us": lambda text, records: (
        json.loads(text)
        == pytest.approx(
            {
                "gaps": len(launches_us(records)),
                "mean_us": sum(launches_us(records)) / len(launches_us(records)),
                "max_us": max(launches_us(records)),
            }
        )
    ),
    "request": lambda text, records: counted(
        [one["args"].get("request", "other") for one in of(records, "syscall", "B") if one["name"] == "ioctl"]
    )(text),
    ".args.result": lambda text, records: lines(text) == failed(records),
    '"loss"': lambda text, records: lines(text) == of(records, "loss"),
    "sort_by(-.duration_us)": lambda text, records: len(json.loads(text)) == 10,
    '.op == "alloc"': lambda text, records: json.loads(text) == sum(sizes(records)),
    '"cuLaunchKernel").ts': lambda text, records: (
        json.loads(text) == pytest.approx(sum(launches_us(records)) / len(launches_us(records)) / 1000)
    ),
}


def test_every_snippet_is_known() -> None:
    assert len(SNIPPETS) == len(RIGHT)
    assert all(part in snippet for part, snippet in zip(RIGHT, SNIPPETS, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(SNIPPETS)), ids=lambda place: list(RIGHT)[place])
def test_a_snippet_gives_what_the_recording_holds(place: int, tmp_path: Path) -> None:
    loss = {"type": "loss", "layer": "userspace", "count": 3, "ts_ns": 1}
    text = RECORDING.read_text()
    (tmp_path / "run.jsonl").write_text(text + json.dumps(loss) + "\n")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", TRACEPIPE + SNIPPETS[place]],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert list(RIGHT.values())[place](done.stdout, records), done.stdout


# Commands as guides of layered tracers print them, on the files of those guides.
PRINTED: dict[str, Callable[[str, Records], bool]] = {
    "jq -r '.type' traces/trace_*.jsonl | sort | uniq -c": lambda text, lines: counted(
        [one["type"] for one in lines]
    )(text),
    "cat traces/trace_*.jsonl | jq -r '.name' | sort | uniq -c": lambda text, lines: counted(
        [one.get("name", "null") for one in lines]
    )(text),
    """jq 'select(.duration_us) | {name, duration_us}' traces/trace_*.jsonl | \\
    jq -s 'sort_by(.duration_us) | reverse | .[0:10]'""": lambda text, lines: (
        [one["duration_us"] for one in json.loads(text)]
        == sorted((one["duration_us"] for one in lines if "duration_us" in one), reverse=True)[:10]
    ),
    """jq 'select(.type=="memory")' traces/trace_*.jsonl | \\
    jq -s 'map(.size) | add'""": lambda text, _: json.loads(text) == 3 * 16_384,
    """jq 'select(.type=="kernel" and .name=="cuLaunchKernel")' trace.jsonl | \\
    jq -s 'map(.ts) | . as $times |
           range(length-1) |
           {gap: ($times[.+1] - $times[.])}' | \\
    jq -s 'map(.gap) | add / length'""": lambda text, lines: (
        json.loads(text) == pytest.approx(mean([b - a for a, b in pairwise(launches_ms(lines))]))
    ),
}


def launches_ms(lines: Records) -> list[float]:
    return [one["ts"] for one in lines if one["type"] == "kernel" and one["name"] == "cuLaunchKernel"]


@pytest.mark.slow
@pytest.mark.parametrize("command", PRINTED)
def test_a_command_of_a_guide_gives_on_a_capture_what_it_says(command: str, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "trace_1.jsonl"
    tracepipe.convert(RECORDING, path, "layered")
    (tmp_path / "trace.jsonl").symlink_to(path)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert PRINTED[command](done.stdout, lines), done.stdout
