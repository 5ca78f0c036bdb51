"""Where in their programs ranks that do the same work differ: before which call, or at which kernel.

A place is a row that a program has in each of its steps: `key` and `nth` of `analyses.program.Program`. The
time of the host before it differs far less from step to step than that of the whole program. So 4 ms more at
one place are certain where they are not in the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tracepipe.analyses.gpu_work import COMPUTE
from tracepipe.dataset.places import Dataset, asking, files_of
from tracepipe.errors import InputError
from tracepipe.event.columns import NONE
from tracepipe.kernel_names import short_kernel_name, without_namespaces
from tracepipe.ranks.engine import Columns
from tracepipe.ranks.stragglers import EXPLAINS, Place
from tracepipe.store.tables import connect

_MEMORY_MB: Final = 200
# A place with less of a step makes no rank slow. Of more than so many, those with most time are compared.
_OF_STEP: Final = 0.02
_PLACES_MOST: Final = 1_000
# Two stages of a pipeline had three quarters in common, and ranks with the same program 99.7%.
_ALIKE: Final = 0.98
_NS_MOST: Final = 1 << 62  # impossible times may add up to more than 64 bits
_HOST_NS: Final = "greatest(call_ns - from_ns - loading_ns, 0)"
_CALLS: Final = f"""
select rank, key, nth, count(*) as times, least(sum(ns), {_NS_MOST})::bigint as ns,
    least(sum(ns // 1000), {_NS_MOST})::bigint as us,
    sum((ns // 1000)::hugeint * (ns // 1000))::double as us2
from (select rank, step, key, nth, {_HOST_NS} as ns from program where step <> {NONE})
semi join ranks using (rank) group by rank, key, nth
"""
"""The table `calls`: how often each rank comes to each place, and how long its host takes until then."""
_SEQUENCES: Final = f"""
with usual as (select rank, behaviour, key, nth from calls join ranks using (rank) where 2 * times > steps),
common as (
    select behaviour, key, nth from usual join (
        select behaviour, count(*) as ranks from ranks group by behaviour
    ) using (behaviour) group by behaviour, key, nth, ranks having 2 * count(*) > ranks
), found as (
    select rank, any_value(behaviour) as behaviour, bit_xor(hash(key, nth)) as rows, count(*) as own,
        count(common.key) as shared
    from usual left join common using (behaviour, key, nth) group by rank
), sizes as (select behaviour, count(*) as size from common group by behaviour)
select rank, dense_rank() over (
    order by behaviour, case when shared >= {_ALIKE} * greatest(own, size) then 0 else rows end
) - 1 as sequence
from found left join sizes using (behaviour)
"""
"""The table `sequences`: which ranks of a behaviour make the same calls between the same collectives: nearly
all those that most ranks make, or exactly those of some other ranks.
"""
_PLACES: Final = f"""
with long as (
    select sequence, key, nth from calls join sequences using (rank) join ranks using (rank)
    group by sequence, key, nth having count(*) > 1 and max(ns / steps) > {_OF_STEP} * min(step_ns / steps)
    order by sum(ns) desc, key, nth limit {_PLACES_MOST}
)
select sequence, key, nth, rank, ns, us, us2 from calls join sequences using (rank)
semi join long using (sequence, key, nth) order by sequence, key, nth, rank
"""
_MORE_CALLS: Final = """
with kinds as (
    select rank, behaviour, key, sum(times) as times, sum(ns) as ns
    from calls join ranks using (rank) group by rank, behaviour, key
), own as (
    select rank, behaviour, sum(kinds.times) as times, sum(kinds.ns) as ns, any_value(steps) as steps
    from kinds join ranks using (rank, behaviour) group by rank, behaviour
), every as (
    select behaviour, sum(times) as times, sum(ns) as ns, sum(steps) as steps from own group by behaviour
), of_kind as (
    select behaviour, key, sum(times) as times, sum(ns) as ns from kinds group by behaviour, key
)
select rank, (
    sum(
        case when of_kind.times > kinds.times
        then kinds.times * (of_kind.ns - kinds.ns) // (of_kind.times - kinds.times)
        else kinds.times * (every.ns - own.ns) // (every.times - own.times) end
    ) - any_value((every.ns - own.ns) * own.steps // (every.steps - own.steps))
)::bigint as more_ns
from kinds join of_kind using (behaviour, key) join every using (behaviour) join own using (rank, behaviour)
where every.steps > own.steps and every.times > own.times group by rank order by rank
"""
_KERNELS: Final = f"""
select rank, name as place, name, sum(end_ns - start_ns) as ns, null as call_ns from program
where step <> {NONE} and what = {COMPUTE} group by rank, name
"""
_GAPS: Final = f"""
select rank, (key, nth) as place, any_value(name) as name, sum(ns) as ns, arg_max(call_ns, ns) as call_ns
from (select *, {_HOST_NS} as ns from program where step <> {NONE}) group by rank, key, nth
"""


class Places:
    """The places in the programs of the ranks of a dataset. `ranks` has their columns `rank`, `behaviour`
    and `step_ns`.

    `sequence` is the same number for ranks with the same places. `table` has a row for each place that may
    make a rank slow, and each rank: sums over its steps, as in `queries.RANKS`. `more_ns` is how much longer
    the host of a rank should take in all its steps because it makes other calls than its peers: by what these
    calls take on the peers, or what any call takes.
    """

    def __init__(self, dataset: Dataset, ranks: Columns) -> None:
        self._dataset = dataset
        with self._connection() as connection:
            connection.register("given", {name: ranks[name] for name in ("rank", "behaviour", "step_ns")})
            connection.execute(
                f"""create temp table ranks as select rank, behaviour, step_ns, steps from given join (
                    select rank, count(distinct step) as steps from program where step <> {NONE} group by rank
                ) using (rank)"""
            )
            connection.execute(f"create temp table calls as {_CALLS}")
            connection.execute(f"create temp table sequences as {_SEQUENCES}")
            self.sequence: dict[int, int] = dict(connection.execute("from sequences").fetchall())
            self.table: Columns = connection.execute(_PLACES).fetchnumpy()
            self.more_ns: dict[int, int] = dict(connection.execute(_MORE_CALLS).fetchall())

    @contextmanager
    def _connection(self, *ranks: int) -> Iterator[Any]:
        """A connection to the programs of some ranks, or of all."""
        with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
            connection = connect(":memory:", Path(folder), memory_mb=_MEMORY_MB)
            rows = files_of(self._dataset.layer("program").absolute())
            some = f" where rank in {ranks}" if ranks else ""
            connection.execute(f"create temp view program as select * from {rows}{some}")
            try:
                yield connection
            finally:
                connection.close()

    def kernel(self, rank: int, peer: int, excess_ns: int) -> str:
        """The kernel in which a rank takes most of `excess_ns` of a step longer than a peer, "" if that are
        many.
        """
        found = self._most(_KERNELS, rank, peer, ())
        return f"in {_short(found[0])}" if found and found[1] >= EXPLAINS * excess_ns else ""

    def call(self, rank: int, peer: int, excess_ns: int, host: str, places: Collection[Place]) -> str:
        """The call, and its line, before which a rank takes longest compared with a peer: of some places, or
        of all if that is most of `excess_ns` of a step; else "".
        """
        found = self._most(_GAPS, rank, peer, places)
        if not found or (not places and found[1] < EXPLAINS * excess_ns):
            return ""
        line = self._line(host, rank, found[2])
        return f"before {_short(found[0])}" + (f" ({line})" if line else "")

    def _most(
        self, places: str, rank: int, peer: int, some: Collection[Place]
    ) -> tuple[str, float, int] | None:
        """The name of the place where a rank takes longest compared with a peer, how much longer, and when it
        took longest. A rank may have a kernel with another name than its peer: where only one of them has a
        place, it is compared with the longest one that only the other has.
        """
        wanted = f"and own.place in ({', '.join(f'({key}, {nth})' for key, nth in sorted(some))})"
        with self._connection(rank, peer) as connection:
            found: list[tuple[str, float, int]] = connection.execute(
                f"""with places as ({places}), counts as (
                    select rank, count(distinct step) as steps from program where step <> {NONE} group by rank
                ), means as (select *, ns / steps as mean_ns from places join counts using (rank)),
                own as (from means where rank = $rank), its as (from means where rank = $peer),
                other as (select max(mean_ns) as ns from its anti join own using (place))
                select own.name, own.mean_ns - coalesce(its.mean_ns, other.ns, 0) as more_ns, own.call_ns
                from own left join its using (place) cross join other
                where own.name is not null {wanted if some else ""}
                order by more_ns desc, own.name limit 1""",
                {"rank": rank, "peer": peer},
            ).fetchall()
        return found[0] if found else None

    def _line(self, host: str, rank: int, call_ns: int) -> str:
        """The line of Python that made a call, "" where that is not known."""
        try:
            with asking(self._dataset.part("calls", host, rank)) as connection:
                found = connection.execute(
                    "select python from part where start_ns = ? and python is not null limit 1", [call_ns]
                ).fetchall()
        except (OSError, InputError):  # not recorded, or damaged; nothing else in the report needs it
            return ""
        return str(found[0][0]) if found else ""


def _short(name: str) -> str:
    """A kernel's name without its namespaces and the arguments of its template."""
    short = without_namespaces(short_kernel_name(name))
    return short.partition("<")[0] or short
