"""The command that compares the ranks of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from tracepipe.cli.report_text import put_lines
from tracepipe.cli.values import Misuse
from tracepipe.terminal.messages import choices, text_of
from tracepipe.terminal.output import put_json

app = typer.Typer()

Engine = choices("Engine", ("duckdb", "spark"))
_OUTPUT = "Output"


@app.command()
def ranks(
    dataset: Annotated[
        str, typer.Argument(help="A dataset: the folder that `dataset build` made.", metavar="DATASET")
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            metavar="N",
            help="Show the critical path of step N. Default: the step of median length.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, metavar="N", help="List at most N rows in each table; 0: all.")
    ] = 10,
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
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the tables as JSON, with units in the names of the keys.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    full_names: Annotated[
        bool,
        typer.Option(
            "--full-names",
            help="Print names in full; lines may become longer than the terminal is wide.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> None:
    """Find the slow ranks of a job: who is slow, at what, and what it costs the others.

    Also shows when each rank computes, communicates, waits and idles, who came last to which collectives, and
    the critical path of a step across ranks.
    """
    from tracepipe.dataset.places import Dataset
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job
    from tracepipe.ranks.report import report

    if master and text_of(engine) != "spark":
        raise Misuse("--master is the address of a Spark cluster: add --engine spark.")
    found = Dataset.opened(dataset)
    with opened(text_of(engine), found, master) as evaluating:
        result = report(Job(evaluating, found), top, step)
    if as_json:
        put_json({"report": "ranks", "dataset": dataset} | result.lazily())
    else:
        put_lines([], result, full_names)
