"""Quantities of real recordings, against a reckoning over their single events that shares no code with the
analyses: a sweep over all times at which something begins or ends.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

import tracepipe
from tests.golden.cases import FIXTURES
from tracepipe.reports import REPORTS
from tracepipe.store.run import load_run

RECORDINGS: Final = (
    "resnet50-loader/slow.json.zst", "resnet50-loader/fast.json.zst", "kineto-b200-overlaps/input.json",
    "kineto-mi250/input.json", "collectives-h200/rank0.jsonl.zst", "collectives-a100/rank3.jsonl.zst",
    "capture-h200-pytorch/input.jsonl", "capture-h200-training/input.jsonl", "merged-pytorch/kineto.json.zst",
    "nsys-h100/input.sqlite", "rocprof-mi350/input.json", "xplane-mi300/input.pb",
)  # fmt: skip
COMMUNICATES: Final = re.compile(
    r"(^|[: ])(ms|n|r)?ccl\w*Kernel|all[-_]?(reduce|gather)|reduce_?scatter", re.I
)
STEP: Final = re.compile(r"ProfilerStep#\d+|(train_)?step( \d+)?")
LOADING: Final = re.compile(r"enumerate\(DataLoader\)|data loading")
PARTS: Final = ("compute", "communication", "copies")
Span = tuple[int, int]


class Reckoned:
    """The events of a recording, and sums over them."""

    def __init__(self, path: Path) -> None:
        self.work: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)
        ranges: dict[str, list[tuple[int, int, int | None]]] = defaultdict(list)
        open_ranges: dict[Any, list[tuple[str, int]]] = defaultdict(list)
        for event in tracepipe.open(path):
            end_ns = event.end_ns
            if event.phase == "X" and event.layer == "gpu_kernel":
                what = "communication" if COMMUNICATES.search(event.name.partition("<")[0]) else "compute"
                if event.name.startswith("__amd_rocclr_"):
                    what = "copies"
                self._add(event, what)
            elif event.phase == "X" and event.layer == "transfer" and event.gpu is not None:
                self._add(event, "copies")
            elif event.layer == "annotation" and event.gpu is None:
                if event.phase == "X" and end_ns is not None:
                    ranges[event.name].append((event.ts_ns, end_ns, event.tid))
                elif event.phase == "B":
                    open_ranges[event.pid, event.tid].append((event.name, event.ts_ns))
                elif event.phase == "E" and open_ranges[event.pid, event.tid]:
                    name, start_ns = open_ranges[event.pid, event.tid].pop()
                    ranges[name].append((start_ns, event.ts_ns, event.tid))
        steps = [(*span, name) for name, spans in ranges.items() if STEP.fullmatch(name) for span in spans]
        tids = Counter(tid for _, _, tid, _ in steps)
        own = sorted(
            (start, end, name) for start, end, tid, name in steps if tid == max(tids, key=tids.__getitem__)
        )
        self.steps = (
            [
                (at, after[0], name)
                for (at, _, name), after in zip(own, [*own[1:], (own[-1][1],)], strict=True)
            ]
            if own
            else []
        )
        self.loading = [
            (start, end) for name in ranges if LOADING.match(name) for start, end, _ in ranges[name]
        ]

    def _add(self, event: tracepipe.Event, what: str) -> None:
        end_ns = event.end_ns
        if end_ns is not None and end_ns > event.ts_ns:
            self.work[event.gpu or 0].append((event.ts_ns, end_ns, what, event.name))

    @cached_property
    def spans(self) -> dict[int, Span]:
        return {
            gpu: (min(one[0] for one in own), max(one[1] for one in own)) for gpu, own in self.work.items()
        }

    def parts(self, gpu: int, from_ns: int, until_ns: int) -> Counter[str]:
        """How long the GPU did what in a span, what it did alone, and how long it was idle."""
        changes = defaultdict[int, Counter[str]](Counter)
        spans = [(start, end, what) for start, end, what, _ in self.work[gpu]]
        for start, end, what in [*spans, *((*one, "loading") for one in self.loading)]:
            if start < until_ns and end > from_ns:
                changes[max(start, from_ns)][what] += 1
                changes[min(end, until_ns)][what] -= 1
        changes[from_ns].update(()), changes[until_ns].update(())
        now, found = Counter[str](), Counter[str]()
        for at, after in pairwise(sorted(changes)):
            for what, change in changes[at].items():
                now[what] += change
            ns = after - at
            for what in PARTS:
                found[what] += ns * bool(now[what])
            busy = any(now[what] for what in PARTS)
            found["busy"] += ns * busy
            found["idle"] += ns * (not busy)
            found["loading"] += ns * bool(not busy and now["loading"])
            found["exposed"] += ns * bool(now["communication"] and not now["compute"])
            found["lone_copies"] += ns * bool(
                now["copies"] and not now["compute"] and not now["communication"]
            )
        return found


@pytest.fixture(scope="module", params=RECORDINGS)
def both(request: pytest.FixtureRequest) -> tuple[Reckoned, Any]:
    path = FIXTURES / request.param
    return Reckoned(path), load_run(str(path))


def rows(run: Any, report: str, table: str, **options: Any) -> list[dict[str, Any]]:
    how = REPORTS[report]
    found: list[dict[str, Any]] = how.run(run, how.options(**options)).as_json().get(table, [])
    return found


def test_busy_and_idle(both: tuple[Reckoned, Any]) -> None:
    reckoned, run = both
    wanted = {gpu: reckoned.parts(gpu, *span) for gpu, span in reckoned.spans.items()}
    assert wanted
    found = {row["gpu"]: (row["busy_ns"], row["idle_ns"]) for row in rows(run, "gaps", "gpus")}
    assert found == {gpu: (parts["busy"], parts["idle"]) for gpu, parts in wanted.items()}
    for row in rows(run, "summary", "gpu_time", all=True):
        parts, (start, end) = wanted[row["gpu"]], reckoned.spans[row["gpu"]]
        for name in (*PARTS, "busy", "idle"):
            assert row[f"{name}_percent"] == pytest.approx(100 * parts[name] / (end - start)), name


def test_steps(both: tuple[Reckoned, Any]) -> None:
    reckoned, run = both
    found = rows(run, "steps", "steps")
    named = reckoned.steps or [(0, 0, "")]
    for at, (start, end, _) in enumerate(named):
        for gpu in sorted(reckoned.work):
            row = found.pop(0)
            if not reckoned.steps:
                start, end = reckoned.spans[gpu]
            assert row["wall_ns"] == end - start, at
            parts = reckoned.parts(gpu, start, end)
            for name in ("busy", "compute", "exposed", "lone_copies", "idle", "loading"):
                assert row[f"{name}_percent"] == pytest.approx(100 * parts[name] / (end - start)), (at, name)
    assert not found


def test_the_first_screen(both: tuple[Reckoned, Any]) -> None:
    """The idle time of all steps on all GPUs; the rows add up to it."""
    reckoned, run = both
    idle_ns = whole_ns = 0
    for gpu in reckoned.work:
        spans = [(start, end) for start, end, _ in reckoned.steps] or [reckoned.spans[gpu]]
        for span in spans:
            idle_ns += reckoned.parts(gpu, *span)["idle"]
            whole_ns += span[1] - span[0]
    places = rows(run, "summary", "idle")
    if places:
        assert sum(row["idle_ns"] for row in places) == idle_ns
        assert sum(row["share_percent"] for row in places) == pytest.approx(100)
    else:
        assert idle_ns < 0.05 * whole_ns


def test_kernels_and_lines(both: tuple[Reckoned, Any]) -> None:
    reckoned, run = both
    sums = Counter[bool]()
    for own in reckoned.work.values():
        for start, end, what, name in own:
            sums[what == "copies" and not name.startswith("__amd")] += end - start
    kernels = rows(run, "summary", "kernels", all=True, top=0)
    assert sum(row["total_ns"] or 0 for row in kernels) == sums[False]
    assert sum(row["gpu_ns"] for row in rows(run, "lines", "lines", top=0)) == sums.total()
