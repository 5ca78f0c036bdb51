"""Names, paths and texts that nobody expects, as every argument and option of every command.

The parameters are those that the command line itself has, so a new one is tried too. Each is given a name as
a text, and, where a file may have it, as the name of a file that is there. A command may then do its work or
refuse it, but no bug may show, no terminal may obey what is printed, and a refusal names what was given.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_job import SimulatedJob
from tracepipe import cli
from tracepipe.dataset.build import build
from tracepipe.hooks.hook import RECORDED_LAYERS
from tracepipe.printable import is_unicode, printable
from tracepipe.tracer.engines.engine import Attachment
from tracepipe.tracer.request import Notify, Plan

pytestmark = pytest.mark.usefixtures("quick_doctor", "without_pictures")
SOURCES = tuple(Path(cli.__file__).parents[1].rglob("*.py"))
FIXTURE = Path(__file__).parents[2] / "fixtures" / "annotations" / "input.jsonl"
NAMES = (
    b"\xff",
    b"a\xffb.jsonl",
    b"\x1b[31mred\x1b[0m",
    b"\x1b]0;title\x07",
    b"\xc2\x9b31m",
    b"new\nline",
    b"\rhidden",
    b"tab\there\x7f\x08",
    b"'\"`$(id)\\",
    "\u2028\u202e\u2066".encode(),  # a line end, and marks that turn the direction of text
    b"\xed\xa0\x80",  # a surrogate, which UTF-8 does not have
    "\U000e0001".encode(),  # a tag, which is invisible
    b"",
    b" ",
    b"-",
    b"--force",
    b"-\xff",
    b"%s%n%1000d",
    b"%\x1b",
    b"..",
    b"*?[\xff{",
    b"a::b\xff",
    b"x=\xff",
    b"\xff=1",
    b"(" * 300,
    b"9" * 5000,
    b"\xff" * 300,
    b"n" * 5000,
    b"a/\xff/\x1b[1m",
    b"file:///tmp/\xff\x1b[31m",
    b"memory://\xff\x1b[31m/x",
    b"http://127.0.0.1:9/\xff\x1b[31m",
    b"http://\x1b[31m@[/",
    b"nosuch://\x1b\xff",
    # Where a text has a number in it, more digits than Python makes a number of.
    b"0-" + b"9" * 5000,
    b"signal#" + b"9" * 5000,
    b"call:f\xff#" + b"9" * 5000,
    b"layer:\x1b > " + b"9" * 5000 + b"ms",
    b"uprobe:libc.so.6:malloc(u64 size) if size > " + b"9" * 5000,
    b"spark://\xff:" + b"9" * 5000,
)
# What else a parameter needs to be of any use.
WITH = {
    "--when": ["--last=1s"], "--last-size": ["--last=1s"], "--stop-on": ["--duration=1s"],
    "--ranks": ["--format=text"], "--archive": ["--format=text"],
    "--comm": ["--duration=1ms"], "--pid": ["--duration=1ms"],
}  # fmt: skip
FILES = {
    "RUN", "FILE", "FILE...", "A", "B", "DATASET", "INPUT...", "--output", "--a", "--b", "--stalls",
    "--warps", "--file", "--archive", "--kernels", "--library", "--command-output",
}  # fmt: skip
OUTPUTS = {"report": "out.html", "plot": "out.svg", "flame": "out.svg"}
INSTEAD_OF_A_COMMAND = {"--pid", "--comm"}


@dataclass(frozen=True)
class Place:
    """A parameter that takes a text."""

    command: tuple[str, ...]
    parameter: Any
    all_of_the_command: tuple[Any, ...]

    @property
    def flag(self) -> str:
        """The option's name, or the argument's placeholder."""
        if self.parameter.param_type_name == "option":
            return max(self.parameter.opts, key=len)
        return str(self.parameter.metavar)

    def __str__(self) -> str:
        return " ".join((*self.command, self.flag))


def _places() -> Iterator[Place]:
    group: Any = typer.main.get_command(cli.app)
    context = group.make_context("tracepipe", ["doctor"])
    waiting: list[tuple[tuple[str, ...], Any]] = [((), group)]
    while waiting:
        path, command = waiting.pop()
        if hasattr(command, "list_commands"):
            names = reversed(command.list_commands(context))
            waiting += [((*path, name), command.get_command(context, name)) for name in names]
            continue
        taking = tuple(one for one in command.params if not getattr(one, "is_flag", False))
        yield from (Place(path, parameter, taking) for parameter in taking)


PLACES = tuple(_places())


def judge(line: list[str], code: int, out: str, err: str) -> None:
    """A documented exit code, a message with it, and nothing that a terminal obeys."""
    assert code in (0, 1, 2, 3), (line, code, err)
    is_raw = "-" in (word.rpartition("=")[2] for word in line)  # an output that is for no terminal
    for printed in (err, "" if is_raw else out):
        raw = {letter for letter in printed.replace("\n", "") if not letter.isprintable()}
        assert not raw, (line, raw, printed)
    assert not code or err, (line, code)


class NothingAttached:
    """An engine that attaches no probes, so that a capture takes no time, and no right."""

    name = "none"
    layers = frozenset(RECORDED_LAYERS)

    def attach(self, plan: Plan, notify: Notify) -> Attachment:
        return Attachment(plan)


class World:
    """A folder with a recording and a dataset, whose own name is as bad as the names of the sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "w\u202e\x1b[31m\n%s"
        self.folder.mkdir()
        job = SimulatedJob(1, 1, steps=2)
        job.write(self.folder / "runs")
        build([str(self.folder / "runs")], str(self.folder / "dataset"))
        self._numbers = count()

    def try_name(self, place: Place, name: bytes, is_there: bool) -> None:
        """Run a command with a name for a parameter, and judge how it ends."""
        text, folder = os.fsdecode(name), self.folder / f"{next(self._numbers)}"
        folder.mkdir()
        shutil.copy(FIXTURE, folder / "run.jsonl")
        if is_there:
            shutil.copy(FIXTURE, os.fsencode(folder) + b"/" + name)
        before = Path.cwd()
        os.chdir(folder)
        try:
            self._judge(place, text, self._line(place, text), is_there=is_there)
        finally:
            os.chdir(before)
            shutil.rmtree(folder)

    def _line(self, place: Place, text: str) -> list[str]:
        flag = place.flag
        given = [*WITH.get(flag, ())]
        for one in (one for one in place.all_of_the_command if one.param_type_name == "option"):
            if one is place.parameter:
                given.append(f"{flag}={text}")
            elif one.required or "--output" in one.opts:
                given.append(f"--output={OUTPUTS.get(place.command[-1], 'out')}")
        if place.command == ("cut",) and flag not in ("--from", "--to"):
            given.append("--from=0")
        given.append("--")
        for one in (one for one in place.all_of_the_command if one.param_type_name == "argument"):
            if one is place.parameter:
                given.append(text)
            elif "COMMAND" in one.metavar:
                given += [] if flag in INSTEAD_OF_A_COMMAND else ["true"]
            elif one.metavar == "DATASET" or flag == "--ranks":
                given.append("../dataset")
            elif one.metavar not in ("SQL", "PATTERN"):
                given.append("run.jsonl")
        return [*place.command, *given]

    def _judge(self, place: Place, text: str, line: list[str], *, is_there: bool) -> None:
        code, out, err = run(line)
        judge(line, code, out, err)
        if code == 1 and place.flag in FILES and text not in ("", "-") and not is_there:
            shown = printable(text)[:200]
            assert (shown.rpartition("/")[0] or shown) in err, (line, err)  # or the folder that is not there


