"""The commands of the reports: one for each of `REPORTS`, with their common options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from tracepipe import paths
from tracepipe.cli.groups import keyword, with_groups
from tracepipe.cli.input_options import RECORDING, Reading
from tracepipe.cli.output_options import AS_RECORDING, TO_STANDARD, Force, Shown, output_option
from tracepipe.cli.report_text import ending_of, put_lines
from tracepipe.cli.values import Misuse, number, read, whole
from tracepipe.recording.files import STANDARD
from tracepipe.recording.outputs import default_output, replacing, replacing_folder
from tracepipe.reports import REPORTS
from tracepipe.reports.report import REGEX, TIME, FileOutput, FolderOutput, Option, Report, Result
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import put_json, say
from tracepipe.units import duration_ns

if TYPE_CHECKING:
    from tracepipe.reports.frames.run import Run

_SEVERAL = "several_"
"""The prefix of parameters that take all values up to the next option."""
_REQUIRED = inspect.Parameter.empty
_GROUPS: dict[str, tuple[Any, Any]] = {"shown": (Shown, _REQUIRED), "how": (Reading, _REQUIRED)}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of all reports; `output` and `force` are only for reports that write files."""

    shown: Shown
    how: Reading
    output: str = ""
    force: bool = False


def _command(report: Report) -> Callable[..., None]:
    """The command of a report, whose parameters are its inputs, its options and the common ones."""

    def command(**given: Any) -> None:
        paths = [given.pop(f"input_{at}") for at in range(len(report.inputs))]
        paths = _sides(report, paths, given) if report.takes_several else [[path] for path in paths]
        asked = _Asked(**{name: given.pop(name) for name in (*_GROUPS, *_output(report))})
        _run(report, paths, report.options(**{k: _plain(v) for k, v in given.items()}), asked)

    parameters = _inputs(report) | _options(report) | _output(report) | _GROUPS
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [keyword(name, default, kind) for name, (kind, default) in parameters.items()]
    )
    return with_groups(command)


def _inputs(report: Report) -> dict[str, tuple[Any, Any]]:
    """The parameters that name recordings."""
    several = report.takes_several
    kind, default = (str | None, None) if several else (str, _REQUIRED)
    found: dict[str, tuple[Any, Any]] = {
        f"input_{at}": (Annotated[kind, typer.Argument(help=RECORDING, metavar=name)], default)
        for at, name in enumerate(report.inputs)
    }
    for name in report.inputs if several else ():
        option = typer.Option(
            f"--{name.lower()}",
            help=f"The recordings of side {name}, one or more.",
            metavar=f"{name}1 {name}2 …",
        )
        found[f"{_SEVERAL}{name}"] = (Annotated[list[str] | None, option], None)
    return found


def _sides(report: Report, paths: list[str | None], given: dict[str, Any]) -> list[list[str]]:
    """The recordings of each input, named by arguments or options. Raises Misuse."""
    by_option = [given.pop(f"{_SEVERAL}{name}") or [] for name in report.inputs]
    options = " and ".join(f"--{name.lower()}" for name in report.inputs)
    if not any(by_option):
        for name, path in zip(report.inputs, paths, strict=True):
            if path is None:
                both = " and ".join(report.inputs)
                raise Misuse(
                    f"There is no recording {name}.", f"Name {both}, or several of each with {options}."
                )
        return [[path] for path in paths if path is not None]
    if strange := [path for path in paths if path is not None]:
        raise Misuse(f"{strange[0]} is of neither side.", f"Name all recordings with {options}.")
    for name, some in zip(report.inputs, by_option, strict=True):
        if not some:
            raise Misuse(f"There are no recordings of {name}.", f"Name one or more by --{name.lower()}.")
        # A recording is one observation, however often it is named.
        if twice := [path for path in some if some.count(path) > 1]:
            raise Misuse(f"{twice[0]} is named twice.", option=f"--{name.lower()}")
    return by_option


class _OfSeveral(TyperCommand):
    """A command whose options take all values up to the next option: `--a A1 A2 --b B1 B2`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {
            flag for option in self.params if str(option.name).startswith(_SEVERAL) for flag in option.opts
        }
        given: list[str] = []
        option = ""
        for at, arg in enumerate(args):
            if arg == "--":
                given += args[at:]
                break
            if arg.startswith("-") and arg != STANDARD:
                if option and given[-1] == option and not ctx.resilient_parsing:
                    ctx.fail(f"Option {option} requires an argument.")
                flag = arg.partition("=")[0]
                option = flag if flag in several else ""
            elif option and given[-1] != option:
                given.append(option)
            given.append(arg)
        rest: list[str] = super().parse_args(ctx, given)
        return rest


def _options(report: Report) -> dict[str, tuple[Any, Any]]:
    """A report's own options for Typer: name → annotation and default."""
    hints = get_type_hints(report.options, include_extras=True)
    found: dict[str, tuple[Any, Any]] = {}
    for field in fields(report.options):
        kind, option = get_args(hints[field.name])
        assert isinstance(option, Option)
        if option.choices:
            kind = choices(field.name.title(), option.choices)
        flag = f"--{field.name.replace('_', '-')}"
        given = typer.Option(
            flag, help=option.help, metavar=option.metavar or None, parser=_parser(kind, option)
        )
        found[field.name] = (Annotated[kind, given], field.default)
    return found


def _parser(kind: Any, option: Option) -> Callable[[Any], Any] | None:
    """The parser of an option's text, if it needs one."""
    if kind in (int, int | None):
        return whole(int(option.least))
    if kind is float:
        return number(option.least, option.most)
    return _PARSERS.get(option.metavar)


