"""The commands on datasets, which have the recordings of all ranks of a job, and queries, of agents too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracepipe import paths
from tracepipe.api.dataset import QueryOptions, build_dataset
from tracepipe.api.dataset import query as run_query
from tracepipe.api.options import ReadOptions
from tracepipe.api.reports import JobOptions, make_of_job
from tracepipe.cli.options import TO_STANDARD, Force, Misuse, json_option, output_option, with_options
from tracepipe.cli.reports import Shown, for_programs, put_report
from tracepipe.errors import InputError, QueryError
from tracepipe.options import STANDARD, Option
from tracepipe.printable import json_schema
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import put_json, say
from tracepipe.units import agree, counted, duration_text

if TYPE_CHECKING:
    from tracepipe.api.dataset import Built

app = typer.Typer()
dataset = typer.Typer(no_args_is_help=True)
app.add_typer(dataset, name="dataset")

# Lines about clocks and ranks: all are in the folder.
_SHOWN_MAX = 10


@app.command()
@with_options
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
        str, Option("Read the statements from this file.", "FILE", flags=("--file", "-f"))
    ] = "",
    as_json: Annotated[bool, json_option("the rows", ": short for --format json")] = False,
    output: Annotated[str, output_option(f"Write the rows to this file; {TO_STANDARD}")] = STANDARD,
    force: Force = False,
    options: QueryOptions,
) -> None:
    """Query in SQL."""
    options = replace(options, format="json") if as_json else options
    if bool(sql) == bool(sql_file):
        both = "given twice" if sql else "missing"
        raise Misuse(f"The SQL is {both}.", "Give it as an argument, or a file of it with -f.")
    try:
        statements = sql or Path(sql_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InputError(f"cannot be read: {why}", "Check the path.", path=sql_file) from error
    if paths.is_folder(file) and options != QueryOptions(format=options.format):
        raise Misuse("A dataset takes no options for recordings.", "Leave them out.")
    try:
        count = run_query(file, statements, output, options, force=force, notify=say, showing=progress)
    except QueryError as error:
        for line in f"{error.message}\n{error.hint}".splitlines():
            say(line)
        raise typer.Exit(1) from None
    if output != STANDARD:
        say(f"wrote {output}: {counted(count, 'row|rows')}")


@app.command()
@with_options
def ranks(
    *,
    path: Annotated[
        str,
        typer.Argument(
            help="A dataset, which `dataset build` made, a folder of recordings, or a recording.",
            metavar="JOB",
        ),
    ],
    options: JobOptions,
    output: Annotated[
        str,
        output_option("Also write a page with tables and pictures (.html), or the pictures (.png, .svg)."),
    ] = "",
    force: Force = False,
    shown: Shown,
    context: typer.Context,
) -> None:
    """Find the slow ranks of a job."""
    options = for_programs(options, shown, context)
    if options.master and options.engine != "spark":
        raise Misuse("--master is the address of a Spark cluster: add --engine spark.")
    made = make_of_job(path, output, options, force=force, showing=progress)
    if output == STANDARD:
        return
    put_report(replace(made, output=""), shown)
    if output:
        say(f"wrote {output}")


@app.command()
def mcp(
    folders: Annotated[
        list[str], typer.Argument(help="Folders with recordings and datasets.", metavar="FOLDER...")
    ],
) -> None:
    """Answer agents."""
    from tracepipe.api.mcp import serve

    serve(folders)


@dataset.command()
@with_options
def build(
    *,
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Recordings, or folders of recordings: paths or URLs. Each is of one rank, which the "
            "recording or the name of its file states.",
            metavar="INPUT...",
        ),
    ],
    jobs: Annotated[
        int | None,
        Option(
            "Read N recordings at a time. Default: one per processor.", "N", least=1, flags=("--jobs", "-j")
        ),
    ] = None,
    output: Annotated[
        str, output_option("The dataset: a new folder, or one to which ranks are added.", "FOLDER")
    ],
    as_json: Annotated[bool, json_option("what was built")] = False,
    options: ReadOptions,
) -> None:
    """Add the recordings of ranks to a dataset, and put the clocks of their hosts on one.

    A recording that is in the dataset already and has not changed is not read again.
    """
    with progress("dataset build") as bar:
        built = build_dataset(inputs, output, options, jobs=jobs, progress=bar)
    if as_json:
        put_json(built_json(output, built))
    else:
        for line in _lines(output, built):
            say(line)
    if built.left_out:
        raise typer.Exit(1)


def _lines(output: str, built: Built) -> list[str]:
    lines = [f"left out: {path}: {reason}" for path, reason in built.left_out.items()]
    lost = sum(written.rank.lost for written in built.written)
    for written in built.written[:_SHOWN_MAX]:
        lines += [f"rank {written.rank.rank}: {remark}" for remark in written.remarks]
    if lost:
        of = counted(len(built.written), "rank|ranks")
        happened = agree(lost, "happened and is|are not recorded")
        lines.append(f"lost: {lost:,} {agree(lost, 'event|events')} of {of} {happened}")
    lines += _clock_lines(built)
    counts = f"{len(built.written)} written, {built.unchanged} unchanged, {len(built.left_out)} left out"
    return [*lines, f"wrote {output}: {counted(built.ranks, 'rank|ranks')} ({counts})"]


def _clock_lines(built: Built) -> list[str]:
    found = built.aligned
    count = len(found.placements) + len(found.refused)
    if count < 2:
        return []
    bounds_ns = sorted(one.bound_ns for one in found.placements.values())
    lines = [
        f"clocks: {len(found.placements)} of {count} are placed on {found.reference}, within "
        f"{duration_text(bounds_ns[-1])} (median {duration_text(bounds_ns[len(bounds_ns) // 2])})"
    ]
    through = sum(not one.shared for clock, one in found.placements.items() if clock != found.reference)
    if through:
        lines.append(
            f"{through} of them are placed by the header or footer of a capture on the same host; at other "
            "times CLOCK_REALTIME may have been slewed, by up to 500 ppm"
        )
    refused = [f"not placed: {clock}: {reason}" for clock, reason in found.refused.items()]
    more = []
    if len(refused) > _SHOWN_MAX:
        more = [f"… and {counted(len(refused) - _SHOWN_MAX, 'more clock|clocks')}"]
    return [*lines, *refused[:_SHOWN_MAX], *more]


def built_json(output: str, built: Built) -> dict[str, Any]:
    """What `dataset build --json` prints."""
    return {
        "schema": json_schema("dataset-build"),
        "dataset": output,
        "ranks": built.ranks,
        "written": [
            {"host": rank.host, "rank": rank.rank, "kernels": rank.kernels,
             "collectives": rank.collectives, "lost": rank.lost, "remarks": remarks}
            for rank, remarks in built.written
        ],
        "unchanged": built.unchanged,
        "left_out": built.left_out,
        "clocks": {
            "reference": built.aligned.reference or None,
            "bound_ns": {clock: one.bound_ns for clock, one in built.aligned.placements.items()},
            "refused": built.aligned.refused,
        },
    }  # fmt: skip
