"""What is said of programs on a GPU: lines of graphs and of compiled code, and a starved loader."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from tests.golden.cases import FIXTURES
from tracepipe.cli import app

EAGER, REPLAYED = 2, 4
UNKNOWN = {"(capture not recorded)", "(no Python)"}


def records_of(case: str) -> list[dict[str, Any]]:
    with zstandard.open(FIXTURES / case / "run.jsonl.zst", "rt") as lines:
        return [json.loads(line) for line in lines]


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(("case", "kernels"), [("graphs-h200", 29), ("compiled-h200", 151)])
def test_a_replayed_step_has_the_lines_of_the_eager_one(case: str, kernels: int) -> None:
    """In the file, and in the table of lines."""
    records = records_of(case)
    frames = {one["id"]: one["frames"] for one in records if one["type"] == "stack"}
    calls = {one["launch"]: one["stack"] for one in records if one["type"] == "userspace" and "launch" in one}
    counts: dict[bool, Counter[Any]] = {True: Counter(), False: Counter()}
    for one in records:
        if one["type"] == "gpu_kernel":
            stack = frames[one.get("stack", calls[one["launch"]])]
            assert stack[0]["function"] not in UNKNOWN
            own = next((frame for frame in stack if "captured_model.py" in frame.get("file", "")), stack[0])
            place = own["function"], own.get("line")
            counts["graph" in one["args"]][one["name"], place] += 1
    assert sum(counts[True].values()) == kernels * REPLAYED
    assert counts[True] == Counter({key: REPLAYED * n // EAGER for key, n in counts[False].items()})
    expected: Counter[str] = Counter()
    for (_, (function, line)), n in (counts[True] + counts[False]).items():
        expected[function if line is None else f"me/captured_model.py:{line} {function}"] += n
    rows = json.loads(said("lines", str(FIXTURES / case / "run.jsonl.zst"), "--json"))["lines"]
    assert {row["line"]: row["kernels"] for row in rows if row["kernels"]} == expected


def waits_of_the_loader(records: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """When the main thread waited in `__next__` of the loader."""
    loads = {
        one["id"]
        for one in records
        if one["type"] == "stack" and any(frame["function"].endswith(".__next__") for frame in one["frames"])
    }
    main, begun, found = next(one["pid"] for one in records if one["type"] == "annotation"), {}, []
    for one in records:
        if one["type"] != "host_sample" or one["tid"] != main:
            continue
        if one["phase"] == "B" and one["stack"] in loads:
            begun[one["tid"]] = one["ts_ns"]
        elif one["phase"] == "E" and one["tid"] in begun:
            found.append((begun.pop(one["tid"]), one["ts_ns"]))
    return found


def test_a_starved_loader_is_the_first_answer() -> None:
    path, records = str(FIXTURES / "loader-h200" / "run.jsonl.zst"), records_of("loader-h200")
    waits = waits_of_the_loader(records)
    marks = [one for one in records if one["type"] == "annotation"]
    begins = [one["ts_ns"] for one in marks if one["phase"] == "B"]
    steps = list(zip(begins, [*begins[1:], marks[-1]["ts_ns"]], strict=True))
    waited = [sum(max(0, min(end, until) - max(start, at)) for at, until in waits) for start, end in steps]
    found = json.loads(said("steps", path, "--json"))["steps"]
    # The thread's own work in `__next__` is known by samples.
    for row, (start, end), waited_ns in zip(found, steps, waited, strict=True):
        assert 0 <= row["loading_percent"] / 100 * row["wall_ns"] - waited_ns < 0.05 * (end - start)
    (cause,) = (line for line in said("summary", path).splitlines() if line.startswith("Largest cause"))
    assert cause.startswith("Largest cause: the program waits for its data loader")
    line = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__ at me/train.py:32 main"
    places = json.loads(said("gaps", path, "--json"))["places"]
    assert sum(one["share_percent"] for one in places if one["line"] == line) > 85
    usual = median(one["wall_ns"] * (1 - one["loading_percent"] / 100) for one in found)
    (then,) = (line for line in said("summary", path).splitlines() if "a step would take" in line)
    ms = float(then.split("would take ")[1].split(" ms")[0])
    assert ms == pytest.approx(usual / 1e6, rel=0.05)
