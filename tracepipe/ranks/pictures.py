"""Pictures of a job: what each rank spent its steps on over time, and how long it waited in which
collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from numpy.typing import NDArray

from tracepipe.libraries import matplotlib, np, pl, ticker
from tracepipe.present.figures.panel import Panel, heat, unit_of
from tracepipe.ranks.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS_MAX: Final = 256
_COLUMNS_MAX: Final = 24
_TIMES: Final = {
    "compute_ns": "compute",
    "exposed_ns": "communication without compute: transfers, and waiting for other ranks",
    "idle_ns": "idle GPU",
}
_HOW: Final = "Each cell is the mean of one rank in some steps."


def by_time(job: Job) -> list[Panel]:
    """A map of ranks and steps for each kind of time."""
    parts = job.parts
    ranks, rank = np.unique(parts["rank"].to_numpy(), return_inverse=True)
    part = parts["part"].to_numpy()
    panels = []
    for name, title in _TIMES.items():
        cells = np.full((len(ranks), int(part.max()) + 1), np.nan)
        cells[rank, part] = parts[name].to_numpy() / parts["steps"].to_numpy().clip(1)
        panels.append(
            _panel(f"Rank × time: {title}", ranks, cells, (job.steps["step"][0], job.steps["step"][-1]))
        )
    return panels


def by_collective(job: Job) -> list[Panel]:
    """A map of ranks and kinds of collectives: the mean time that a rank waits in one."""
    size = pl.col("group_size").cast(pl.String).fill_null("?")
    noun = pl.when(pl.col("group_size") == 1).then(pl.lit("rank")).otherwise(pl.lit("ranks"))
    of = job.members.with_columns(kind=pl.format("{}\n{} {}", "operation", size, noun))
    of = of.group_by("rank", "kind").agg(pl.col("waited_ns", "collectives").sum())
    kinds = of.group_by("kind").agg(pl.col("waited_ns").sum())
    names = kinds.sort("waited_ns", "kind", descending=[True, False])["kind"].head(_COLUMNS_MAX).to_list()
    if not names:
        return [Panel("Rank × collective: no collective was recorded by two ranks")]
    of = of.filter(pl.col("kind").is_in(names)).sort("rank")
    ranks, rank = np.unique(of["rank"].to_numpy(), return_inverse=True)
    column = np.array([names.index(one) for one in of["kind"]])
    cells = np.full((len(ranks), len(names)), np.nan)
    cells[rank, column] = of["waited_ns"].to_numpy() / of["collectives"].to_numpy().clip(1)
    title = "Rank × collective: how long a rank waits for the last one"
    return [_panel(title, ranks, cells, names)]


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
