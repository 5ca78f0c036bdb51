"""Every case of fixtures/, as text, and as Perfetto's own trace processor sees what was written for it."""

from __future__ import annotations

import pytest

from tests.golden.asked import Asked
from tests.golden.cases import Case, cases, with_sample
from tests.golden.seen import lines_by_track, starts_of_lines
from tracepipe.units import counted

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
case_or_sample = pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)


@every_case
@pytest.mark.usefixtures("core")
def test_text_is_as_expected(case: Case) -> None:
    text, report = case.convert("text")
    assert text.decode() == (case.folder / "expected.txt").read_text()
    assert report == (case.folder / "expected-report.txt").read_text()


@every_case
@pytest.mark.usefixtures("core")
def test_text_shows_what_was_laid_out(case: Case) -> None:
    text, _ = case.convert("text")
    head, _, rest = text.decode().partition("\n")
    tree, _, totals = rest.rstrip("\n").rpartition("\n")
    kept = case.replay()
    seen, base_ns = kept.seen(), kept.info.start["trace_ns"]
    assert head == f"trace clock {kept.info.trace_clock}, start {base_ns} ns"
    # Tracks of one path have the same place in the tree's order only among themselves: sort by content too.
    drawn, wanted = sorted(lines_by_track(tree)), sorted(starts_of_lines(seen, base_ns))
    assert [(path, len(lines)) for path, lines in drawn] == [(path, len(lines)) for path, lines in wanted]
    for (_, lines), (_, starts) in zip(drawn, wanted, strict=True):
        assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    slices = [one for _, track in seen.slices for one in track]
    instants = sum(one.instant for one in slices)
    counts = sum(len(values) for _, values in seen.counters)
    tracks = len(seen.slices) + len(seen.counters)
    expected = [
        counted(tracks, "track|tracks"),
        counted(len(slices) - instants, "slice|slices"),
        counted(instants, "instant|instants"),
        counted(counts, "count|counts"),
    ]
    assert totals == ", ".join(expected)


@case_or_sample
def test_the_trace_processor_sees_what_was_laid_out(case: Case) -> None:
    asked = Asked(case.convert("perfetto")[0])
    assert asked.problems == []
    assert asked.seen().lines() == case.replay("perfetto").seen().lines()


@case_or_sample
def test_the_trace_processor_sees_the_same_in_json(case: Case) -> None:
    asked = Asked(case.convert("chrome")[0])
    assert asked.problems == []
    assert asked.seen().lines() == case.replay("chrome").seen().as_json_says().lines()
