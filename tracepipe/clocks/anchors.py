"""Puts the clocks of several recordings on one, by what their headers state about clocks that all of them
have.

The times of a recording are on one clock, after its other clocks were related to that. Two such clocks are
related if they are the same clock of one boot of one machine, if a header has an instant on both, or by
CLOCK_REALTIME, which every machine has and NTP sets. Each relation states a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tracepipe.clocks.causality import LaunchSpan, drift_ns_in, is_of_gpu
from tracepipe.clocks.common_events import Agreement, CommonEvents, agreement
from tracepipe.clocks.maps import CRYSTAL_PPM, SNAPSHOT_NS, WANDER_PPM, ClockMap, Method, Pairs, fit, most
from tracepipe.clocks.stamp import Clocks
from tracepipe.errors import ClockError
from tracepipe.event.columns import Int64s
from tracepipe.event.model import HOST_CLOCKS, MONOTONIC, TIME_LIMIT_NS, Header, SourceNs

REALTIME: Final = "realtime"
# CLOCK_REALTIME minus CLOCK_MONOTONIC is when a machine was booted. Within one boot it changes by as much as
# the clock is set. Two boots differ by how long the machine was up.
_ONE_BOOT_NS: Final = 2_000_000_000
# A tool whose times are on CLOCK_REALTIME converts them from another clock, the processor's or the GPU
# driver's. PyTorch's profiler (2.11) was measured to be off by 1.1 to 1.7 µs, XLA's (JAX 0.11) by up to 3.2
# µs.
_CONVERTED_NS: Final = 4_000
# Clock pairs do not apply to an hour before or after them: that was another run.
_NEAR_NS: Final = 3_600_000_000_000
_AS_GOOD_AS_NTP: Final = "as good as NTP keeps CLOCK_REALTIME of both hosts"


@dataclass(frozen=True, slots=True)
class Source:
    """A recording before it is merged. Its times are put on `clock`, and are from `first_ns` to `end_ns`.
    `clocks` relates its other clocks to that one. `common` are events that other recordings may have too.
    `archive` is the file in which it is, if there are others in it. `launched` is when its kernels ran, if
    that must be known to place the times of a GPU.
    """

    name: str
    header: Header
    clock: str
    first_ns: int = 0
    clocks: Clocks | None = None
    end_ns: int = 0
    common: CommonEvents = field(default_factory=CommonEvents)
    archive: str = ""
    launched: LaunchSpan | None = None

    @property
    def is_of_gpu(self) -> bool:
        """Whether all its times are on the clock of a GPU."""
        return is_of_gpu(self.clock)

    def ahead_ns(self, clock: str, of: str) -> int | None:
        """The lead of one host clock over another in this recording; None where that is not known."""
        if clock == of:
            return 0
        here, there = self.header.start_ns(clock), self.header.start_ns(of)
        return None if here is None or there is None else here - there

    @property
    def booted_ns(self) -> int | None:
        """When the host was booted, on CLOCK_REALTIME."""
        return self.ahead_ns(REALTIME, MONOTONIC)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The place of a recording on the common clock. `offset_ns` is added to its times, or only to the first
    of them where its clock drifts: then `drift` places the times. `bound_ns` is how far they may be off, None
    where that is not known. `how` is the text for what relates the clocks, and `bound` for a bound that is
    not a number.
    """

    offset_ns: int
    bound_ns: int | None
    how: str
    bound: str = ""
    drift: ClockMap | None = None

    def place_all(self, ns: Int64s) -> Int64s:
        """The times of a column on the common clock, of the same shape."""
        return ns + self.offset_ns if self.drift is None else self.drift.place_all(ns)

    def along(self, drift: ClockMap, first_ns: int) -> Anchor:
        """The anchor by a map, of a clock whose first time is `first_ns`."""
        return replace(self, offset_ns=drift.place(SourceNs(first_ns)) - first_ns, drift=drift)

    def stated(self, clock: str) -> dict[str, Any]:
        """The anchor as the trace states it."""
        stated: dict[str, Any] = {"trace_clock": clock, "by": self.how, "offset_ns": self.offset_ns}
        if self.drift is not None and self.drift.drift_ppm is not None:
            stated["drift_ppm"] = round(self.drift.drift_ppm, 3)
        return stated | ({"bound": self.bound} if self.bound_ns is None else {"bound_ns": self.bound_ns})

    def shifted(self, by_ns: int) -> Anchor:
        """The anchor with an offset that a user gave in addition."""
        how = f"{self.how}, and {by_ns:+d} ns by hand"
        return replace(self, offset_ns=self.offset_ns + by_ns, bound_ns=None, how=how, bound="set by hand")