def _time(text: str) -> str:
    """Check a duration, which the report reads. Raises Misuse."""
    read(text, duration_ns, "")
    return text


def _regex(text: str) -> str:
    """Check a regular expression, which the report compiles. Raises Misuse."""
    try:
        re.compile(text)
    except re.error as error:
        raise Misuse(f"{text!r} is not a regular expression: {error}.", "Try a part of the name.") from None
    return text


_PARSERS: dict[str, Callable[[Any], Any]] = {TIME: _time, REGEX: _regex}
"""Name of a value in the help → its parser."""


def _plain(value: object) -> object:
    """The value of an option for the report."""
    return text_of(value) if hasattr(value, "value") else value


def _output(report: Report) -> dict[str, tuple[Any, Any]]:
    """The parameters of a report that writes files."""
    if report.output is None:
        return {}
    what = "Write to this folder."
    if isinstance(report.output, FileOutput):
        kinds = ", ".join(report.output.endings)
        what = f"Write to this file, whose name ends with {kinds}; {TO_STANDARD}"
    named = output_option(f"{what} {AS_RECORDING}", "PATH")
    return {"output": (Annotated[str, named], ""), "force": (Force, False)}


def _run(report: Report, inputs: list[list[str]], options: Any, asked: _Asked) -> None:
    beside = {name: path for name in report.beside if (path := getattr(options, name))}
    if needs := dict.fromkeys([*report.needs, *(one for name in beside for one in report.beside[name])]):
        from tracepipe.reports.frames.libraries import require

        require(report.name, needs)
    every = [*(path for some in inputs for path in some), *beside.values()]
    if every.count(STANDARD) > 1:
        raise Misuse("Standard input can be read only once.")
    if report.name == "report" and paths.is_folder(every[0]):
        _report_ranks(every[0], options, asked)
        return
    if report.output is None:
        _print(report, *_found(report, inputs, options, asked), asked)
        return
    if isinstance(report.output, FolderOutput):
        target = asked.output or default_output(every[0], report.output.ending(options))
        with replacing_folder(target, force=asked.force) as folder:
            facts, result = _found(report, inputs, options, asked)
            for name, write in result.files.items():
                with (folder / name).open("wb") as out:
                    write(out)
    else:
        target = asked.output or default_output(every[0], report.output.endings[0])
        ending = ending_of(target, report.output.endings)
        with replacing(target, force=asked.force, sources=every[:1]) as out:
            facts, result = _found(report, inputs, options, asked)
            result.files[ending](out)
    _print_written(report, facts, result, target, asked)


def _report_ranks(dataset: str, options: Any, asked: _Asked) -> None:
    """Write the page of a job: of many ranks one page about all."""
    from tracepipe.cli.ranks import TOP, reported

    target = asked.output or default_output(dataset.rstrip("/") or dataset, ".html")
    top = options.top if options.top is not None else TOP
    result = reported(dataset, target, top=top, force=asked.force)
    if target == STANDARD:
        return
    if asked.shown.as_json:
        put_json({"report": "ranks", "dataset": dataset, "output": target} | result.lazily())
    say(f"wrote {target}")


def _found(report: Report, paths: list[list[str]], options: Any, asked: _Asked) -> tuple[list[Any], Result]:
    """The facts of the recordings, in order, and the report's result."""
    from tracepipe.api.load import load
    from tracepipe.api.options import ReadOptions

    how = ReadOptions(**asked.how.fields())
    facts: dict[tuple[int, int], Any] = {}
    beside = [name for name in report.beside if getattr(options, name)]
    # The recordings that options name come after the inputs; their format is that of their content.
    paths = [*paths, *([getattr(options, name)] for name in beside)]
    inputs = len(report.inputs)

    def loaded(side: int, at: int) -> Run:
        path = paths[side][at]
        with progress(f"{report.name} {Path(path).name}") as bar:
            run = load(path, how if side < inputs else replace(how, source_format=""), progress=bar)
        facts[side, at] = run.facts
        return run

    def load_of(side: int, at: int) -> Callable[[], Run]:
        load_it = partial(loaded, side, at)
        return cache(load_it) if paths[side][at] == STANDARD else load_it  # standard input is read once

    loads = [[load_of(side, at) for at in range(len(some))] for side, some in enumerate(paths)]
    if report.takes_several:
        result = report.run(*loads, options)
    else:
        runs = [load_it() for (load_it,) in loads]
        others = dict(zip(beside, runs[inputs:], strict=True))
        result = report.run(*runs[:inputs], options, **others)
    return [facts[place] for place in sorted(facts)], result


def _print_written(report: Report, facts: list[Any], result: Result, target: str, asked: _Asked) -> None:
    """Print the notes of a report that wrote a file."""
    if target == STANDARD:
        for note in result.notes:
            say(note)
        return
    _print(report, facts, result, asked, target)
    say(f"wrote {target}")


def _print(report: Report, facts: list[Any], result: Result, asked: _Asked, output: str = "") -> None:
    if asked.shown.as_json:
        from tracepipe.present.writing.rendering import facts_json

        recordings = [facts_json(one) for one in facts]
        for recording, side in zip(recordings, result.sides, strict=False):
            recording["side"] = side
        data = {"report": report.name, "recordings": recordings}
        data |= ({"output": output} if output else {}) | result.lazily()
        put_json(data)
        return
    put_lines(facts, result, asked.shown.full_names)


def app_of(name: str) -> typer.Typer:
    """The command of one report, or those of all if none has the name."""
    app = typer.Typer()
    for report in [REPORTS[name]] if name in REPORTS else REPORTS.values():
        kind = _OfSeveral if report.takes_several else None
        app.command(report.name, cls=kind, rich_help_panel="Reports")(_command(report))
    return app
