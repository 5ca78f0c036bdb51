"""The changelog has the form of Keep a Changelog, and knows the version that the package has."""

from __future__ import annotations

import re
from pathlib import Path

import tracepipe

LINES = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_versions_stand_one_after_the_other_with_their_dates() -> None:
    unreleased, *versions = [line for line in LINES if line.startswith("## ")]
    assert unreleased == "## [Unreleased]"
    heads = [re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", line) for line in versions]
    assert all(heads), versions
    dates = [head[2] for head in heads if head]
    assert dates == sorted(dates, reverse=True)
    assert next(head[1] for head in heads if head) == tracepipe.__version__


def test_each_change_is_of_a_kind() -> None:
    kind, kinds = "", set()
    for line in LINES:
        if line.startswith("## "):
            kind, kinds = "", set()
        elif line.startswith("### "):
            kind = line[4:]
            assert kind in KINDS and kind not in kinds, line
            kinds.add(kind)
        elif line.startswith("- "):
            assert kind, f"of no kind: {line}"
