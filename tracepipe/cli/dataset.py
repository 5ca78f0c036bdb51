"""The commands on datasets: the recordings of all ranks of a job in one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracepipe.cli.groups import with_groups
from tracepipe.cli.input_options import Reading
from tracepipe.cli.output_options import json_option, output_option
from tracepipe.cli.values import whole
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import put_json, say
from tracepipe.units import agree, counted, duration_text

if TYPE_CHECKING:
    from tracepipe.dataset.build import Built

app = typer.Typer()
dataset = typer.Typer(no_args_is_help=True)
app.add_typer(
    dataset,
    name="dataset",
    help="Gather the recordings of all ranks of a job in one folder of Parquet files.",
)

# Lines about clocks and ranks: all are in the folder.
_SHOWN_MAX = 10


@dataset.command()
@with_groups
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
        typer.Option(
            "--jobs",
            "-j",
            parser=whole(1),
            metavar="N",
            help="Read N recordings at a time. Default: one per processor.",
        ),
    ] = None,
    output: Annotated[
        str, output_option("The dataset: a new folder, or one to which ranks are added.", "FOLDER")
    ],
    as_json: Annotated[bool, json_option("what was built")] = False,
    how: Reading,
) -> None:
    """Add the recordings of ranks to a dataset, and put the clocks of their hosts on one.

    A recording that is in the dataset already and has not changed is not read again.
    """
    from tracepipe.dataset.build import build as build_dataset

    given: dict[str, Any] = {**how.fields()}
    given["assumed"] = given.pop("assume_offset")
    with progress("dataset build") as bar:
        built = build_dataset(inputs, output, jobs=jobs, options=given, progress=bar)
    if as_json:
        put_json(_as_json(output, built))
    else:
        for line in _lines(output, built):
            say(line)
    if built.left_out:
        raise typer.Exit(1)


def _lines(output: str, built: Built) -> list[str]:
    lines = [f"left out: {path}: {reason}" for path, reason in built.left_out.items()]
    lost = sum(written.lost for written in built.written)
    for written in built.written[:_SHOWN_MAX]:
        lines += [f"rank {written.identity.rank}: {remark}" for remark in written.remarks]
    if lost:
        of = counted(len(built.written), "rank|ranks")
        happened = agree(lost, "happened and is|are not recorded")
        lines.append(f"lost: {lost:,} {agree(lost, 'event|events')} of {of} {happened}")
    lines += _clock_lines(built)
    counts = f"{len(built.written)} written, {built.unchanged} unchanged, {len(built.left_out)} left out"
    return [*lines, f"wrote {output}: {counted(built.ranks, 'rank|ranks')} ({counts})"]


def _clock_lines(built: Built) -> list[str]:
    assert built.aligned is not None  # of a build that is done
    clocks, found = built.aligned.clocks, built.aligned.alignment
    if len(clocks) < 2:
        return []
    bounds_ns = sorted(one.bound_ns for one in found.placements.values())
    lines = [
        f"clocks: {len(found.placements)} of {len(clocks)} are placed on {clocks[found.reference]}, within "
        f"{duration_text(bounds_ns[-1])} (median {duration_text(bounds_ns[len(bounds_ns) // 2])})"
    ]
    through = sum(not one.shared for number, one in found.placements.items() if number != found.reference)
    if through:
        lines.append(
            f"{through} of them are placed by the header or footer of a capture on the same host; at other "
            "times CLOCK_REALTIME may have been slewed, by up to 500 ppm"
        )
    refused = [f"not placed: {clocks[number]}: {reason}" for number, reason in found.refused.items()]
    more = []
    if len(refused) > _SHOWN_MAX:
        more = [f"… and {counted(len(refused) - _SHOWN_MAX, 'more clock|clocks')}"]
    return [*lines, *refused[:_SHOWN_MAX], *more]


def _as_json(output: str, built: Built) -> dict[str, Any]:
    assert built.aligned is not None  # of a build that is done
    clocks, found = built.aligned.clocks, built.aligned.alignment
    return {
        "dataset": output,
        "ranks": built.ranks,
        "written": [
            {"host": one.identity.host, "rank": one.identity.rank, "kernels": one.kernels,
             "collectives": one.collectives, "lost": one.lost, "remarks": list(one.remarks)}
            for one in built.written
        ],
        "unchanged": built.unchanged,
        "left_out": built.left_out,
        "clocks": {
            "reference": clocks[found.reference] if clocks else None,
            "bound_ns": {clocks[number]: one.bound_ns for number, one in found.placements.items()},
            "refused": {clocks[number]: reason for number, reason in found.refused.items()},
        },
    }  # fmt: skip
