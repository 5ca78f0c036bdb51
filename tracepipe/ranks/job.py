"""What is known of a job as a whole: small tables, whichever engine made them of the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from tracepipe.dataset.clocks_table import ALIGNMENT
from tracepipe.dataset.collectives import SCHEMA
from tracepipe.dataset.meetings import Line
from tracepipe.dataset.places import RANKS, Dataset
from tracepipe.errors import InputError
from tracepipe.libraries import pl
from tracepipe.ranks import queries
from tracepipe.ranks.behaviour import behaviours
from tracepipe.ranks.causes import causes
from tracepipe.ranks.engine import Engine
from tracepipe.ranks.path import Section, critical_path
from tracepipe.ranks.stragglers import Straggler, slow_links, stragglers

if TYPE_CHECKING:
    from ibis.expr.types import Table

PATH_MAX: Final = 1 << 20
"""The most rows of collectives of one step for which a path is made. A step has more if a run has no steps.
"""
# Ranks of a path whose kernels are read: those that it is longest on.
_LOOKED_INTO: Final = 32


@dataclass
class Job:
    """The ranks of a dataset, as an engine tells. Raises InputError where no rank used a GPU."""

    engine: Engine
    dataset: Dataset

    def __post_init__(self) -> None:
        if not {"steps", RANKS} <= set(self.dataset.layers()):
            raise InputError(
                "no rank of it used a GPU",
                "Record what the GPUs do: capture --gpu kernels.",
                path=str(self.dataset.folder),
            )

    @cached_property
    def ranks(self) -> pl.DataFrame:
        """The columns of `by_rank`, of the layer `ranks`, and `behaviour`; by rank."""
        sums = self.engine.rows(queries.by_rank(self.engine.layer("steps")))
        about = self.engine.layer(RANKS).select(
            "rank", "world_size", "clock", "gpus", "kernels", "lost", "skipped_lines"
        )
        found = sums.join(self.engine.rows(about), "rank").sort("rank")
        made_ns = self.by_last.group_by(rank="last").agg(pl.col("came_last", "made_wait_ns").sum())
        waited_ns = self.members.group_by("rank").agg(pl.col("waited_ns").sum())
        found = found.join(made_ns, "rank", "left").join(waited_ns, "rank", "left").sort("rank")
        found = found.with_columns(pl.col("came_last", "made_wait_ns", "waited_ns").fill_null(0))
        return found.with_columns(behaviours(found, self.members))

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return dict(self.ranks.select("rank", "host").iter_rows())

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The rows of `by_step`, by step."""
        return self.engine.rows(queries.by_step(self.engine.layer("steps"))).sort("step")

    @cached_property
    def parts(self) -> pl.DataFrame:
        """The rows of `by_part`, by rank and part."""
        first, last = self.steps["step"][0], self.steps["step"][-1]
        return self.engine.rows(queries.by_part(self.engine.layer("steps"), first, last)).sort("rank", "part")

    @cached_property
    def groups(self) -> pl.DataFrame:
        """The rows of `by_group`, by operation and group."""
        return self.engine.rows(queries.by_group(self._meetings)).sort("operation", "process_group")

    @cached_property
    def by_last(self) -> pl.DataFrame:
        """The rows of `by_last`."""
        return self.engine.rows(queries.by_last(self._meetings)).sort("operation", "process_group", "last")

    @cached_property
    def waited_for(self) -> pl.DataFrame:
        """For each step the rank that made others wait longest: `step`, `rank`, `waited_ns`."""
        found = self.engine.rows(queries.by_step_and_last(self._meetings)).sort("step")
        pairs = [queries.unpacked(most) for most in found["most"]]
        return found.select("step").with_columns(
            rank=pl.Series([rank for _, rank in pairs], dtype=pl.Int64),
            waited_ns=pl.Series([ns for ns, _ in pairs], dtype=pl.Int64),
        )

    @cached_property
    def members(self) -> pl.DataFrame:
        """The rows of `by_member` with `group_size`, by rank, operation and group."""
        found = self.engine.rows(queries.by_member(self._members, self._meetings))
        sizes = self.groups.select("operation", "process_group", "group_size")
        found = found.join(sizes, ["operation", "process_group"], "left")
        return found.sort("rank", "operation", "process_group")

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Ranks that are slower than their peers, those that cost most first."""
        found = [*stragglers(self.ranks), *slow_links(self.groups, self.members, len(self.steps))]
        return sorted(found, key=lambda one: (-one.costs_ns, one.ranks, one.slow))

    def usual_step(self) -> int:
        """The step of median length."""
        order = self.steps.sort(pl.col("step_ns") // pl.col("ranks"), "step")
        return int(order["step"][(len(order) - 1) // 2])

    def path(self, step: int) -> list[Section]:
        """The critical path of a step, empty where the recordings show none."""
        steps = self.engine.layer("steps")
        bounds = self.engine.rows(
            steps.filter(steps["step"] == step).select("host", "rank", "start_ns", "end_ns")
        )
        bounds = bounds.unique("rank", keep="first", maintain_order=False).sort("rank")
        rows = self._members.filter(self._members["step"] == step)
        count = self.engine.rows(rows.aggregate(rows=rows.count()))["rows"][0]
        if count > PATH_MAX:
            return []
        return critical_path(self._aligned(bounds), self.engine.rows(rows))

    def causes(self, path: list[Section]) -> list[tuple[Section, str, str, int]]:
        """What the ranks did in the sections of a path: see `causes`."""
        ns = pl.DataFrame(
            [(one.rank, one.start_ns, one.end_ns) for one in path],
            {"rank": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64},
            orient="row",
        )
        of = ns.group_by("rank").agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            total=(pl.col("end_ns") - pl.col("start_ns")).sum(),
        )
        kept = of.sort("total", "rank", descending=[True, False]).head(_LOOKED_INTO)
        windows = list(kept.select("rank", "start_ns", "end_ns").iter_rows())
        kernels, copies, ranges = (
            self._in_windows(layer, windows) for layer in ("kernels", "transfers", "annotations")
        )
        return list(causes(path, kernels, copies, ranges))

    def _in_windows(self, layer: str, windows: list[tuple[int, int, int]]) -> dict[int, pl.DataFrame]:
        if layer not in self.dataset.layers() or not windows:
            return {}
        rows = queries.in_windows(self.engine.layer(layer), windows)
        if layer == "transfers":  # Without a GPU it was recorded on the host.
            rows = rows.filter(rows["gpu"].notnull())
        found = self.engine.rows(rows.select("rank", "row", "name", "start_ns", "end_ns"))
        found = found.sort("rank", "start_ns", "row").with_columns(pl.col("name").fill_null(""))
        return {int(rank): part for (rank,), part in found.group_by("rank", maintain_order=True)}

    def _aligned(self, bounds: pl.DataFrame) -> pl.DataFrame:
        """With `aligned_end_ns`, on the common clock."""
        alignment = self.alignment.select("clock", "at_ns", "offset_ns", "drift_ppb")
        of = bounds.join(self.ranks.select("rank", "clock"), "rank").join(alignment, "clock", "left")
        placed_ns = [
            None if offset_ns is None else Line(at_ns, offset_ns, drift_ppb).place(end_ns)
            for end_ns, at_ns, offset_ns, drift_ppb in of.select(
                "end_ns", "at_ns", "offset_ns", "drift_ppb"
            ).iter_rows()
        ]
        return of.with_columns(aligned_end_ns=pl.Series(placed_ns, dtype=pl.Int64)).sort("rank")

    @cached_property
    def alignment(self) -> pl.DataFrame:
        """The layer `alignment`."""
        file = self.dataset.layer(ALIGNMENT) / "part-0.parquet"
        return pl.read_parquet(file, glob=False, hive_partitioning=False)

    @cached_property
    def _members(self) -> Table:
        return queries.members(self.engine.layer("collectives", SCHEMA))

    @cached_property
    def _meetings(self) -> Table:
        return self.engine.kept(queries.meetings(self._members))