def run(line: list[str]) -> tuple[int, str, str]:
    """The exit code of a command line that runs in this process, and what it printed. A bug is raised."""
    printed = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tracepipe", *line])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        patch.setattr(sys, "stdout", printed[0])
        patch.setattr(sys, "stderr", printed[1])
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    texts = []
    for stream in printed:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="backslashreplace"))  # type: ignore[attr-defined]
    return code or 0, texts[0], texts[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("names"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach nothing, keep this process's priority, read all in it, and open no browser."""
    monkeypatch.setattr("tracepipe.tracer.choose", lambda method: (NothingAttached(), "", ""))
    monkeypatch.setattr("tracepipe.tracer.session.runs_first", lambda: None)
    monkeypatch.setattr("tracepipe.dataset.build.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr("tracepipe.cli.convert.open_trace", lambda *_, **__: None)


def can_be_there(name: bytes) -> bool:
    return 0 < len(name) < 256 and b"/" not in name and name != b".."


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_parameter_with_a_name(place: Place, world: World) -> None:
    name = NAMES[PLACES.index(place) % len(NAMES)]
    world.try_name(place, name, is_there=can_be_there(name))


@pytest.mark.slow
@given(data=st.data())
def test_any_parameter_with_any_name(data: st.DataObject, world: World) -> None:
    name = data.draw(st.sampled_from(NAMES) | st.binary(max_size=20).filter(lambda one: b"\0" not in one))
    is_there = can_be_there(name) and data.draw(st.booleans())
    world.try_name(data.draw(st.sampled_from(PLACES)), name, is_there=is_there)


# The variables that the package reads by name. With one of them, colours are printed.
_READ = re.compile(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"")
READ = {name for file in SOURCES for name in _READ.findall(file.read_text())}
OTHERS = {"HOME", "COLUMNS", "LINES", "LANG", "LC_ALL", "RANK", "WORLD_SIZE"}
VARIABLES = sorted((READ | OTHERS) - {"FORCE_COLOR"})
BUILDING = {"HOME", "XDG_CACHE_HOME", "TMPDIR"}  # where a library is built, or kept


@pytest.mark.slow
@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_the_environment(
    variable: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "home")
    monkeypatch.delenv("TRACEPIPE_CACHE")  # what is read is kept, in a folder that the variables name
    shutil.copy(FIXTURE, "run.jsonl")
    for name in NAMES[VARIABLES.index(variable) :: len(VARIABLES)]:
        with monkeypatch.context() as patch:
            patch.setenv(variable, os.fsdecode(name[:4000]))
            patch.setattr(tempfile, "tempdir", None)
            line = ["summary", "run.jsonl"]
            judge(line, *run(line))
    layers = f"--layers={'annotation' if variable in BUILDING else 'scheduler'}"
    line = ["capture", layers, "--output=new.jsonl", "--", "true"]
    monkeypatch.setenv(variable, os.fsdecode(name[:4000]))
    judge(line, *run(line))


# The texts that a file of hooks has.
HOOKS = """
about = {0}
target = {1}
layer = {2}
[[hook]]
functions = [{3}]
condition = {4}
source = {5}
[values.{6}]
0 = {7}
"""
TEXTS = ("mine", "uprobe:libc.so.6", "own", "malloc(size: kind)", "size > 1", "a page", "kind", "NAME")


@pytest.mark.parametrize("part", range(len(TEXTS)))
def test_a_text_in_a_file_of_hooks(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES[part :: len(TEXTS)], b"a\0b"):
        texts = [*TEXTS]
        texts[part] = name.decode(errors="replace")
        Path("hooks.toml").write_text(HOOKS.format(*map(json.dumps, texts)))
        line = ["hooks", "test", "hooks.toml", "--", "true"]
        judge(line, *run(line))


@pytest.mark.slow
def test_a_folder_of_recordings_with_these_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [b"%s-rank%d.jsonl" % (name[:200], at) for at, name in enumerate(NAMES[::3]) if b"/" not in name]
    Path("runs").mkdir()
    for name in names:
        shutil.copy(FIXTURE, b"runs/" + name)
    line = ["dataset", "build", "runs", "-o", "ds"]
    code, out, err = run(line)
    judge(line, code, out, err)
    refused = [text for text in map(os.fsdecode, names) if not is_unicode(text)]
    assert all(printable(text) in err for text in refused)
    assert f"{len(names) - len(refused)} written, 0 unchanged, {len(refused)} left out" in err
