"""What is counted of a recording, whatever is drawn of it; and of launches, how many are remembered."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tracepipe.converters import CONVERTERS
from tracepipe.event import nesting
from tracepipe.event.model import Header
from tracepipe.event.nesting import Launches
from tracepipe.layout import LayoutOptions
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConversionOptions


def account_of(folder: Path, *records: Any, options: LayoutOptions | None = None) -> Account:
    """What is found in a file of these records when it is converted."""
    path = folder / "recording.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (Header().to_record(), *records)))
    chosen = ConversionOptions(layout=options or LayoutOptions())
    return Conversion(str(path), CONVERTERS["text"], chosen).run(io.BytesIO())


@pytest.mark.usefixtures("core")
def test_losses_are_counted_by_their_layer_if_that_is_known(tmp_path: Path) -> None:
    losses: list[dict[str, Any]] = [{"type": "loss", "count": ts_ns, "ts_ns": ts_ns} for ts_ns in (3, 4, 5)]
    losses[2]["layer"] = "syscall"
    assert account_of(tmp_path, *losses).losses == {"unknown layer": 7, "syscall": 5}


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("split", [False, True])
def test_events_after_the_footer_are_counted_in_its_batch_and_in_later_ones(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        monkeypatch.setattr("tracepipe.readers.tracepipe1.CHUNK_BYTES", 64)
    event = {"type": "userspace", "name": "f", "phase": "I", "pid": 1, "tid": 1}
    footer = {"type": "footer", "counts": {"userspace": 3}, "losses": {}}
    account = account_of(tmp_path, event | {"ts_ns": 1}, footer, event | {"ts_ns": 2}, event | {"ts_ns": 3})
    assert account.notes == ["2 records come after the footer"]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("warp_tracks", ["auto", "sm", "off"])
def test_warps_are_counted_even_where_none_is_drawn(warp_tracks: str, tmp_path: Path) -> None:
    warps = {"type": "gpu_warp", "name": "k", "ts_ns": 100, "warp": [0, 1, 2], "entry_ns": [0, 1, 2]}
    options = LayoutOptions(warp_tracks)
    account = account_of(tmp_path, warps | {"exit_ns": [5, 5, 5]}, options=options)
    assert account.counts == {"gpu_warp": 3}


def test_remembered_launches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "LAUNCHES_MAX", 10)
    known = Launches()
    for launch in range(200):
        known.call(launch, launch)
        known.kernel(launch + 999, launch, 0)
    tables = [table for table in vars(known).values() if isinstance(table, dict)]
    assert tables
    assert {len(table) for table in tables} == {10}


DAY_NS = 86_400 * 10**9
EVENTS = ({"dur_ns": 3 * DAY_NS, "ts_ns": 5_000}, {"dur_ns": 1_000, "ts_ns": 9_000})


@pytest.mark.parametrize(
    ("days", "notes"),
    [
        ({"first": 0, "during": 2}, []),
        ({"first": 0, "later": 61}, ["later.jsonl begins 58 days after first.jsonl ends"]),
        ({"later": 61, "first": 0, "during": 2}, ["later.jsonl begins 56 days after during.jsonl ends"]),
    ],
)
def test_recordings_without_a_time_in_common_are_noted(
    tmp_path: Path, days: dict[str, int], notes: list[str]
) -> None:
    paths = []
    for name, day in days.items():
        start = {"monotonic_ns": 100 * DAY_NS, "realtime_ns": (20_000 + day) * DAY_NS}
        header = Header(host=name, boot=name, start=start).to_record()
        called = {"type": "userspace", "name": "cuInit", "phase": "X", "pid": 1, "tid": 1}
        events = [{**called, **event, "ts_ns": event["ts_ns"] + 100 * DAY_NS} for event in EVENTS]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in (header, *events)))
    account = Conversion([*map(str, paths)], CONVERTERS["text"], ConversionOptions()).run(io.BytesIO())
    assert account.notes == [f"{note}: they have no time in common" for note in notes]
