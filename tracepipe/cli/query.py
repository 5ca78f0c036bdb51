"""The command that queries a recording or a dataset in SQL."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tracepipe import paths
from tracepipe.api.options import ConvertOptions
from tracepipe.cli.groups import with_groups
from tracepipe.cli.input_options import Reading
from tracepipe.cli.output_options import OUTPUT, TO_STANDARD, Force, json_option, output_option
from tracepipe.cli.values import Misuse
from tracepipe.errors import InputError
from tracepipe.recording.files import STANDARD, opened_again
from tracepipe.recording.outputs import replacing
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import say
from tracepipe.units import counted

app = typer.Typer()

Form = choices("Form", ("table", "json", "csv", "parquet", "arrow"))
# CSV has unescaped names, which a terminal may obey.
_FOR_PEOPLE = ("table", "json")
_Opener = Callable[[], AbstractContextManager[BinaryIO]]
# Traces that need no conversion.
_TRACES = (".pftrace", ".perfetto-trace", ".zip")


@app.command()
@with_groups
def query(
    *,
    file: Annotated[
        str,
        typer.Argument(
            help="A recording, a Perfetto trace, an archive or a dataset: a path, or - for standard input.",
            metavar="FILE",
        ),
    ],
    sql: Annotated[
        str, typer.Argument(help="SQL statements; the rows of the last one are shown.", metavar="SQL")
    ] = "",
    sql_file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help="Read the statements from this file.")
    ] = "",
    trace_processor: Annotated[
        str,
        typer.Option(
            "--trace-processor",
            metavar="PATH",
            help="Use this trace_processor_shell. Default: the one in PATH, or else the one that "
            "tracepipe[query] installs.",
        ),
    ] = "",
    as_json: Annotated[bool, json_option("the rows", ": short for --format json")] = False,
    form: Annotated[
        Form,  # type: ignore[valid-type]
        typer.Option("--format", help="Write the rows in this format.", rich_help_panel=OUTPUT),
    ] = "table",
    output: Annotated[str, output_option(f"Write the rows to this file; {TO_STANDARD}")] = STANDARD,
    force: Force = False,
    how: Reading,
) -> None:
    """Query a recording in SQL, with Perfetto's tables and functions, or a dataset."""
    from tracepipe.sql.processor import QueryError

    kind, asked = "json" if as_json else text_of(form), _statements(sql, sql_file)
    options = ConvertOptions(**how.fields())
    to = partial(replacing, output, force=force, sources=[file], on_terminal=kind in _FOR_PEOPLE)
    try:
        if paths.is_folder(file):
            if trace_processor or options != ConvertOptions():
                raise Misuse("A dataset takes no options for recordings.", "Leave them out.")
            count = _ask_dataset(file, asked, kind, to)
        else:
            count = _ask_recording(file, asked, kind, to, (trace_processor, options))
    except QueryError as error:
        for line in error.message.splitlines():
            say(line)
        raise typer.Exit(1) from None
    if output != STANDARD:
        say(f"wrote {output}: {counted(count, 'row|rows')}")


def _ask_dataset(folder: str, sql: str, kind: str, to: _Opener) -> int:
    from tracepipe.sql.answers import write_rows
    from tracepipe.sql.datasets import asked

    with asked(folder, sql) as rows, to() as out:
        return write_rows(rows, kind, out)


def _ask_recording(file: str, sql: str, kind: str, to: _Opener, how: tuple[str, ConvertOptions]) -> int:
    from tracepipe.sql.answers import write_answer
    from tracepipe.sql.processor import ask, find_shell

    trace_processor, options = how
    shell = find_shell(trace_processor)
    if file.endswith(_TRACES):
        with opened_again(file) as trace:
            answer = ask(Path(trace), sql, shell)
    else:
        with tempfile.TemporaryDirectory(prefix="tracepipe-") as place:
            answer = ask(_converted(file, Path(place), options), sql, shell)
    with to() as out:
        write_answer(answer, kind, out)
    return len(answer.rows)


def _statements(sql: str, sql_file: str) -> str:
    """The statements of the argument or the file. Raises Misuse, InputError."""
    if bool(sql) == bool(sql_file):
        both = "given twice" if sql else "missing"
        raise Misuse(f"The SQL is {both}.", "Give it as an argument, or a file of it with -f.")
    if sql:
        return sql
    try:
        return Path(sql_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InputError(f"cannot be read: {why}", "Check the path.", path=sql_file) from error


def _converted(file: str, folder: Path, options: ConvertOptions) -> Path:
    """Convert the recording to a Perfetto trace in a folder, and print its losses and problems."""
    from tracepipe.api.convert import convert
    from tracepipe.recording.account import account_lines

    trace = folder / "run.pftrace"
    with progress(f"query {Path(file).name}") as bar:
        account = convert(file, trace, options=options, progress=bar)
    for line in list(account_lines(account))[1:]:
        say(line)
    return trace
