"""The commands of the reports: one for each of `REPORTS`, with their common options."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tracepipe.api.options import OUTPUT, ReadOptions
from tracepipe.api.reports import REPORTS, FileOutput, Made, Report, make, with_all_rows
from tracepipe.cli.options import (
    AS_RECORDING,
    RECORDING,
    TO_STANDARD,
    Force,
    Misuse,
    json_option,
    keyword,
    output_option,
    with_options,
)
from tracepipe.options import STANDARD, Option
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import has_colours, is_ascii, put, put_json, say

_SEVERAL = "several_"
"""The prefix of parameters that take all values up to the next option."""
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Shown:
    """How a command prints its tables."""

    as_json: Annotated[bool, json_option("the tables", ", with units in the names of the keys")] = False
    full_names: Annotated[
        bool, Option("Print names in full; lines may become longer than the terminal is wide.", panel=OUTPUT)
    ] = False


def put_report(made: Made, shown: Shown) -> None:
    """Print a report as JSON, or as text as wide and in as many letters as standard output takes."""
    if shown.as_json:
        put_json(made.lazily())
        return
    width, colours = shutil.get_terminal_size().columns, has_colours(sys.stdout)
    for line in made.lines(
        width=width, colours=colours, ascii_only=is_ascii(sys.stdout), full_names=shown.full_names
    ):
        put(line, colours=colours)


def for_programs(options: Any, shown: Shown, context: typer.Context) -> Any:
    """The options of a report: programs, which read JSON, get all rows unless they ask for fewer."""
    is_default = getattr(context.get_parameter_source("top"), "name", "") == "DEFAULT"
    return with_all_rows(options) if shown.as_json and is_default else options


def app_of(name: str) -> typer.Typer:
    """The command of a report."""
    app, report = typer.Typer(), REPORTS[name]
    kind = _OfSeveral if report.takes_several else None
    app.command(name, cls=kind, rich_help_panel="Reports")(_command(report))
    return app


def _command(report: Report) -> Callable[..., int]:
    """The command of a report, whose parameters are its inputs, its options and the common ones."""

    def command(
        options: Any,
        shown: Shown,
        how: ReadOptions,
        context: typer.Context,
        output: str = "",
        force: bool = False,
        **given: Any,
    ) -> int:
        options = for_programs(options, shown, context)
        as_junit = getattr(options, "junit", False)
        if as_junit and shown.as_json:
            raise Misuse("--junit and --json are two forms of the output.", "Give one of them.")
        paths = [given.get(f"input_{at}") for at in range(len(report.inputs))]
        inputs = (
            _sides(report, paths, given, junit=as_junit)
            if report.takes_several
            else [[path] for path in paths if path is not None]
        )
        named = [
            *(path for some in inputs for path in some),
            *(getattr(options, one) for one in report.companions),
        ]
        if named.count(STANDARD) > 1:
            raise Misuse("Standard input can be read only once.")
        made = make(report, inputs, options, how, output=output, force=force, showing=progress)
        if made.output == STANDARD:
            for note in made.result.notes if not made.dataset else ():
                say(note)
            return 0
        if made.result.document:
            for line in made.result.document.splitlines():
                put(line)
        elif shown.as_json or not made.dataset or not made.output:
            put_report(made, shown)
        if made.output:
            say(f"wrote {made.output}")
        return made.result.exit_code

    several = report.takes_several
    parameters = [
        keyword(
            f"input_{at}",
            None if several else _REQUIRED,
            Annotated[str | None if several else str, typer.Argument(help=RECORDING, metavar=name)],
        )
        for at, name in enumerate(report.inputs)
    ]
    for name in report.inputs if several else ():
        option = typer.Option(
            f"--{name.lower()}",
            help=f"The recordings of side {name}, one or more.",
            metavar=f"{name}1 {name}2 …",
        )
        parameters.append(keyword(f"{_SEVERAL}{name}", None, Annotated[list[str] | None, option]))
    parameters.append(keyword("options", _REQUIRED, report.options))
    if report.output is not None:
        what = "Write to this folder."
        if isinstance(report.output, FileOutput):
            kinds = ", ".join(report.output.endings)
            what = f"Write to this file, whose name ends with {kinds}; {TO_STANDARD}"
        parameters.append(
            keyword("output", "", Annotated[str, output_option(f"{what} {AS_RECORDING}", "PATH")])
        )
        parameters.append(keyword("force", False, Force))
    parameters += [keyword("shown", _REQUIRED, Shown), keyword("how", _REQUIRED, ReadOptions)]
    parameters.append(keyword("context", _REQUIRED, typer.Context))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options(command)


def _sides(report: Report, paths: list[str | None], given: dict[str, Any], *, junit: bool) -> list[list[str]]:
    """The recordings of each input, named by arguments or options. Raises Misuse."""
    by_option = [[*given.get(f"{_SEVERAL}{name}", ())] for name in report.inputs]
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
        hint = f"Name all recordings with {options}."
        if junit:
            hint = f"--junit prints the XML: write --junit > {strange[0]}."
        raise Misuse(f"{strange[0]} is of neither side.", hint)
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