def _anchor_by(found: Agreement, other: Anchor, span: tuple[int, int]) -> Anchor | None:
    """The anchor of a recording with times in `span`, by what it has in common with another one, whose anchor
    is `other`. Its bound is that of what they have. None where they do not agree.
    """
    if other.drift is None:
        even = replace(other, offset_ns=other.offset_ns - found.ahead_ns, bound_ns=found.bound_ns)
    else:
        ahead = replace(other.drift, source_ns=other.drift.source_ns + found.ahead_ns)
        even = replace(other.along(ahead, span[0]), bound_ns=found.bound_ns)
    pairs = found.pairs
    drift = None
    if pairs is not None:
        drift = fit("", Pairs(pairs.source_ns, other.place_all(pairs.host_ns), pairs.uncertainty_ns))
        is_clock = drift.drift_ppm is not None and abs(drift.drift_ppm) <= CRYSTAL_PPM
        if not is_clock or 10 * drift.dropped > drift.pairs:
            drift = None  # clocks do not drift like that: these are two runs of one program
    if pairs is None or drift is None:
        return even if found.is_even else None
    is_seen = (
        np.abs(drift.place_all(pairs.source_ns) - even.place_all(pairs.source_ns)) > pairs.uncertainty_ns
    )
    if is_seen.any() or not found.is_even:
        # The rate may change between two pairs, which has most effect in the middle.
        wander_ns = np.diff(drift.source_ns) * WANDER_PPM // 4_000_000 + 1
        inside_ns = np.maximum(drift.from_bound_ns, drift.to_bound_ns)[1:-1] + wander_ns
        bound_ns = max(most(inside_ns), most(drift.bounds_at(np.array(span, np.int64))))
        return replace(even.along(drift, span[0]), bound_ns=bound_ns)
    ns = np.concatenate([pairs.source_ns, np.array(span, np.int64)])
    away_ns = most(drift.place_all(ns) - even.place_all(ns))
    return replace(even, bound_ns=max(found.bound_ns, int(pairs.uncertainty_ns.max()) + away_ns))


def is_one_host(one: Source, other: Source) -> bool | None:
    """Whether two recordings are of the same boot of one machine; None where they do not state it."""
    if one.header.boot and other.header.boot:
        return one.header.boot == other.header.boot
    booted = one.booted_ns, other.booted_ns
    if booted[0] is not None and booted[1] is not None and abs(booted[0] - booted[1]) > _ONE_BOOT_NS:
        return False
    hosts = one.header.host, other.header.host
    return hosts[0] == hosts[1] if all(hosts) else None


def reference(sources: Sequence[Source]) -> int:
    """The recording whose clock is the common one: the first of those that relate the most host clocks."""

    def known(source: Source) -> int:
        if source.clock not in HOST_CLOCKS:
            return -source.is_of_gpu
        return 1 + sum(source.header.start_ns(clock) is not None for clock in HOST_CLOCKS)

    return max(range(len(sources)), key=lambda at: (known(sources[at]), -at))


