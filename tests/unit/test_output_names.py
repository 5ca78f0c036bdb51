"""Names of a capture's outputs: parts that are filled in, folders, and the default."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest

from tests.support.launched import VARIABLES
from tracepipe.api.record import OutputNames
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.tracer.request import CaptureRequest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def names(**asked: object) -> OutputNames:
    return OutputNames(CaptureRequest(**({"command": ["bin/vec_add", "-n", "1"]} | asked)))  # type: ignore[arg-type]


def test_a_plain_name_is_taken_as_it_is(here: Path) -> None:
    assert names().recording("run.jsonl") == "run.jsonl"
    assert names().recording("-") == "-"
    assert names().command_output("") == ""
    assert list(here.iterdir()) == []


def test_parts_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    name = names().recording("%e-%h-%p-%r-of-%w-%%x-{rank}.jsonl")
    assert name == f"vec_add-{platform.node()}-{os.getpid()}-3-of-8-%x-{{rank}}.jsonl"
    assert names(command=[], pids=(42, 43)).recording("%p-%e") == "42-pid-42"
    assert names(command=[], comm="kworker/0:1").recording("%e") == "kworker_0:1"
    assert names(command=[], comm="kworker/0:1").recording("") == "kworker_0:1.jsonl"


def test_no_host_is_a_folder_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "../%r/node")
    assert names().recording("%h.jsonl") == ".._%r_node.jsonl"


def test_both_outputs_have_the_same_time() -> None:
    ours = names()
    recording = ours.recording("run-%t.jsonl")
    assert re.fullmatch(r"run-\d{8}-\d{6}\.jsonl", recording)
    assert ours.command_output("run-%t.txt") == recording.replace(".jsonl", ".txt")


def test_without_a_launcher_there_is_no_rank(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TracepipeError, match=r"^The rank is not known: none of RANK, ") as refused:
        names().recording("traces/%r.jsonl")
    assert "sudo -E" in refused.value.hint
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TracepipeError, match=r"^The number of ranks is not known\.$"):
        names().recording("traces/%r-%w.jsonl")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("part", ["%x", "%T", "%{", "%"])
def test_an_unknown_part_of_a_name_is_reported(part: str, here: Path) -> None:
    with pytest.raises(TracepipeError) as refused:
        names().recording(f"traces/{part}")
    assert refused.value.message == f"{part} in traces/{part} is not known."
    assert refused.value.hint == "Use one of: %h, %r, %w, %p, %e, %t. Write a percent sign itself twice."
    assert list(here.iterdir()) == []


def test_a_folder_gets_a_recording_of_the_programs_name(here: Path) -> None:
    assert names().recording("a/b/") == "a/b/vec_add.jsonl"
    (here / "a/b/vec_add.jsonl").touch()
    assert names().recording("a/b") == "a/b/vec_add-2.jsonl"
    assert names().recording("%es/") == "vec_adds/vec_add.jsonl"
    assert names().command_output("a/") == "a/vec_add.txt"


def test_a_name_has_its_folder_made(here: Path) -> None:
    assert names().recording("some/deep/run.jsonl") == "some/deep/run.jsonl"
    assert names().command_output("logs/app.txt") == "logs/app.txt"
    assert names().recording("x" * 300) == "x" * 300  # which whoever opens it says cannot be
    names().recording("traces/%e/run.jsonl")
    folders = {str(path.relative_to(here)) for path in here.rglob("*")}
    assert folders == {"some", "some/deep", "logs", "traces", "traces/vec_add"}


def test_a_folder_that_cannot_be_made_is_named(here: Path) -> None:
    (here / "file").touch()
    with pytest.raises(OutputError, match="cannot make the folder file/traces: Not a directory"):
        names().recording("file/traces/")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away, which needs root")
def test_folders_that_are_made_under_sudo_belong_to_the_caller(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", "4321")
    monkeypatch.setenv("SUDO_GID", "8765")
    (here / "mine").mkdir()
    names().recording("mine/a/b/")
    owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in here.rglob("*")}
    assert owners == {"mine": (os.geteuid(), os.getegid()), "a": (4321, 8765), "b": (4321, 8765)}
