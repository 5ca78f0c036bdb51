"""What a program can do without, or faster: the changes that names of ranges, calls and kernels describe."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named, values_by_names
from tracepipe.analyses.functions import names_by_time
from tracepipe.analyses.gpu_work import COMMUNICATION, KERNEL, gpu_work, outermost_rows
from tracepipe.analyses.idle_places import operators
from tracepipe.analyses.program import WAIT, Program, program_of
from tracepipe.analyses.replay import Change, Changes, Window
from tracepipe.analyses.steps import is_step, steps_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.event.intervals import Stretches
from tracepipe.kernel_names import applied_function, kernel_title
from tracepipe.store.run import Run
from tracepipe.store.schema import SPAN

Matches = Callable[[str], bool]
Kind = Literal["ranges", "calls", "kernels"]
Has = Callable[[Kind, Matches], bool]
"""Whether any range, call or kernel has such a name."""
_RANGES, _KERNELS, _CALLS = 8, 5, 4
_FACTOR: Final = 2.0


class Subject(Protocol):
    """The program of a window, and the names of what it does."""

    @property
    def program(self) -> Program: ...

    def ranges(self, matches: Matches) -> Stretches:
        """When ranges with such names are open."""

    def calls(self, matches: Matches) -> Stretches:
        """When calls with such names run."""

    def kernels(self, matches: Matches) -> Bools:
        """Flags the rows of the program that are kernels with such a name. Shape `(rows,)`."""


class Recorded:
    """The subject that is a recording."""

    def __init__(self, run: Run) -> None:
        self.run, self.program, self.work = run, program_of(run), gpu_work(run)

    def ranges(self, matches: Matches) -> Stretches:
        rows, layer = rows_named(self.run, "annotation", matches), self.run.layer("annotation")
        return Stretches(layer.start_ns[rows], layer.end_ns[rows])

    def calls(self, matches: Matches) -> Stretches:
        layer = self.run.layer("userspace")
        rows = rows_named(self.run, "userspace", matches)
        rows = rows[(layer.parent[rows] == NONE) & (layer.kind[rows] == SPAN)]
        return Stretches(layer.start_ns[rows], layer.end_ns[rows])

    def kernels(self, matches: Matches) -> Bools:
        of, answers = values_by_names(self.run, "gpu_kernel", matches)
        shapes = np.array(answers, np.bool_)[of]
        is_work = self.program.what != WAIT
        at = np.where(is_work, self.program.work, 0)
        is_kernel = is_work & (self.work.what[at] == KERNEL)
        row = np.where(is_kernel, self.work.row[at], 0)
        found: Bools = is_kernel & shapes[self.run.layer("gpu_kernel").shape[row]]
        return found

    def has(self, kind: Kind, matches: Matches) -> bool:
        """Whether any range, call or kernel has such a name."""
        found = self.kernels(matches).any() if kind == "kernels" else getattr(self, kind)(matches).total_ns
        return bool(found)

    def most(self) -> Most:
        """The names that take most time."""
        run, steps = self.run, steps_of(self.run)
        ranges, calls, kernels = (run.layer(name) for name in ("annotation", "userspace", "gpu_kernel"))
        inside = Stretches(steps.start_ns[:1], steps.end_ns[-1:])
        is_other = operators(run)[ranges.shape] | (run.shapes.column("gpu")[ranges.shape] != NONE)
        rows = np.flatnonzero(~is_other)
        rows = rows[inside.covered_ns(ranges.start_ns[rows], ranges.end_ns[rows]) > 0]
        asking = np.zeros(len(calls) + 1, np.bool_)
        asking[outermost_rows(run, self.work.call)] = True
        others = np.flatnonzero((calls.parent == NONE) & (calls.kind == SPAN) & ~asking[:-1])
        work = self.work.row[self.work.what == KERNEL]
        places = ((ranges, rows), (calls, others), (kernels, work))
        named = [names_by_time(run, layer, own, 0)[0] for layer, own in places]
        names = [[run.shapes.text(number) for number in numbers] for numbers in named]
        return Most([name for name in names[0] if not is_step(name)], *names[1:])


class Most(NamedTuple):
    """Ranges that are no steps, calls that launch nothing, and kernels, those with the most time first."""

    ranges: list[str]
    calls: list[str]
    kernels: list[str]


class Named(NamedTuple):
    """A change with a name: what it changes in a window, given all subjects, the number of one, and the error
    where that is nothing in any window.
    """

    name: str
    change: Callable[[Window, int, Subject], Change | None]
    missing: TracepipeError | None = None

    def made(self, window: Window, subjects: Sequence[Subject]) -> Changes:
        """What it changes in a window."""
        found = ((number, self.change(window, number, one)) for number, one in enumerate(subjects))
        return {number: change for number, change in found if change is not None}


def asked(
    has: Has,
    without: Iterable[str],
    faster: Iterable[str],
    chains: Iterable[str],
    overlapping: Iterable[str],
    *,
    free: bool,
) -> list[Named]:
    """The changes that options describe. Raises TracepipeError for a name that nothing has."""
    found = [without_named(has, pattern) for pattern in without]
    for text in faster:
        pattern, _, factor = text.rpartition("=")
        try:
            times = float(factor)
        except ValueError:
            times = 0
        if not pattern or not 0 < times < math.inf:
            raise TracepipeError(f"{text!r} is not KERNEL=N.", "Write 'gemm*=2'.")
        found.append(faster_kernels(pattern, times))
    found += [fused(chain) for chain in chains]
    found += [overlapped(pattern) for pattern in overlapping]
    return [*found, FREE_LAUNCHES] if free else found


def without_named(has: Has, pattern: str) -> Named:
    """The change that leaves out ranges with what is launched in them, else calls, else kernels."""

    def matches(name: str) -> bool:
        return fnmatchcase(name, pattern)

    kinds: tuple[Kind, ...] = ("ranges", "calls")
    kind = next((kind for kind in kinds if has(kind, matches)), "")
    is_kernel = _of_kernel(pattern)
    if not kind and not has("kernels", is_kernel):
        raise TracepipeError(
            f"No range, call or kernel is called {pattern}.", "whatif without options lists some."
        )

    def change(_: Window, number: int, subject: Subject) -> Change | None:
        if kind:
            return without_stretches(subject.program, getattr(subject, kind)(matches))
        dropped = subject.kernels(is_kernel)
        return Change(_launches_of(subject.program, dropped), dropped=dropped) if dropped.any() else None

    return Named(f"without {pattern}", change)


def without_stretches(one: Program, removed: Stretches) -> Change | None:
    """The change that leaves out time of the host, with what is launched in it."""
    return Change(removed, dropped=_begin_in(one, removed)) if removed.total_ns else None


def faster_kernels(pattern: str, times: float) -> Named:
    """The change that makes kernels some times as fast."""
    is_kernel = _of_kernel(pattern)

    def change(_: Window, number: int, subject: Subject) -> Change | None:
        kernels = subject.kernels(is_kernel)
        return Change(left=np.where(kernels, 1 / times, 1.0)) if kernels.any() else None

    missing = TracepipeError(f"No kernel is called {pattern}.", "summary --all lists the kernels.")
    return Named(f"{pattern} {times:g} times as fast", change, missing)


def fused(chain: str) -> Named:
    """The change that makes each occurrence of a chain of kernels one kernel, as long as all of them, with
    the first launch alone. A chain is written as `gaps` does: `fill ×4, add`.
    """
    names = list[str]()
    # A comma in the arguments of a template is part of the name.
    for text in re.split(r", (?![^<]*>)", chain):
        repeated = re.fullmatch(r"(.*) ×([1-9]\d{0,3})", text)
        names += [text] if repeated is None else [repeated[1]] * int(repeated[2])
    are_kernels = {name: _of_kernel(name) for name in names}

    def change(_: Window, number: int, subject: Subject) -> Change | None:
        one, count = subject.program, len(names)
        flags = {name: subject.kernels(is_kernel) for name, is_kernel in are_kernels.items()}
        dropped, left = np.zeros(len(one), np.bool_), np.ones(len(one))
        for stream, own in RowsByNumber(one.stream):
            places = len(own) - count + 1
            if stream == NONE or places < 1:
                continue
            found = np.logical_and.reduce(
                [flags[name][own[at : at + places]] for at, name in enumerate(names)]
            )
            free = 0
            for at in np.flatnonzero(found).tolist():
                if at >= free:
                    free, some = at + count, own[at : at + count]
                    lengths_ns = one.end_ns[some] - one.start_ns[some]
                    left[some[0]] = lengths_ns.sum() / max(int(lengths_ns[0]), 1)
                    dropped[some[1:]] = True
        return Change(_launches_of(one, dropped), dropped=dropped, left=left) if dropped.any() else None

    missing = TracepipeError(f"No kernels follow each other as {chain}.", "gaps lists chains of kernels.")
    return Named(f"{chain} fused", change, missing)


def overlapped(pattern: str) -> Named:
    """The change by which no other work waits for some communication, but the end of the step."""
    is_kernel = _of_kernel(pattern)

    def change(_: Window, number: int, subject: Subject) -> Change | None:
        flags = subject.kernels(is_kernel) & (subject.program.what == COMMUNICATION)
        return Change(overlapped=flags) if flags.any() else None

    missing = TracepipeError(
        f"No kernel that communicates is called {pattern}.", "summary --all lists the kernels."
    )
    return Named(f"{pattern} overlapped", change, missing)


def free_launches(one: Program) -> Change:
    """The change by which launches take no time of the host, as in a CUDA graph."""
    rows = np.flatnonzero((one.what != WAIT) & (one.called_ns > one.call_ns))
    # A blocking copy takes as long as it waits.
    rows = rows[~np.isin(one.call_ns[rows], one.call_ns[one.what == WAIT])]
    return Change(Stretches(one.call_ns[rows], one.called_ns[rows]))


FREE_LAUNCHES: Final = Named("free launches", lambda window, number, subject: free_launches(subject.program))


def candidates(has: Has, most: Most) -> Iterator[Named]:
    """Changes that are worth a look."""
    for name in dict.fromkeys([*most.ranges[:_RANGES], *most.calls[:_CALLS]]):
        yield without_named(has, escaped(name))
    yield FREE_LAUNCHES
    for name in most.kernels[:_KERNELS]:
        title = kernel_title(name)
        yield faster_kernels(escaped(name), _FACTOR)._replace(name=f"{title} {_FACTOR:g} times as fast")


def together(some: Changes, others: Changes) -> Changes:
    """Both changes at once."""
    both = dict(others)
    for number, one in some.items():
        other = both.get(number, Change())
        removed = one.removed if other.removed is None else other.removed
        if one.removed is not None and other.removed is not None:
            removed = one.removed.joined(other.removed)
        dropped, left = one.dropped, one.left
        if other.dropped is not None:
            dropped = other.dropped if dropped is None else dropped | other.dropped
        if other.left is not None:
            left = other.left if left is None else left * other.left
        # Only one of them has times of its own.
        host_ns = other.host_ns if one.host_ns is None else one.host_ns
        work_ns = other.work_ns if one.work_ns is None else one.work_ns
        overlapped = one.overlapped
        if other.overlapped is not None:
            overlapped = other.overlapped if overlapped is None else overlapped | other.overlapped
        both[number] = Change(removed, dropped, left, host_ns, work_ns, overlapped)
    return both


def escaped(name: str) -> str:
    """The pattern that only this name matches."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _of_kernel(pattern: str) -> Matches:
    """Whether the whole name of a kernel matches, or one that is shown."""

    def matches(name: str) -> bool:
        title = kernel_title(name)
        function = applied_function(title)
        shown = (name, title, function, function.partition("<")[0])
        return any(fnmatchcase(one, pattern) for one in shown)

    return matches


def _launches_of(one: Program, dropped: Bools) -> Stretches:
    """When the launches run that launch nothing else: that of a graph is still made for others."""
    of, _ = number_rows(one.call_ns)
    gone = (np.bincount(of, ~dropped) == 0)[of]
    return Stretches(one.call_ns[gone], one.called_ns[gone])


def _begin_in(one: Program, removed: Stretches) -> Bools:
    """Flags the rows whose calls begin in some stretches. Shape `(rows,)`."""
    last = np.searchsorted(removed.start_ns, one.call_ns, "right") - 1
    found: Bools = (last >= 0) & (np.append(removed.end_ns, 0)[last] > one.call_ns)
    return found
