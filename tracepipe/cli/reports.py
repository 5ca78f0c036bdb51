"""The commands of the reports: one for each of `REPORTS`, with what they all can."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from tracepipe.cli.input_options import AssumeOffset, Force, SourceOption, Strict, UndatedOption, reading
from tracepipe.errors import OutputError
from tracepipe.readers import UNDATED
from tracepipe.recording.files import STANDARD, default_output, replacing, replacing_folder
from tracepipe.reports import REPORTS
from tracepipe.reports.report import FileOutput, FolderOutput, Option, Report, Result
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import put, put_json, say

_INT_MAX = (1 << 31) - 1
"""The largest number that an option may be: columns of smaller integers are compared with it."""
_INPUT = "Recording: a path, or - for standard input."
_COMMON: dict[str, tuple[Any, Any]] = {
    "as_json": (Annotated[bool, typer.Option("--json", help="For programs.")], False),
    "full_names": (
        Annotated[bool, typer.Option("--full-names", help="Cut no name; lines get as long as it takes.")],
        False,
    ),
    "source": (SourceOption, None),
    "strict": (Strict, False),
    "assume_offset": (AssumeOffset, None),
    "undated": (UndatedOption, UNDATED[0]),
}
_FORCE = (Force, False)


def _command(report: Report) -> Callable[..., None]:
    """The command of a report, whose parameters are its inputs, its options and the common ones."""

    def command(**given: Any) -> None:
        paths = [given.pop(f"input_{at}") for at in range(len(report.inputs))]
        common = {name: given.pop(name) for name in (*_COMMON, *_output(report))}
        _run(report, paths, report.options(**{k: _plain(k, v) for k, v in given.items()}), common)

    parameters: dict[str, tuple[Any, Any]] = {
        f"input_{at}": (Annotated[str, typer.Argument(help=_INPUT, metavar=name)], ...)
        for at, name in enumerate(report.inputs)
    }
    parameters |= _options(report) | _output(report) | _COMMON
    command.__annotations__ = {name: kind for name, (kind, _) in parameters.items()} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is ... else default,
                annotation=kind,
            )
            for name, (kind, default) in parameters.items()
        ]
    )
    return command


def _options(report: Report) -> dict[str, tuple[Any, Any]]:
    """A report's own options as Typer takes them: name → annotation and default."""
    hints = get_type_hints(report.options, include_extras=True)
    found: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(report.options):
        kind, option = get_args(hints[field.name])
        assert isinstance(option, Option)
        if option.choices:
            kind = choices(field.name.title(), option.choices)
        flag = f"--{field.name.replace('_', '-')}"
        given = typer.Option(flag, help=option.help, metavar=option.metavar or None)
        found[field.name] = (Annotated[kind, given], field.default)
    return found


def _plain(name: str, value: Any) -> Any:
    """The value of an option as the report takes it. Raises BadParameter."""
    if isinstance(value, int) and value > _INT_MAX:
        raise typer.BadParameter(f"{value} is more than {_INT_MAX}", param_hint=f"--{name}")
    return text_of(value) if hasattr(value, "value") else value


def _output(report: Report) -> dict[str, tuple[Any, Any]]:
    """The parameters of a report that writes files."""
    if report.output is None:
        return {}
    what = "A folder."
    if isinstance(report.output, FileOutput):
        kinds = ", ".join(report.output.endings)
        what = f"A file ending with {kinds}; - is standard output."
    named = typer.Option("--output", "-o", help=f"{what} Default: named after the recording.", metavar="PATH")
    return {"output": (Annotated[str, named], ""), "force": _FORCE}


def _run(report: Report, paths: list[str], options: Any, common: Mapping[str, Any]) -> None:
    if paths.count(STANDARD) > 1:
        raise typer.BadParameter("standard input can be read once only")
    if report.output is None:
        _print(report, *_found(report, paths, options, common), common)
        return
    if isinstance(report.output, FolderOutput):
        target = common["output"] or default_output(paths[0], report.output.ending(options))
        with replacing_folder(target, force=common["force"]) as folder:
            runs, result = _found(report, paths, options, common)
            for name, write in result.files.items():
                with (folder / name).open("wb") as out:
                    write(out)
    else:
        target = common["output"] or default_output(paths[0], report.output.endings[0])
        ending = _ending(report.output, target)
        with replacing(target, force=common["force"], sources=paths[:1]) as out:
            runs, result = _found(report, paths, options, common)
            result.files[ending](out)
    _tell(report, runs, result, target, common)


def _ending(output: FileOutput, target: str) -> str:
    """Of which kind a file is to be. Raises OutputError."""
    ending = Path(target).suffix.lower()
    if target == STANDARD:
        return output.endings[0]
    if ending not in output.endings:
        raise OutputError(
            f"{target} does not say what it is to be", f"name a file ending with {', '.join(output.endings)}"
        )
    return ending


def _found(
    report: Report, paths: list[str], options: Any, common: Mapping[str, Any]
) -> tuple[list[Any], Result]:
    """The recordings of the paths, and what the report says of them."""
    from tracepipe.api.load import load

    how = reading(common["source"], common["strict"], common["assume_offset"], common["undated"])
    runs = []
    for path in paths:
        with progress(f"{report.name} {Path(path).name}") as bar:
            runs.append(load(path, progress=bar, **how))
    return runs, report.run(*runs, options)


def _tell(report: Report, runs: list[Any], result: Result, target: str, common: Mapping[str, Any]) -> None:
    """What a report that wrote a file says beside it."""
    if target == STANDARD:
        for note in result.notes:
            say(note)
        return
    _print(report, runs, result, common, target)
    say(f"wrote {target}")


def _print(
    report: Report, runs: list[Any], result: Result, common: Mapping[str, Any], output: str = ""
) -> None:
    if common["as_json"]:
        from tracepipe.reports.writing.facts_text import as_json as facts_json

        data = {"report": report.name, "recordings": [facts_json(run.facts) for run in runs]}
        data |= ({"output": output} if output else {}) | result.lazily()
        put_json(data)
        return
    from tracepipe.reports.writing.rendering import report_lines

    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    width = shutil.get_terminal_size().columns
    colours = sys.stdout.isatty()
    how = {"colours": colours, "ascii_only": plain, "full_names": common["full_names"]}
    for line in report_lines(runs, result, width=width, **how):
        put(line, colours=colours)


def app_of(name: str) -> typer.Typer:
    """The command of one report, or those of all where none is called so."""
    app = typer.Typer()
    for report in [REPORTS[name]] if name in REPORTS else REPORTS.values():
        _add(app, report.name, _command(report))
    return app


def listing() -> typer.Typer:
    """Commands that can be listed, and do nothing: what the reports are made of need not be loaded."""
    app = typer.Typer()
    for name in REPORTS:
        _add(app, name, lambda: None)
    return app


def _add(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    app.command(name, help=REPORTS.about(name), rich_help_panel="Reports")(command)