def anchors(sources: Sequence[Source], by_hand: Mapping[int, int]) -> list[Anchor]:
    """The anchor of each recording on the clock of the reference. `by_hand` has offsets to add to the times
    of some, by their places. Raises ClockError for a recording that nothing relates to the reference.
    """
    first = reference(sources)
    base = sources[first]
    used = {clock for source in sources for clock in (source.clock, *source.header.declared_clocks)}
    if sum(map(is_of_gpu, used)) > 1:
        base = replace(base, launched=None)  # it is not known for which GPU a call waited
    placed = {first: Anchor(0, 0, "its clock is the common one")}
    found = {
        at: _anchor(source, base, sources) or _of_one_archive(source, base)
        for at, source in enumerate(sources)
        if at != first
    }
    for at, anchor in found.items():
        if anchor is not None and sources[at].clock not in (*HOST_CLOCKS, base.clock):
            # The work of a GPU goes with what launched it.
            found[at] = replace(anchor, offset_ns=anchor.offset_ns + by_hand.get(first, 0))
    for at, by_ns in by_hand.items():
        alone = placed[first] if at == first else Anchor(0, None, "nothing relates its clock")
        placed[at] = (found.pop(at, None) or alone).shifted(by_ns)
    # Recordings are placed by what placed recordings have too, and where there is none, one by its anchor.
    new = dict(placed)
    while found and new:
        refined = {}
        for at, anchor in found.items():
            # Only the newly placed recordings are tried: the earlier ones were not enough, and do not change.
            by_others = (_by_others(sources[at], sources[other], its, anchor) for other, its in new.items())
            if better := [one for one in by_others if one is not None]:
                refined[at] = min(better, key=_limit_ns)
        if not refined:
            known = [(at, anchor) for at, anchor in found.items() if anchor is not None]
            refined = dict([min(known, key=lambda one: _limit_ns(one[1]))] if known else [])
        placed.update(refined)
        new = refined
        for at in refined:
            del found[at]
    for at, source in enumerate(sources):
        if at not in placed:
            raise ClockError(
                f"{source.name} cannot be put on the clock of {base.name}: {_reason(source, base)}",
                f"Put them there with --offset {source.name}=NS, which adds nanoseconds to its times.",
            )
        if abs(placed[at].offset_ns) >= TIME_LIMIT_NS:
            raise ClockError(
                f"cannot place {source.name} by {placed[at].offset_ns} ns",
                "146 years are the most that a trace can hold",
            )
    return [placed[at] for at in range(len(sources))]


def _limit_ns(anchor: Anchor) -> int:
    """The bound of an anchor; the largest number where it is not known."""
    return TIME_LIMIT_NS if anchor.bound_ns is None else anchor.bound_ns


def _by_others(source: Source, other: Source, placed: Anchor, anchor: Anchor | None) -> Anchor | None:
    """The anchor of a recording by what a placed recording has too, if that tells more than its anchor: its
    bound is smaller, or it is outside of the anchor's bound.
    """
    may_be_one_host = is_one_host(source, other) is not False
    # An exact anchor needs no calls. Without an anchor it is not known which calls are the same.
    near_ns = None if anchor is None or anchor.bound_ns == 0 else placed.offset_ns - anchor.offset_ns
    found = agreement(source.common, other.common, may_be_one_host=may_be_one_host, near_ns=near_ns)
    if found is None:
        return None
    by_both = _anchor_by(found, placed, (source.first_ns, max(source.first_ns, source.end_ns)))
    if by_both is None or (own_ns := by_both.bound_ns) is None:
        return None
    how = f"{found.count} {found.of} that {other.name} recorded too"
    if anchor is not None:
        off_ns = abs(by_both.offset_ns - anchor.offset_ns)
        is_within = anchor.bound_ns is not None and off_ns <= anchor.bound_ns + own_ns
        if is_within and _limit_ns(anchor) <= own_ns:
            return None
        how += f", {off_ns} ns from where {anchor.how} puts it"
    bound_ns = None if placed.bound_ns is None else placed.bound_ns + own_ns
    return replace(by_both, bound_ns=bound_ns, how=how)


def _anchor(source: Source, base: Source, sources: Sequence[Source]) -> Anchor | None:
    one_host = is_one_host(source, base)
    own = None if source.clocks is None else source.clocks.get(source.clock)
    if own is not None and own.method == Method.ASSUMED:
        return Anchor(0, None, f"the assumed offset of {source.clock}", "unknown: the offset was assumed")
    is_of_gpu = source.clock not in (*HOST_CLOCKS, base.clock)
    if is_of_gpu and base.clocks is not None and one_host is not False:
        # By the other recording's clock pairs near its begin.
        pairs = base.clocks.get(source.clock)
        if pairs is None or pairs.method not in (Method.FIT, Method.LAUNCHES):
            return _by_launches([source, *(one for one in sources if one.clock == source.clock)], base)
        away_ns = max(int(pairs.source_ns[0]) - source.first_ns, source.first_ns - int(pairs.source_ns[-1]))
        if away_ns > _NEAR_NS:
            return None
        first_ns = SourceNs(source.first_ns)
        how = f"{source.clock}, of which {base.name} has clock pairs"
        return Anchor(pairs.place(first_ns) - first_ns, pairs.bound_at(first_ns), how)
    if one_host:
        return _of_one_host(source, base) or _by_realtime(source, base, one_host=True)
    return _by_realtime(source, base, one_host=one_host)


