"""Every snippet of docs/api.md runs as it stands there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.pages import blocks
from tests.support.standin import needs

ROOT = Path(__file__).parents[2]


def snippets() -> list[str]:
    """The code blocks of the page."""
    return [block.text for block in blocks("docs/api.md")]


def marked(snippet: str) -> object:
    """A snippet that captures needs what captures need."""
    marks = [pytest.mark.ebpf, needs("bcc")] if "tracepipe.capture(" in snippet else []
    return pytest.param(snippet, marks=marks, id=snippet.splitlines()[0])


@pytest.mark.parametrize("snippet", [marked(snippet) for snippet in snippets()])
def test_a_snippet_runs(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "fixtures/capture-h200/input.jsonl", "run.jsonl")
    import tracepipe

    exec(compile(snippet, "docs/api.md", "exec"), {"tracepipe": tracepipe})
    if "print(" in snippet:
        assert capsys.readouterr().out


def test_the_page_names_all_that_is_public() -> None:
    import tracepipe

    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    hidden = {
        "Capture",
        "CaptureSummary",
        "Events",
        "Problem",
        "Run",
        "WarpExit",
        "WarpRange",
    }  # what the functions return
    assert [name for name in tracepipe.__all__ if name not in hidden and name not in page] == []
    assert len(snippets()) == 11
