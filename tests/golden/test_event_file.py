"""What any reader gives can be written as an event file, which draws the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.golden.cases import Case, cases, with_sample
from tests.golden.seen import lines_by_track
from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConversionOptions

pytestmark = pytest.mark.usefixtures("core")


def written(case: Case, folder: Path) -> tuple[Path, Account]:
    path = folder / "written.jsonl"
    with path.open("wb") as out:
        account = Conversion(str(case.input), CONVERTERS["tracepipe"], case.options()).run(out)
    return path, account


def drawn(path: Path, options: ConversionOptions) -> tuple[list[tuple[tuple[str, ...], list[str]]], Account]:
    """The lines of each track, but for those about problems of a file, and about which format that is in."""
    out = io.BytesIO()
    account = Conversion(str(path), CONVERTERS["text"], options).run(out)
    tracks = [
        (track, [line for line in lines if "source_format=" not in line])
        for track, lines in lines_by_track(out.getvalue().decode())
        if track[-1] != "problems" and track
    ]
    return tracks, account


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_an_event_file_of_a_recording_draws_the_same(case: Case, tmp_path: Path) -> None:
    path, account = written(case, tmp_path)
    of_file, read = drawn(path, case.options())
    of_recording, _ = drawn(case.input, case.options())
    assert of_file == of_recording
    assert (read.source, read.skipped, read.ambiguous) == ("tracepipe", 0, 0)
    footer = json.loads(path.read_text().splitlines()[-1])
    assert (footer["counts"], footer["losses"]) == (+account.counts, account.losses)


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_an_event_file_is_the_same_when_it_is_written_again(case: Case, tmp_path: Path) -> None:
    path, _ = written(case, tmp_path)
    again = io.BytesIO()
    Conversion(str(path), CONVERTERS["tracepipe"], ConversionOptions()).run(again)
    assert again.getvalue() == path.read_bytes()
