"""Compares the recordings of two sides: which differences exceed those between recordings of one side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple
from xml.etree import ElementTree

from tracepipe.analyses.comparison import Change, Changes, Difference, Sizes, enough
from tracepipe.analyses.gates import Gate, Gated, judge, least_recordings, values_of
from tracepipe.analyses.measures import (
    DECIDED_BY_PROGRAM,
    EXITS,
    LAYER_OF,
    Patterns,
    delays,
    exits,
    is_recorded,
    measures,
)
from tracepipe.analyses.parts import Part, PartOptions, part_of
from tracepipe.analyses.wall_time import NO_RANGE, PARTS, WallTime, wall_time_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools, Floats
from tracepipe.event.vocabulary import RUNNING
from tracepipe.libraries import np
from tracepipe.options import Option
from tracepipe.reports.report import Column, Drawing, Report, Result, Table
from tracepipe.store.run import Layer, Run
from tracepipe.store.store import Facts
from tracepipe.units import agree, change_text, counted, duration_text

# Losses whose layer is not known may be from any layer.
_OF_ANY_LAYER = ("unknown layer", "other layers")
Load = Callable[[], Run]
"""Reads a recording."""


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe diff`."""

    top: Annotated[int, Option("Show the N largest changes in each table; 0: all.", "N")] = 10
    alpha: Annotated[
        float,
        Option(
            "With several recordings of a side: accept this chance of a false alarm, from 0 to 1.",
            "P",
            most=1,
        ),
    ] = 0.05
    min_change: Annotated[float, Option("Leave out changes by less than this percentage.", "PERCENT")] = 1.0
    gates: Annotated[
        tuple[Gate, ...],
        Option(
            "Exit with 4 if B breaks this bound, such as step<=+3%, and with 5 if the recordings are too few "
            "to tell. Of step, wall, compute, communication, copies or idle.",
            "GATE",
            flags=("--gate",),
            repeats=True,
            read=Gate.read,
        ),
    ] = ()
    junit: Annotated[bool, Option("Print the gates as XML of JUnit.")] = False


def _read(
    loads: Sequence[Load], found: Changes, options: Options
) -> tuple[list[Facts], list[list[int | None]], list[WallTime]]:
    """Read the recordings one after the other, each once, and add what is compared of each to `found`. Return
    the facts, the totals and the wall time of each.
    """
    places: dict[Load, list[int]] = {}
    for at, load in enumerate(loads):
        places.setdefault(load, []).append(at)
    read: dict[Load, tuple[Facts, list[int | None], WallTime]] = {}
    patterns: Patterns = {}
    for load, own in places.items():
        run = load()
        part = part_of(run, options)
        found.add(own, measures(run, part))
        if part is None:
            of_exits, late = exits(run)
            found.add(own, of_exits)
            for kernel, some in late.items():
                patterns.setdefault(kernel, {}).update(some)
        read[load] = run.facts, [total(run, part) for _, _, total in _TOTALS], wall_time_of(run, part)
        del run  # free its memory for the next one
    if patterns:
        # Threads that are late in one recording are compared in all.
        for load, own in places.items():
            found.add(own, delays(load(), patterns))
    facts, totals, walls = zip(*(read[load] for load in loads), strict=True)
    return [*facts], [*totals], [*walls]


