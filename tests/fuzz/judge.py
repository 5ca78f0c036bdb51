"""What must be true of any recording, whatever it holds: `judge` raises AssertionError, or what bugs do."""

from __future__ import annotations

import io
import json
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.golden.both import converted
from tests.golden.seen import ReplayFormat, replay
from tests.support.cores import cores_here, running
from tracepipe import cli
from tracepipe.analyses.gates import Gate
from tracepipe.converters import CONVERTERS
from tracepipe.errors import TracepipeError
from tracepipe.event import tables
from tracepipe.event.model import Problem
from tracepipe.kernel_names import without_namespaces
from tracepipe.layout import WARP_TRACKS, LayoutOptions, merging
from tracepipe.present.writing.rendering import report_lines
from tracepipe.printable import json_text
from tracepipe.readers import READERS, tracepipe1
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.recording.files import open_input
from tracepipe.recording.reading import Reading, open_recording
from tracepipe.reports import REPORTS
from tracepipe.reports.report import FileOutput
from tracepipe.store.run import Run, load_run

LAYERS = ("userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu_kernel")
DRAWN = {"userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu"}
_ASSUMED: tuple[dict[str, int | str], ...] = (
    {}, {}, {}, {"globaltimer:0": 5}, {"globaltimer:0": -6_000_000, "globaltimer:1": "realtime"},
    {"globaltimer:0": -(10**20)}, {"trace": 1 << 62}, {"tsc": "monotonic"},
)  # fmt: skip
# Values that options of reports get besides their defaults.
_OPTIONS: dict[Any, tuple[Any, ...]] = {
    int: (0, 1, 5, (1 << 31) - 1),
    int | None: (None, 0, 1, (1 << 31) - 1),
    float: (0.5, 1e-9, 0.999),
    str: ("", "1us", "0", "a", "k.*"),
    bool: (True, False),
    str | Sequence[str]: ("", "*", "*=3", ("a", "k*=2")),
    tuple[Gate, ...]: (
        (),
        (Gate.read("wall<=+3%"),),
        (Gate.read("step<=-1us"), Gate.read("idle<=+0%")),
    ),
}


