"""What is kept of a compiler is what it would make again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import compiled as module
from tests.support.compiled import compiled

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    return tmp_path / "kept"


def made_of(text: str, folder: Path, *options: str) -> int:
    """The exit code of a program that is made of a source."""
    source = folder / "program.c"
    source.write_text(text)
    return subprocess.run([compiled(["gcc", *options, str(source)], folder / "program")]).returncode


def test_a_source_or_an_option_that_changes_is_compiled(tmp_path: Path, kept: Path) -> None:
    assert made_of("int main(void) { return CODE; }", tmp_path, "-DCODE=1") == 1
    (program,) = kept.glob("*-program")
    first = program.stat().st_ino
    assert made_of("int main(void) { return CODE; }", tmp_path, "-DCODE=1") == 1
    assert [one.stat().st_ino for one in kept.glob("*-program")] == [first]
    assert made_of("int main(void) { return CODE; }", tmp_path, "-DCODE=2") == 2
    assert made_of("int main(void) { return CODE + 2; }", tmp_path, "-DCODE=1") == 3
    assert len([*kept.glob("*-program")]) == 3


def test_a_source_that_is_refused_fails_each_time(tmp_path: Path, kept: Path) -> None:
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            made_of("int main(void) { return", tmp_path)
    assert not [*kept.glob("*-program")]