def run(a: Sequence[Load], b: Sequence[Load], options: Options) -> Result:
    """Compare the recordings of two sides. They are read one after the other, and a second time if any of
    them has late threads.
    """
    if not 0 < options.alpha < 1:
        raise TracepipeError(
            f"Not a probability: --alpha {options.alpha:g}", "Give a number between 0 and 1, such as 0.05."
        )
    sizes = Sizes(len(a), len(b))
    found = Changes(sizes, options.alpha, options.min_change)
    if options.junit and not options.gates:
        raise TracepipeError("--junit prints gates, and there are none.", "Give one or more by --gate.")
    facts, totals, walls = _read([*a, *b], found, options)
    of_a, of_b = ({one.path for one in some} for some in (facts[: sizes.a], facts[sizes.a :]))
    if options.gates and of_a & of_b:
        raise TracepipeError(
            f"{min(of_a & of_b)} is on both sides, so a gate would compare it with itself.",
            "Name each recording once.",
        )
    left_out = [layer for layer in LAYER_OF if not all(is_recorded(one, layer) for one in facts)]
    of_totals = found.compare(
        left_out,
        _lost(facts),
        [(layer, row) for (_, layer, _), row in zip(_TOTALS, zip(*totals, strict=True), strict=True)],
    )
    result = Result(verdict(found, options.alpha, options.min_change))
    subject = "The run" if options.step is None else f"Step {options.step}"
    subject = f"The time in ranges {options.range}" if options.range else subject
    before, after = _typical(walls[: sizes.a]), _typical(walls[sizes.a :])
    if before.gpus and after.gpus:
        result.title = wall_sentence(before, after, subject) + (
            f" {result.title}" if found.comparison.has_spread else ""
        )
        result.parts += _wall_tables(before, after, options.top, found.comparison.has_spread)
    elif not found.comparison.has_spread and (before.wall_ns or after.wall_ns):
        result.title = f"{wall_sentence(before, after, subject)} {result.title}"
    result.sides = ["A"] * sizes.a + ["B"] * sizes.b
    if options.gates:
        _judge(result, facts, walls, sizes, options)
    several = found.comparison.has_spread
    result.parts.append(_totals(of_totals, several))
    reported, in_both = found.is_reported, found.is_in_both
    verb = "changed" if found.can_claim else "differ"
    for what, table, which in (
        (f"lengths that {verb}", _lengths, found.differs["p50_ns"]),
        (f"tails that {verb}", _tails, found.differs["p95_ns"]),
        (f"counts that {verb}", _counts, found.differs["count"] & in_both),
        ("names that only one side has", _alone, reported & ~in_both),
        ("exits", _exits, found.is_of(EXITS)),
    ):
        count = int(np.count_nonzero(which))
        if 0 < options.top < count:
            result.notes.append(f"{count - options.top} more {what} are not listed: --top 0 lists all")
        if count:
            result.parts.append(table(found.first(which, options.top), what.capitalize(), several))
    result.parts.append(_compared(found))
    result.notes += _notes(found, facts, left_out)
    return result


BROKEN, UNDECIDED = 4, 5
"""The exit codes for a broken gate, and for gates of which some are not decided and none is broken."""


def _judge(
    result: Result, facts: Sequence[Facts], walls: Sequence[WallTime], sizes: Sizes, options: Options
) -> None:
    """Add what the recordings say about the gates to a result. Raises TracepipeError."""
    gates, names = options.gates, [one.path for one in facts]
    found = [
        judge(gate, *values_of(gate, walls, names), sizes.a, options.alpha, len(gates)) for gate in gates
    ]
    columns = (
        Column("gate", "gate"),
        Column("answer", ""),
        *(Column(f"{side.lower()}_ns", side, "ns") for side in "AB"),
        Column("change_ns", "change", "change_ns"),
        *(
            Column(f"{key}_percent", title, "change_percent")
            for key, title in (("change", ""), ("low", "from"), ("high", "to"), ("allowed", "allowed"))
        ),
        Column("needed", "recordings needed", "count", spare=True),
    )
    rows = [
        (
            one.gate.text, one.answer, round(one.a_ns), round(one.b_ns), round(one.change_ns),
            *map(one.percent, (one.change_ns, one.low_ns, one.high_ns, one.allowed_ns)), one.needed,
        )
        for one in found
    ]  # fmt: skip
    note = (
        "A, B: the medians of the recordings, each of which counts as the median of its steps. Change: the "
        "median difference of all pairs of recordings, in percent of a step of A, or of the recording where "
        f"there are no steps. From, to: each bound holds with a chance of {100 * (1 - options.alpha):g}% "
        "(from: of all gates together). Broken: from is more than what is allowed; held: to is not."
    )
    result.parts.insert(0, Table("gates", "Gates", columns, rows, note))
    says = [_gate_sentence(one, sizes, options.alpha / len(gates)) for one in found]
    order = ("broken", "cannot tell", "held")
    result.title = (
        " ".join(says[at] for at in sorted(range(len(found)), key=lambda at: order.index(found[at].answer)))
        + f" {result.title}"
    )
    answers = {one.answer for one in found}
    result.exit_code = BROKEN if "broken" in answers else UNDECIDED if "cannot tell" in answers else 0
    if options.junit:
        result.document = _junit(found, says)