_COMMANDS = (
    "validate", "convert -f text", "convert -f chrome -o -", "convert --strict -f text",
    "convert --whatif launches=free -f text", "summary",
    "summary --all", "steps", "whatif", "timeline", "layers", "gaps",
    "lines", "annotations", "memory", "warps", "diff", "summary --json",
    "warps --json",
    "layers --json", "memory --json", "gaps --json", "lines --json", "diff --json", "timeline --json",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is done with a recording. `parts`: everything, or what the random numbers choose."""

    rng: Random
    everything: bool = False

    def some(self, names: tuple[str, ...], count: int) -> list[str]:
        return list(names) if self.everything else self.rng.sample(names, count)

    def rarely(self, share: float) -> bool:
        return self.everything or self.rng.random() < share


def judge(path: Path, asked: Asked) -> None:
    """Read, convert, report and run commands on a file."""
    rng = asked.rng
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what NumPy says of empty columns, and divisions by 0
        if rng.random() < 0.2:
            # Few lines at a time, and numbers of shapes and arguments that are soon given anew.
            patch.setattr(tracepipe1, "CHUNK_BYTES", rng.choice((200, 2_000)))
            patch.setattr(merging, "WINDOW_EVENTS", rng.choice((1, 3, 20)))
            patch.setattr(tables, "KEPT_MAX", rng.choice((0, 1 << 14)))
        _judge(path, asked)


def _judge(path: Path, asked: Asked) -> None:
    rng = asked.rng
    source = "" if asked.everything else rng.choice(["", "", "", "", *READERS])
    assumed = dict(rng.choice(_ASSUMED))
    account = _read(path, source, assumed)
    for to in asked.some(tuple(CONVERTERS), 1):
        layout = LayoutOptions(rng.choice(WARP_TRACKS), rng.random() < 0.5)
        compress = CONVERTERS[to].can_compress and rng.random() < 0.3
        options = ConversionOptions(source, assumed=assumed, compress=compress, layout=layout)
        _convert(path, to, options, account)
    with running(rng.choice(cores_here())):
        if asked.rarely(0.6):
            _report(path, source, assumed, asked)
        if asked.rarely(0.3):
            _command(path, source, asked)


# Reading -------------------------------------------------------------------------------------------------


def _read(path: Path, source: str, assumed: dict[str, int | str]) -> tuple[int, list[Problem]] | None:
    """How many records were read and the messages of which lines; None where the file was refused."""
    found: list[Any] = []
    for core in cores_here():
        with running(core):
            try:
                found.append(_rows(path, source, assumed))
            except TracepipeError as e:
                found.append(str(e))
    assert all(one == found[0] for one in found), "the cores read something else"
    if isinstance(found[0], str):
        return None
    rows, problems, format_name = found[0]
    if format_name == "tracepipe":
        _no_line_is_lost(path, rows, problems)
    return rows, problems


def _rows(path: Path, source: str, assumed: dict[str, int | str]) -> tuple[int, list[Problem], str]:
    rows, problems = 0, []
    with open_recording(str(path), source, assumed) as opened:
        reading = Reading(opened, str(path))
        for batch in reading.source():
            rows += len(batch.events)
            problems += batch.problems
        assert reading.finish().skipped == sum(problem.skipped for problem in problems)
        assert all(problem.message for problem in problems)
        return rows, problems, opened.source


def _no_line_is_lost(path: Path, rows: int, problems: list[Problem]) -> None:
    """Each line that is not blank is a record, or is named as a problem."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b" or data[:4] == b"\x28\xb5\x2f\xfd":
        return
    lines = [line for line in data.split(b"\n")[1:] if line.strip()]
    # An event whose stack is not known is an event.
    named = {one.line for one in problems if one.line > 1 and (one.skipped or one.field != "stack")}
    assert len(lines) == rows + len(named), f"{len(lines)} lines, {rows} records, {len(named)} with problems"


# Converting ----------------------------------------------------------------------------------------------


def _convert(path: Path, to: str, options: ConversionOptions, read: tuple[int, list[Problem]] | None) -> None:
    try:
        output, account = converted(path, to, options, cores_here())
    except TracepipeError:
        return  # every core refuses it, or `converted` would have reported it
    assert read is not None, "what cannot be read is converted"
    assert account.skipped >= sum(problem.skipped for problem in read[1])
    if to == "perfetto":
        pb.Trace.FromString(output)
    elif to == "chrome":
        json.loads(output)
    elif to == "archive":
        with zipfile.ZipFile(io.BytesIO(output)) as archive:
            assert archive.testzip() is None
            pb.Trace.FromString(archive.read(archive.namelist()[0]))
    elif to == "tracepipe":
        assert [json.loads(line)["type"] for line in output.splitlines()][-1] == "footer"
    else:
        assert all(line.isprintable() for line in output.decode().split("\n"))


# Reports -------------------------------------------------------------------------------------------------


def _report(path: Path, source: str, assumed: dict[str, int | str], asked: Asked) -> None:
    try:
        run = load_run(str(path), source, False, assumed)
    except TracepipeError:
        return
    _same_spans(path, source, assumed, run)
    for name in asked.some(tuple(REPORTS), 2):
        report = REPORTS[name]
        draws = isinstance(report.output, FileOutput)
        if draws and not asked.rarely(0.1):
            continue
        try:
            inputs: list[Any] = [run]
            if report.takes_several:
                inputs = [[lambda: run] * asked.rng.randint(1, 4) for _ in report.inputs]
            result = report.run(*inputs, _options(report.options, asked))
        except TracepipeError:
            continue  # an option does not fit the recording
        width = asked.rng.choice((20, 60, 80, 100, 200))
        lines = report_lines([run.facts], result, width=width, ascii_only=asked.rng.random() < 0.2)
        assert all(line.isprintable() for line in lines)
        json.loads(json_text(result.as_json()))
        for file, write in result.files.items():
            if not draws or file == ".html":
                write(io.BytesIO())


def _options(kind: type, asked: Asked) -> Any:
    """Options of a report, most of them its defaults."""
    given = {}
    if not asked.everything:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            of, option = get_args(hints[field.name])
            if asked.rng.random() < 0.2:
                given[field.name] = asked.rng.choice(option.choices or _OPTIONS[of])
    return kind(**given)


def _same_spans(path: Path, source: str, assumed: dict[str, int | str], run: Run) -> None:
    """Reports see the spans that the timeline draws, and parents stand before their children."""
    for layer in LAYERS:
        parents = run.layer(layer).parent
        assert bool((parents < np.arange(len(parents))).all())
    with open_input(str(path)) as stream:
        if merging.WINDOW_EVENTS < 1_000 or b'"unclosed"' in stream.head():
            return  # late events are drawn elsewhere; an argument has the name of the timeline's mark
    if not DRAWN.isdisjoint(run.values("hook", slice(None), "layer")["layer"]):
        return  # a layer of a hook is called as one of ours
    kept = ReplayFormat()
    account = Conversion(str(path), cast(Any, kept), ConversionOptions(source, assumed=assumed)).run(
        io.BytesIO()
    )
    if account.outcomes.undrawn or run.facts.skipped != account.skipped:
        return  # what is not drawn, or has no time in a report, is reported
    rows = (
        (without_namespaces(name) if layer == "gpu_kernel" else name, *times_ns)
        for layer in LAYERS
        for name, *times_ns in zip(
            *run.values(layer, slice(None), "name", "start_ns", "dur_ns").values(), strict=True
        )
    )
    drawn = replay(kept.writer.steps, may_lack_starts=True)
    seen = (one for _, slices in drawn.slices for one in slices if one.category in DRAWN)
    assert Counter(rows) == Counter(
        (one.name, one.ts_ns, None if one.instant or "unclosed" in one.args else one.dur_ns) for one in seen
    )


# Commands ------------------------------------------------------------------------------------------------


def _command(path: Path, source: str, asked: Asked) -> None:
    for command in asked.some(_COMMANDS, 1):
        argv = [*command.split(), str(path), *([str(path)] if command.startswith("diff") else [])]
        code, out, err = ran(argv + (["--from", source] if source else []))
        assert code in (0, 1), err
        text = (err if "chrome" in command else out + err).decode()  # a trace is not text for people
        assert {letter for letter in text if not letter.isprintable()} <= {"\n"}
        if "--json" in command and code == 0:
            json.loads(out)
        if command == "validate":
            assert (code == 1) == ("tracepipe: " in err.decode() or " 0 bad lines" not in err.decode())
        if code == 1 and command != "validate":
            assert "\ntracepipe: " in "\n" + err.decode()


def ran(argv: list[str]) -> tuple[int, bytes, bytes]:
    """Exit status, output and errors of a command, in this process."""
    out, err = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "argv", ["tracepipe", *argv])
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8"))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, "utf-8"))
        try:
            cli.main()
        except SystemExit as e:
            code = int(e.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        return code, out.getvalue(), err.getvalue()
