"""The page of a job: its tables and pictures as one HTML file, or the pictures alone.

The pictures show what each rank spent its steps on over time, and how long it waited in which collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from numpy.typing import NDArray

from tracepipe.libraries import matplotlib, np, ticker
from tracepipe.present.figures.panel import Panel, heat, unit_of
from tracepipe.present.figures.picture import write_picture
from tracepipe.present.page.html_page import About, FigureGroup, Section, write_page
from tracepipe.ranks import queries
from tracepipe.ranks.engine import rows
from tracepipe.ranks.job import Job
from tracepipe.reports.report import Result, Table
from tracepipe.units import counted, duration_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS: Final = (".html", ".png", ".svg")
NEEDS: Final = ("jinja2", "matplotlib")
_LOST: Final = ("lost", "not in the dataset")
_ROWS_MAX: Final = 256
_COLUMNS_MAX: Final = 24
_TIMES: Final = {
    "compute_ns": "compute",
    "exposed_ns": "communication without compute: transfers, and waiting for other ranks",
    "idle_ns": "idle GPU",
}
_HOW: Final = "Each cell is the mean of one rank in some steps."


def write(job: Job, result: Result, ending: str, out: BinaryIO) -> None:
    """Write the page of a job, or its pictures, to a stream.

    `result` is the report, and `ending` one of ENDINGS.
    """
    groups = [
        FigureGroup("time", "Ranks over time", _by_time(job)),
        FigureGroup("collectives", "Ranks and collectives", _by_collective(job)),
    ]
    if ending == ".html":
        sections = [
            Section(part.name, part.title, Result("", [replace(part, title="")]))
            for part in result.parts
            if isinstance(part, Table)
        ]
        write_page(_about(job, result), "Ranks", [*sections, *groups], out)
    else:
        write_picture([panel for group in groups for panel in group.panels], ending[1:], out)


def _about(job: Job, result: Result) -> About:
    bounds = [one.bound_ns for one in job.aligned.placements.values()]
    facts = [
        ("dataset", str(job.dataset.folder)),
        ("ranks", f"{len(job.hosts)} of {counted(len(set(job.hosts.values())), 'host|hosts')}"),
        ("steps", str(len(job.steps["step"]))),
    ]
    limits = [{"kind": "lost" if note.startswith(_LOST) else "note", "text": note} for note in result.notes]
    if len(bounds) > 1:
        within = duration_text(max(bounds))
        count = len(bounds) + len(job.aligned.refused)
        text = f"{len(bounds)} of {count} clocks are on a common one, within {within}"
        limits.append({"kind": "clock", "text": text})
    return About(Path(job.dataset.folder).name, facts, limits)


def _by_time(job: Job) -> list[Panel]:
    """A map of ranks and steps for each kind of time."""
    steps = job.steps["step"].tolist()
    parts = job.engine.columns(queries.by_part(steps[0], steps[-1], _TIMES))
    ranks, rank = np.unique(parts["rank"], return_inverse=True)
    panels = []
    for name, title in _TIMES.items():
        cells = np.full((len(ranks), int(parts["part"].max()) + 1), np.nan)
        cells[rank, parts["part"]] = parts[name] / parts["steps"]
        panels.append(_panel(f"Rank × time: {title}", ranks, cells, (steps[0], steps[-1])))
    return panels


def _by_collective(job: Job) -> list[Panel]:
    """A map of ranks and kinds of collectives: the mean time that a rank waits in one."""
    waited_ns, counts, of_kind = Counter[tuple[int, str]](), Counter[tuple[int, str]](), Counter[str]()
    names = ("rank", "operation", "group_size", "waited_ns", "collectives")
    for number, operation, size, ns, count in rows(job.members, *names):
        kind = f"{operation}\n{size} {'rank' if size == 1 else 'ranks'}"
        waited_ns[number, kind] += ns
        counts[number, kind] += count
        of_kind[kind] += ns
    kinds = sorted(of_kind, key=lambda kind: (-of_kind[kind], kind))[:_COLUMNS_MAX]
    if not kinds:
        return [Panel("Rank × collective: no collective was recorded by two ranks")]
    drawn = [key for key in waited_ns if key[1] in kinds]
    ranks = np.unique([number for number, _ in drawn])
    cells = np.full((len(ranks), len(kinds)), np.nan)
    for number, kind in drawn:
        place = int(np.searchsorted(ranks, number)), kinds.index(kind)
        cells[place] = waited_ns[number, kind] / counts[number, kind]
    return [_panel("Rank × collective: how long a rank waits for the last one", ranks, cells, kinds)]


def _panel(
    title: str, ranks: NDArray[np.int64], cells: NDArray[np.float64], across: Sequence[str] | tuple[int, int]
) -> Panel:
    rows = -(-len(ranks) // _ROWS_MAX)
    how = _HOW
    if rows > 1:
        cells = farthest(cells, rows)
        how += f" Of {rows} ranks that share a row, the one that differs most from the others is drawn."
    height_in = 0.9 + min(max(0.08 * len(cells), 1.0), 4.5)
    return Panel(title, how, height_in, partial(_draw, ranks[::rows], cells, across))


def farthest(cells: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """For each `rows` rows and each column, the value farthest from that column's median; NaN if there is
    none.
    """
    median = np.nanmedian(cells, axis=0)
    padded = np.full((-(-len(cells) // rows) * rows, cells.shape[1]), np.nan)
    padded[: len(cells)] = cells
    blocks = padded.reshape(-1, rows, cells.shape[1])
    away = np.nan_to_num(np.abs(blocks - median), nan=-1)
    found: NDArray[np.float64] = np.take_along_axis(blocks, away.argmax(1)[:, None, :], 1)[:, 0]
    return found


def _draw(
    ranks: NDArray[np.int64],
    cells: NDArray[np.float64],
    across: Sequence[str] | tuple[int, int],
    figure: Figure,
) -> None:
    size_ns, unit = unit_of(float(np.nanmax(cells, initial=0)))
    axes = figure.subplots()
    top = float(np.nanmax(cells, initial=0)) / size_ns or 1
    colours = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, top), heat())
    first, last = (across[0], across[-1]) if isinstance(across[0], int) else (0, len(across) - 1)
    axes.imshow(
        colours.to_rgba(np.ma.masked_invalid(cells / size_ns), bytes=True),
        aspect="auto",
        interpolation="none",
        extent=(float(first) - 0.5, float(last) + 0.5, len(cells) - 0.5, -0.5),
    )
    step = max(1, len(ranks) // 12)
    axes.set_yticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.set_ylabel("rank")
    if isinstance(across[0], int):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(12, integer=True))
    else:
        axes.set_xticks(range(len(across)), list(map(str, across)))
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(colours, ax=axes, pad=0.015, fraction=0.03, aspect=30)
    bar.set_label(f"time ({unit})")
    bar.outline.set_visible(False)