def _gate_sentence(one: Gated, sizes: Sizes, alpha: float) -> str:
    def text(ns: float) -> str:
        percent = one.percent(ns)
        return change_text(round(ns)) if one.gate.percent is None or percent is None else f"{percent:+.1f}%"

    change = f"{one.gate.quantity} changes by {text(one.change_ns)}"
    bounds = [
        f"{word} {text(ns)}" for word, ns in (("from", one.low_ns), ("to", one.high_ns)) if ns is not None
    ]
    change += f" ({' '.join(bounds)})" if bounds else ""
    if one.answer == "broken":
        return f"Broken: {one.gate.text}. {change}."
    if one.answer == "held":
        return f"Held: {one.gate.text}. {change}."
    says = f"Not enough recordings to tell {one.gate.text}: {change}, of {sizes.a} and {sizes.b} recordings."
    least = least_recordings(alpha)
    if min(sizes) < least:
        return f"{says} Record at least {least} of each side."
    if one.needed is None:
        return says
    return (
        f"{says} About {one.needed} of each side would, as those of one side differ by so much: on a quieter "
        "machine fewer are enough."
    )


def _junit(found: Sequence[Gated], says: Sequence[str]) -> str:
    """The gates as a suite of tests, as CI systems read it. One that is not decided is skipped."""
    counts = Counter(one.answer for one in found)
    suite = ElementTree.Element(
        "testsuite", name="tracepipe diff", tests=str(len(found)), failures=str(counts["broken"]),
        skipped=str(counts["cannot tell"]), errors="0",
    )  # fmt: skip
    for one, sentence in zip(found, says, strict=True):
        case = ElementTree.SubElement(suite, "testcase", classname="tracepipe.diff", name=one.gate.text)
        if one.answer == "held":
            ElementTree.SubElement(case, "system-out").text = sentence
        else:
            kind = "failure" if one.answer == "broken" else "skipped"
            ElementTree.SubElement(case, kind, message=sentence)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, "unicode", xml_declaration=True)


