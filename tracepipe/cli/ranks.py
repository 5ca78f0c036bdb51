"""The command that compares the ranks of a job."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from tracepipe.cli.groups import with_groups
from tracepipe.cli.output_options import Force, Shown, output_option
from tracepipe.cli.report_text import ending_of, put_lines
from tracepipe.cli.values import Misuse, whole
from tracepipe.recording.files import STANDARD
from tracepipe.recording.outputs import replacing
from tracepipe.terminal.messages import choices, text_of
from tracepipe.terminal.output import put_json, say

if TYPE_CHECKING:
    from tracepipe.reports.report import Result

app = typer.Typer()
TOP = 10

Engine = choices("Engine", ("duckdb", "spark"))


@app.command()
@with_groups
def ranks(
    *,
    dataset: Annotated[
        str, typer.Argument(help="A dataset: the folder that `dataset build` made.", metavar="DATASET")
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            parser=whole(),
            metavar="N",
            help="Show the critical path of step N. Default: the step of median length.",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option("--top", parser=whole(), metavar="N", help="List at most N rows in each table; 0: all."),
    ] = TOP,
    engine: Annotated[
        Engine,  # type: ignore[valid-type]
        typer.Option("--engine", help="Evaluate with DuckDB in this process, or with Spark."),
    ] = "duckdb",
    master: Annotated[
        str,
        typer.Option(
            "--master",
            metavar="URL",
            help="The Spark cluster: spark://HOST:7077, yarn, … Default: Spark in a process on this machine.",
        ),
    ] = "",
    output: Annotated[
        str,
        output_option("Also write a page with tables and pictures (.html), or the pictures (.png, .svg)."),
    ] = "",
    force: Force = False,
    shown: Shown,
) -> None:
    """Find the slow ranks of a job: who is slow, at what, and what it costs the others.

    Also shows when each rank computes, communicates, waits and idles, who came last to which collectives, and
    the critical path of a step across ranks.
    """
    if master and text_of(engine) != "spark":
        raise Misuse("--master is the address of a Spark cluster: add --engine spark.")
    result = reported(dataset, output, top=top, step=step, engine=text_of(engine), master=master, force=force)
    if output == STANDARD:
        return
    if shown.as_json:
        put_json({"report": "ranks", "dataset": dataset} | result.lazily())
    else:
        put_lines([], result, shown.full_names)
    if output:
        say(f"wrote {output}")


def reported(
    dataset: str,
    output: str,
    *,
    top: int,
    step: int | None = None,
    engine: str = "duckdb",
    master: str = "",
    force: bool,
) -> Result:
    """The report on a dataset, whose page is written to `output` unless that is empty."""
    from tracepipe.dataset.places import Dataset
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job
    from tracepipe.ranks.report import report

    found, ending = Dataset.opened(dataset), _ending(output)
    with ExitStack() as kept:
        # Before all else: a file that is there already is known at once.
        out = kept.enter_context(replacing(output, force=force)) if ending else None
        job = Job(kept.enter_context(opened(engine, found, master)), found)
        result = report(job, top, step)
        if out is not None:
            from tracepipe.ranks.page import write

            write(job, result, ending, out)
    return result


def _ending(output: str) -> str:
    """The ending of the file to write, empty where none is. Raises LibraryMissing, OutputError."""
    if not output:
        return ""
    from tracepipe.ranks.page import ENDINGS, NEEDS
    from tracepipe.reports.frames.libraries import require

    require("ranks -o", NEEDS)
    return ending_of(output, ENDINGS)