def _by_launches(on_clock: Sequence[Source], base: Source) -> Anchor | None:
    """The anchor of the times of recordings on a GPU's clock by the calls of another one that launched its
    work, and waited for it. Raises ClockError if that is not possible.
    """
    span = base.launched
    if span is None or span.waited_ns is None:
        return None
    first_ns, end_ns = min(one.first_ns for one in on_clock), max(one.end_ns for one in on_clock)
    drift_ns = drift_ns_in(end_ns - first_ns)
    low_ns, high_ns = span.began_ns - first_ns - drift_ns, span.waited_ns - end_ns + drift_ns
    if low_ns > high_ns:
        names = " and ".join(dict.fromkeys(one.name for one in on_clock))
        raise ClockError(
            f"{names} cannot be placed by the launches of {base.name}: the work takes {low_ns - high_ns} ns "
            "longer than from the begin of the first launch to the end of the call that waited for the last",
            "They are of different runs, or of several GPUs. "
            f"--assume-offset {on_clock[0].clock}=NS places times as they are.",
        )
    how = f"the launches of {base.name}, and the call that waited for the last of them"
    return Anchor((low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2, how)


def _of_one_archive(source: Source, base: Source) -> Anchor | None:
    """The anchor by what Perfetto takes for granted: an archive's traces have their times on one clock."""
    if not source.archive or source.archive != base.archive or source.clock != base.clock:
        return None
    return Anchor(0, None, f"{source.clock} of {source.archive}", "as its writer placed the traces in it")


def _of_one_host(source: Source, base: Source) -> Anchor | None:
    """The anchor of a recording by a clock that both recordings of one host have."""
    bound_ns, booted = _converted_ns(source, base), (source.booted_ns, base.booted_ns)
    # The two times of boot may differ, as a tool may name the wrong clock.
    if not (source.header.boot and base.header.boot) and booted[0] is not None and booted[1] is not None:
        bound_ns += abs(booted[0] - booted[1])
    if source.clock == base.clock:
        # A clock of a GPU belongs to the GPU, and a format's own clock to one recording.
        if source.clock not in HOST_CLOCKS and not source.is_of_gpu:
            return None
        return Anchor(0, bound_ns, f"{source.clock} of the same host")
    for of in (base, source):
        if (ahead_ns := of.ahead_ns(base.clock, source.clock)) is not None:
            how = f"{source.clock} of the same host, by the instant that {of.name} began"
            return Anchor(ahead_ns, SNAPSHOT_NS + bound_ns, how)
    return None


def _converted_ns(source: Source, base: Source) -> int:
    """The error of times that the tools of two recordings converted to CLOCK_REALTIME."""
    return _CONVERTED_NS * ((source.clock == REALTIME) + (base.clock == REALTIME))


def _by_realtime(source: Source, base: Source, *, one_host: bool | None) -> Anchor | None:
    """The anchor of a recording by CLOCK_REALTIME."""
    own_ns, base_ns = source.ahead_ns(REALTIME, source.clock), base.ahead_ns(REALTIME, base.clock)
    if own_ns is None or base_ns is None:
        return None
    read = (source.clock != REALTIME) + (base.clock != REALTIME)
    bound_ns = SNAPSHOT_NS * read + _converted_ns(source, base)
    offset_ns = own_ns - base_ns
    if one_host:
        return Anchor(offset_ns, bound_ns, "CLOCK_REALTIME of the same host")
    if one_host is None:
        bound = f"{bound_ns} ns if both are of one host, else {_AS_GOOD_AS_NTP}"
        return Anchor(offset_ns, None, "CLOCK_REALTIME of a host that is not named", bound)
    return Anchor(offset_ns, None, "CLOCK_REALTIME of two hosts", _AS_GOOD_AS_NTP)


def _reason(source: Source, base: Source) -> str:
    """Why nothing relates two recordings."""
    for one, other in ((source, base), (base, source)):
        if one.clock not in HOST_CLOCKS:
            return f"{one.name} has its times on {one.clock!r}, to which no host clock is related"
        if one.ahead_ns(REALTIME, one.clock) is None and not is_one_host(one, other):
            stated = "does not state its host" if is_one_host(one, other) is None else "is of another host"
            return f"{one.name} has its times only on {one.clock!r}, and {stated}"
    return f"no instant is known on both {source.clock!r} and {base.clock!r}"