def _typical(walls: Sequence[WallTime]) -> WallTime:
    """The wall time of the recording of a side that has the median one."""
    return sorted(walls, key=lambda one: one.wall_ns)[(len(walls) - 1) // 2]


def wall_sentence(a: WallTime, b: WallTime, subject: str = "The run") -> str:
    """A sentence about the change of the wall time, with the parts that it consists of, the largest first."""
    says = (
        f"{subject} takes {duration_text(a.wall_ns)} in A and {duration_text(b.wall_ns)} in B "
        f"({change_text(b.wall_ns - a.wall_ns)})"
    )
    parts = zip(PARTS, a.parts_ns, b.parts_ns, strict=False)
    changes = sorted(((after - before, name) for name, before, after in parts), key=lambda one: -abs(one[0]))
    listed = ", ".join(f"{name} {change_text(ns)}" for ns, name in changes if ns)
    says += f": {listed}." if listed else "."
    ranges = _ranges(a, b)
    if not changes or not ranges:
        return says
    of, first = ("idle time", 1) if changes[0][1] == PARTS[_IDLE] else ("GPU's time", 4)
    row = max(ranges, key=lambda row: abs(row[first + 1] - row[first]))
    change_ns = row[first + 1] - row[first]
    return f"{says} The {of} changed most in {row[0]}: {change_text(change_ns)}." if change_ns else says


_IDLE: Final = PARTS.index("idle")


def _ranges(a: WallTime, b: WallTime) -> list[tuple[Any, ...]]:
    """The ranges of both, those that changed most first: name, the idle time of both and its change, and the
    same of the busy time. Only the ranges of the program have a busy time.
    """
    sides = a.ranges or {}, b.ranges or {}
    rows = []
    for name in {**sides[0], **sides[1]}:
        (idle_a, busy_a), (idle_b, busy_b) = (side.get(name, (0, 0)) for side in sides)
        rows.append((name, idle_a, idle_b, idle_b - idle_a, busy_a, busy_b, busy_b - busy_a))
    return sorted(rows, key=lambda row: (-max(abs(row[3]), abs(row[6])), row[0]))


def _wall_tables(a: WallTime, b: WallTime, top: int, several: bool) -> Iterator[Table]:
    columns = (
        Column("part", ""),
        Column("a_ns", "A", "ns"),
        Column("b_ns", "B", "ns"),
        Column("change_ns", "change", "change_ns"),
    )
    names = ("wall time", *PARTS)

    def rows(before: Sequence[int], after: Sequence[int]) -> list[tuple[Any, ...]]:
        sums = (sum(before), *before), (sum(after), *after)
        return [(name, *of, of[1] - of[0]) for name, *of in zip(names, *sums, strict=True) if any(of)]

    note = (
        "The parts add up to the wall time. Exposed: while nothing computes. Copies: while no kernel runs. "
        "Idle: between the first work and the last."
    )
    if max(a.gpus, b.gpus) > 1:
        note += " The means of the GPUs."
    if several:
        note += " Of the recording of each side that has the median wall time."
    yield Table("wall", "What the wall time consists of", columns, rows(a.parts_ns, b.parts_ns), note)
    if a.step_ns and b.step_ns:
        title = f"The mean step, of {a.steps} in A and {b.steps} in B"
        yield Table("step", title, columns, rows(a.step_ns, b.step_ns))
    changes = _ranges(a, b)
    if any(name != NO_RANGE for name, *_ in changes):
        of_ranges = [Column("range", "range or line")]
        for key in ("idle", "busy"):
            of_ranges += [Column(f"{side.lower()}_{key}_ns", f"{side} {key}", "ns") for side in "AB"]
            of_ranges.append(Column(f"{key}_change_ns", "change", "change_ns"))
        note = (
            "Idle: while the program was in the range, and in none inside it; these times add up to the idle "
            "time. Busy: the GPU's time of what was launched in the range, also in ranges inside it."
        )
        yield Table("ranges", "Ranges by their change", of_ranges, changes[: top or None], note)


def _lost(facts: Sequence[Facts]) -> Counter[str]:
    """By layer, the most events that any one recording lost."""
    most: Counter[str] = Counter()
    for one in facts:
        of_any = sum(one.losses[layer] for layer in _OF_ANY_LAYER)
        most |= Counter({layer: one.losses[layer] + of_any for layer in {*LAYER_OF.values(), *one.losses}})
    return most


Total = Callable[[Run, Part | None], int | None]


def _total(layer: str, rows: Callable[[Run, Layer], Bools] | None = None) -> Total:
    """The function that sums the lengths of a layer, of some rows of it."""

    def total(run: Run, part: Part | None) -> int | None:
        of = run.layer(layer)
        some = np.flatnonzero(np.ones(len(of), np.bool_) if rows is None else rows(run, of))
        lengths_ns = of.lengths_ns(some if part is None else some[part.holds(layer, some)])
        return int(lengths_ns.sum()) if len(lengths_ns) else None

    return total


_TOTALS: tuple[tuple[str, str, Total], ...] = (
    (
        "recording",
        "",
        lambda run, part: part.spans.total_ns if part else run.facts.end_ns - run.facts.start_ns,
    ),
    ("CUDA API calls", "userspace", _total("userspace", lambda run, of: of.is_outermost)),
    ("GPU kernels", "gpu_kernel", _total("gpu_kernel")),
    ("copies on the GPU", "transfer", _total("transfer", lambda run, of: ~run.has("gpu", None, of))),
    ("system calls", "syscall", _total("syscall")),
    ("threads running", "scheduler", _total("scheduler", lambda run, of: run.has("name", RUNNING, of))),
)
"""The totals of a recording: title, layer of the records, and the function that computes the total."""


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


_P = Column("p", "p", "p")
_SPREAD = (
    Column("low_percent", "from", "change_percent", spare=True),
    Column("high_percent", "to", "change_percent", spare=True),
    Column("spread_percent", "spread", "percent"),
    _P,
)
_SPREAD_NOTE = (
    " Change: from the median recording of A to that of B; from, to: its range over single recordings. "
    "Spread: the mean distance of the recordings from the median of their side, both sides added. p: the "
    "chance that the largest of all differences is this large if the sides do not differ."
)


def _change(figure: Difference, several: bool) -> tuple[float | None, ...]:
    """The cells of a change, and of `_SPREAD` where there are several recordings."""
    change = figure.percent(figure.change)
    if not several:
        return (change,)
    return (change, *figure.percent_bounds, figure.percent(figure.spread), figure.p)


def _change_columns(several: bool) -> tuple[Column, ...]:
    return (Column("change_percent", "change", "change_percent"), *(_SPREAD if several else ()))


def _medians_ns(figure: Difference) -> tuple[int | None, ...]:
    return tuple(map(_whole, figure.medians))


def _totals(figures: Sequence[Difference], several: bool) -> Table:
    rows = [
        (title, *_medians_ns(figure), _whole(figure.change), *_change(figure, several))
        for (title, _, _), figure in zip(_TOTALS, figures, strict=True)
        if any(value is not None for value in figure.medians)
    ]
    columns = (
        Column("what", ""),
        Column("a_ns", "A", "ns"),
        Column("b_ns", "B", "ns"),
        Column("change_ns", "change", "change_ns", spare=True),
        *_change_columns(several),
    )
    return Table("totals", "Totals", columns, rows, "Summed over all threads and streams.")


def _changes(
    found: Iterable[Change], title: str, several: bool, name: str, of: str, shown: dict[str, bool]
) -> Table:
    """Each change as a row: the values of some figures in A and B, and the change of one `of` them. `shown`
    has the keys of the figures, and whether their columns are spare.
    """
    has_total = name != "exits"

    def row(one: Change) -> tuple[Any, ...]:
        values = (one.counts if key == "count" else one.figures[key].medians for key in shown)
        total = (one.total_ns,) if has_total else ()
        return (
            *reversed(one.key),
            *map(_whole, chain.from_iterable(values)),
            *_change(one.figures[of], several),
            *total,
        )

    columns = (
        Column("name", "name"),
        Column("layer", "layer", spare=of != "count"),
        *(
            Column(f"{side.lower()}_{key}", side, "count", spare)
            if key == "count"
            else Column(f"{side.lower()}_{key}", f"{side} {key.removesuffix('_ns')}", "ns", spare)
            for key, spare in shown.items()
            for side in "AB"
        ),
        *_change_columns(several),
        *((Column("total_change_ns", "total", "change_ns"),) if has_total else ()),
    )
    spread = _SPREAD_NOTE if name == "lengths" and several else ""
    note = _NOTES_OF.get(name, "").format(spread=spread)
    return Table(name, title, columns, [*map(row, found)], note)


_NOTES_OF = {
    "lengths": "p50: the median length. Total: the change of the sum of all lengths.{spread} A call inside "
    "another counts in the time of both.",
    "tails": "p95: 95% of the lengths are at most this long. The medians do not differ.",
    "exits": "Skew: from the exit of a block's first warp to that of its last. Spread: from the exit of a "
    "warp's first lane to that of its last. Delay: how much later those threads exit than the others. "
    "Change: of p50, also where it is not significant.",
}
_OF_LENGTHS = {"count": True, "p50_ns": False, "p95_ns": True}
_lengths = partial(_changes, name="lengths", of="p50_ns", shown=_OF_LENGTHS)
_tails = partial(_changes, name="tails", of="p95_ns", shown={"p95_ns": False})
_counts = partial(_changes, name="counts", of="count", shown={"count": False})
# How far apart threads exit on each side, changed or not.
_exits = partial(_changes, name="exits", of="p50_ns", shown=_OF_LENGTHS)


def _alone(found: Iterable[Change], title: str, several: bool) -> Table:
    def row(one: Change) -> tuple[Any, ...]:
        count, p = _whole(max(one.counts)), one.figures["count"].p
        return *reversed(one.key), one.only_in, count, abs(one.total_ns), *((p,) if several else ())

    columns: tuple[Column, ...] = (
        Column("name", "name"),
        Column("layer", "layer"),
        Column("run", "only in"),
        Column("count", "count", "count"),
        Column("total_ns", "total", "ns"),
        _P,
    )
    if not several:
        columns = columns[:-1]
    return Table("only", title, columns, [*map(row, found)])


def _compared(found: Changes) -> Drawing:
    """How much was compared; its data has every name that was compared, changed or not."""

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        lengths = np.count_nonzero(found.is_compared)
        names = counted(len(found), "name|names")
        yield f"Compared: {names} by count, {lengths} by length, {found.has_tail} by tail."

    def values(side: Floats) -> list[int | None]:
        return [None if value != value else round(value) for value in side.tolist()]

    def data() -> Iterator[dict[str, Any]]:
        for one in found:
            of = {
                f"{side}_{name if name != 'count' else 'counts'}": values(getattr(figure, side))
                for name, figure in one.figures.items()
                for side in "ab"
            }
            p = {f"{of}_p": one.figures[name].p for of, name in _P_OF.items()}
            yield {"layer": one.key[0], "name": one.key[1], **of, **p, "changed": bool(one.differs)}

    return Drawing("compared", draw, data)


_P_OF = {"length": "p50_ns", "tail": "p95_ns", "count": "count"}


def _notes(found: Changes, facts: Sequence[Facts], left_out: Sequence[str]) -> Iterator[str]:
    some = [layer for layer in left_out if any(is_recorded(one, layer) for one in facts)]
    if some:
        yield f"not compared, as some recordings lack them: {', '.join(some)}"
    if few := int(np.count_nonzero(found.is_in_both & ~found.is_compared)):
        words = "name|names of both sides has|have no length in some recording"
        yield f"{counted(few, words)}: only {agree(few, 'its|their')} counts are compared"
    if not found.comparison.has_spread:
        yield (
            "each side has one recording, but runs of the same program differ too, with the load and the "
            "GPU's clocks: --a A1 A2 … --b B1 B2 … reports which differences exceed that"
        )
    elif (first := _recorded_first(found.sizes, facts)) is not None:
        yield (
            f"all of {first} was recorded before the other side, so anything that changed on the machine "
            "meanwhile is a difference too: record A and B in turn"
        )
    if any(one.losses.total() for one in facts):
        yield (
            "events were lost: in their layers, no difference between counts is reported that is not larger "
            "than the losses, and none between totals"
        )


def _recorded_first(sizes: Sizes, facts: Sequence[Facts]) -> str | None:
    """The side that was recorded before the other one began; None if neither was, or times are not known."""
    known = (one.header.start_ns("realtime") for one in facts)
    starts_ns = [start_ns for start_ns in known if isinstance(start_ns, int)]
    if len(starts_ns) < len(facts):
        return None
    a, b = starts_ns[: sizes.a], starts_ns[sizes.a :]
    return "A" if max(a) < min(b) else "B" if max(b) < min(a) else None


class _Words(NamedTuple):
    """The words for the rows that decide, and for those whose time is less and more in B."""

    rows: str
    less: str
    more: str
    counted: str


_COUNTED_TIMES = "{less} of {all} got faster, {more} slower"
_OF_PROGRAM = _Words("calls, kernels and copies", "faster", "slower", _COUNTED_TIMES)
_OF_WAITS = _Words("names", "faster", "slower", _COUNTED_TIMES)
_OF_EXITS = _Words("exits", "closer together", "further apart", "{less} of {all} decreased, {more} increased")


def verdict(found: Changes, alpha: float, least: float) -> str:
    """Return the sentence. It states what is faster or slower in B if there are enough recordings for that
    claim. It says nothing about the wall time, of which calls and kernels are only a part.

    A change of less than `least` percent of the time of its layer is called "hardly" faster or slower.
    """
    reported = found.is_reported
    if not found.can_claim:
        return _without_claim(found, reported, alpha, least)
    if not reported.any():
        return _nothing_changed(found, alpha)
    # What the program itself does decides, if any of it changed; exits only where nothing else was recorded.
    every, words = found.is_of(DECIDED_BY_PROGRAM), _OF_PROGRAM
    if found.is_of(EXITS).all():
        every, words = np.ones(len(found), np.bool_), _OF_EXITS
    elif not (reported & every).any():
        every, words = ~found.is_of(EXITS), _OF_WAITS
    timed = reported & every
    which = found.directions()
    faster, slower = timed & (which < 0), timed & (which > 0)
    says, most = "B differs, but nothing shows that it is faster or slower.", reported
    if faster.any() and slower.any():
        says, most = f"Some {words.rows} are {words.less} in B, some {words.more}.", faster | slower
    elif (faster.any() or slower.any()) and _weight(found, timed) < least:
        change = words.less if faster.any() else words.more
        says, most = f"Hardly: the part that is {change} is under {least:g}% of the time of its layer.", timed
    elif faster.any():
        says, most = f"All {words.rows} that changed are {words.less} in B.", faster
    elif slower.any():
        says, most = f"All {words.rows} that changed are {words.more} in B.", slower
    counts = [int(np.count_nonzero(flags)) for flags in (faster, slower)]
    count = words.counted.format(less=counts[0], all=np.count_nonzero(every), more=counts[1])
    return f"{says} {evidence(next(found.first(most, 1)))} {count}."


def _without_claim(found: Changes, reported: Bools, alpha: float, least: float) -> str:
    """The sentence for recordings that are too few to distinguish a change of the program from chance."""
    says = ""
    if found.comparison.has_spread:
        count = enough(alpha)
        says = (
            f"Too few recordings to claim a change: the smallest p with {found.sizes.a} and {found.sizes.b} "
            f"of them is {found.comparison.least_p:.2g}. Record {count} of each side."
        )
    if not reported.any():
        than = "recordings of one side do" if found.comparison.has_spread else f"{least:g}%"
        same = f"No name that both sides have differs by more than {than}."
        return f"{says} {same}".strip()
    most = _decisive(found, reported)
    most = most if most.any() else reported
    return f"{says} {evidence(next(found.first(most, 1)))}".strip()


def _decisive(found: Changes, some: Bools) -> Bools:
    """The rows whose time the program itself decides; if there are none, those in which its threads wait."""
    ours: Bools = some & found.is_of(DECIDED_BY_PROGRAM)
    timed: Bools = some & ~found.is_of(EXITS)
    return ours if ours.any() else timed


def _weight(found: Changes, reported: Bools) -> float:
    """The change in percent of the layer's time in A, for the layer where this is most."""
    shares = [0.0]
    for layer in LAYER_OF:
        of = found.is_of((layer,))
        if (reported & of).any():
            before_ns = int(found.totals_ns[0][of].sum())
            change_ns = int(found.total_ns[reported & of].sum())
            shares.append(100 * abs(change_ns) / before_ns if before_ns else 100.0)
    return max(shares)


def evidence(one: Change) -> str:
    """A sentence about how one name differs, with its figures."""
    layer, name = one.key
    total = f"{duration_text(abs(one.total_ns))} {'less' if one.total_ns < 0 else 'more'} in total"
    if "count" in one.differs and one.only_in:
        return f"{name} is only in {one.only_in}: {total}."
    before, after = (f"{count:,.15g}" for count in one.counts)
    if "count" in one.differs:
        return f"{name} occurs {after} times instead of {before}{_sure(one.figures['count'])}: {total}."
    if "p50_ns" in one.differs:
        median = name if layer in EXITS else f"The median length of {name}"
        times = f"{before} times" if before == after else f"{before} and {after} times"
        return f"{median} is {_from_to(one.figures['p50_ns'])}, {times}: {total}."
    return f"5% of {name} take over {_from_to(one.figures['p95_ns'])}: {total}."


def _from_to(figure: Difference) -> str:
    """Both values and the change."""
    (before, after), change = figure.medians, figure.percent(figure.change)
    assert before is not None and after is not None
    size = f" ({change:+.1f}%)" if change is not None else ""
    return f"{duration_text(round(before))} in A and {duration_text(round(after))} in B{size}{_sure(figure)}"


def _sure(figure: Difference) -> str:
    """The bounds of a change and its p, where there are several recordings."""
    if figure.p is None:
        return ""
    low, high = figure.percent_bounds
    bounds = f"{low:+.1f}% to {high:+.1f}% between single recordings, " if low is not None else ""
    return f", {bounds}p {figure.p:.2g}"


def _nothing_changed(found: Changes, alpha: float) -> str:
    compared = found.is_compared
    if not compared.any():
        return "Not enough data: nothing has a length in every recording."
    says = (
        "Nothing changed by more than recordings of one side differ (the chance of a false alarm is "
        f"{100 * alpha:g}%)."
    )
    some = _decisive(found, compared)
    some = some if some.any() else compared
    before_ns = found.totals_ns[0]
    largest = next(found.first(some & (before_ns == before_ns[some].max()), 1))
    figure = largest.figures["p50_ns"]
    low, high = figure.percent_bounds
    if low is not None and high is not None:
        says += (
            f" The median length of {largest.key[1]}, which takes the most time, changes by {low:+.1f}% to "
            f"{high:+.1f}% between single recordings."
        )
    return says


REPORT = Report("diff", Options, run, inputs=("A", "B"), takes_several=True)
