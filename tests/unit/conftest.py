"""What several files of unit tests share: a process that records as the test says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Has these lines of Python record: `order` is what they got, `send` answers, `heard` waits for more."""

    def set_to(*lines: str) -> None:
        start = (
            "import sys",
            "from dataclasses import replace",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "from multiprocessing.connection import Connection",
            "from tracepipe.api.capture_block import Began, Written",
            "from tracepipe.errors import CaptureUnavailable, OutputError, TracepipeError",
            "from tracepipe.tracer.request import ENDED, Answer, WindowOrder",
            "from tests.support.summaries import LAST, SUMMARY",
            "caller = Connection(int(sys.argv[1]))",
            "order, send, heard = caller.recv(), caller.send, caller.recv",
        )
        script = tmp_path / "recorder.py"
        script.write_text("\n".join((*start, *lines)))
        monkeypatch.setattr(
            "tracepipe.api.capture_block.command_line",
            lambda descriptor, paths: [sys.executable, str(script), str(descriptor)],
        )

    return set_to
