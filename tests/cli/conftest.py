"""What the tests of the command line share: what takes seconds is left out where it is not the question."""

from __future__ import annotations

import pytest

from tracepipe.doctor.checks import ABSENT, FAILS, LIMITED, WORKS, Diagnosis

# A row of each state. A hint is on a line of its own.
FOUND = [
    Diagnosis("machine", "kernel", WORKS, "Linux 6.12"),
    Diagnosis("methods", "uprobes", FAILS, "needs root", "Run it with sudo."),
    Diagnosis("layers", "userspace", LIMITED, "without kernel names"),
    Diagnosis("gpu", "kernels", ABSENT, "no GPU"),
]


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `tracepipe doctor`, in this process, state a row of each kind, where it would try out captures."""
    monkeypatch.setattr("tracepipe.cli.machine.examine", lambda **_: FOUND)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has pages lack their pictures, and files of pictures be empty: what is printed does not depend on them,
    and each takes some tenths of a second.
    """
    monkeypatch.setattr("tracepipe.present.page.html_page.inline_svg", lambda panel: "")
    for module in ("tracepipe.reports.plot", "tracepipe.ranks.page"):
        monkeypatch.setattr(f"{module}.write_picture", lambda panels, to, out: None)
