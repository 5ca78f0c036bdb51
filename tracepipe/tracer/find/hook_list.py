"""Lists what can be hooked on this machine, which shipped sets have it, and what a hook has recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import orjson

from tracepipe.errors import TracepipeError
from tracepipe.hooks.hook import FilePlace, KernelPlace, Probe
from tracepipe.hooks.names import HookIndex, near_names
from tracepipe.hooks.sets import HookSet, load_set, names_hooks, read_hooks, shipped_sets
from tracepipe.tracer.find.functions import FunctionTables
from tracepipe.tracer.find.kernel import SYMBOLS, KernelSymbols, Tracepoints, no_kprobes
from tracepipe.tracer.find.library import LibrarySearch, same_library
from tracepipe.tracer.find.resolve import resolve
from tracepipe.tracer.request import Notify

_FIRST_CALLS = 3


@dataclass(frozen=True, slots=True)
class FunctionRow:
    """A function or tracepoint. `spec` hooks it; `place` is its file, module ("" for the kernel) or group."""

    spec: str
    name: str
    place: str
    sets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetRow:
    """A shipped set: how many functions of this machine it records, or why it records none."""

    name: str
    about: str
    function_count: int
    reason: str


@dataclass(slots=True)
class Listing:
    """The functions that match a pattern, similar names if none does, and notes about what could not be
    searched. `reason`: why a hook finds nothing.
    """

    rows: list[FunctionRow] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(slots=True)
class HitRow:
    """The calls of a function, or hits of a tracepoint, with arguments and results of the first ones."""

    name: str
    count: int = 0
    rate_per_s: float = 0.0
    first: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class HitReport:
    """The hits of some hooks in a recording, which has lost `lost_count` events."""

    rows: list[HitRow]
    seconds: float
    lost_count: int


def list_sets(libraries: LibrarySearch, notify: Notify = lambda message: None) -> list[SetRow]:
    """Every shipped set. Raises InputError."""
    rows = []
    for name in shipped_sets():
        hooks = load_set(name)
        selection = resolve([hooks], libraries, is_partial=True, notify=notify)
        symbols = {(probe.symbol, probe.place) for probe in selection.probes}
        rows.append(SetRow(name, hooks.about, len(symbols), "; ".join(selection.unresolved.values())))
    return rows


def list_functions(pattern: str, libraries: LibrarySearch) -> Listing:
    """Everything that can be hooked and matches a shell pattern of names or of `PLACE:NAME`, or that `--hook`
    would record. Raises InputError.
    """
    sets = [load_set(name) for name in shipped_sets()]
    if names_hooks(pattern):
        return _hooked(pattern, libraries, sets)
    listing, known = Listing(), set[str]()

    named = tuple(
        dict.fromkeys(hook.library for hooks in sets for hook in hooks.hooks if ".so" in hook.library)
    )
    tables = FunctionTables(listing.notes.append)
    for library in (*named, *libraries.unused(named)):
        sets_with = _sets_with(sets, "uprobe", library)
        everything = HookIndex(hook for hooks in sets for hook in hooks.hooks if hook.library == library)
        files = tables.functions_of(library, libraries, everything)
        if not files:
            listing.notes.append(f"no {library}: {libraries.where(library)}")
        for path, functions in files.items():
            for name in sorted(name for names in functions.values() for name in names):
                known.add(name)
                if _fits(pattern, library, name):
                    row = FunctionRow(f"uprobe:{library}:{name}", name, path, sets_with(name, ""))
                    listing.rows.append(row)

    if no_kprobes():
        listing.notes.append(f"no functions of the kernel: {no_kprobes()}")
    else:
        sets_with = _sets_with(sets, "kprobe")
        module, colon, name = pattern.rpartition(":")
        try:
            for place in KernelSymbols().functions([module] if module else (), [name]):
                if fnmatchcase(place.symbol, name):
                    in_sets = sets_with(place.symbol, place.module)
                    spec = ":".join(["kprobe", *[place.module] * bool(colon), place.symbol])
                    listing.rows.append(FunctionRow(spec, place.symbol, place.module, in_sets))
        except OSError as error:
            listing.notes.append(f"{SYMBOLS} cannot be read: {error.strerror}")

    sets_with = _sets_with(sets, "tracepoint")
    points = list[str]()
    try:
        points = Tracepoints().names("*:*")
    except (TracepipeError, OSError) as error:
        listing.notes.append(f"no tracepoints: {error}")
    for point in points:
        group, _, name = point.partition(":")
        known.add(name)
        if _fits(pattern, group, name):
            listing.rows.append(FunctionRow(f"tracepoint:{point}", name, group, sets_with(point, "")))

    # A given file is also found under its library's name, whose row is preferred.
    listing.rows = list({(row.name, row.place): row for row in reversed(listing.rows)}.values())[::-1]
    if not listing.rows:
        if not no_kprobes():
            known |= {place.symbol for place in KernelSymbols().functions((), ["*"])}
        listing.near = near_names(pattern, known)
    return listing


def hits(lines: Iterable[bytes], names: Collection[str]) -> HitReport:
    """Count the functions or tracepoints `names` in the lines of a finished recording, most hits first.

    The rate is that over the time between header and footer.
    """
    rows = {name: HitRow(name) for name in names}
    open_calls: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    start_ns = end_ns = lost_count = 0
    for line in lines:
        record = orjson.loads(line)
        kind, row = record["type"], rows.get(record.get("name", ""))
        if kind == "header":
            start_ns = record.get("start", {}).get("monotonic_ns", 0)
        elif kind == "footer":
            end_ns = record.get("end", {}).get("monotonic_ns", 0)
            lost_count = sum(record["losses"].values())
        elif row is not None:
            calls, phase = open_calls.setdefault((record.get("tid"), row.name), []), record["phase"]
            given = record.get("args", {})
            if phase == "E":
                if calls:
                    calls.pop().update(given)
                continue
            row.count += 1
            arguments = {key: record[key] for key in ("grid", "block") if key in record} | given
            if len(row.first) < _FIRST_CALLS:
                row.first.append(arguments)
            if phase == "B":
                calls.append(arguments)
    seconds = max(end_ns - start_ns, 0) / 1e9
    for row in rows.values():
        row.rate_per_s = row.count / seconds if seconds else 0.0
    ordered = sorted(rows.values(), key=lambda row: (-row.count, row.name))
    return HitReport(ordered, seconds, lost_count)


def _hooked(text: str, libraries: LibrarySearch, sets: list[HookSet]) -> Listing:
    """The functions that a hook, a set or a file of hooks finds, as in a capture."""
    listing = Listing()
    selection = resolve(read_hooks([text]), libraries, is_partial=True, notify=listing.notes.append)
    # One function can have several probes, each with its condition.
    rows = {(probe.symbol, probe.place): _hooked_row(probe, sets) for probe in selection.probes}
    listing.rows = sorted(rows.values(), key=lambda row: row.spec)
    listing.notes += [f"skipped: {message}" for message in selection.skipped]
    reasons = [why if name == text else f"{name}: {why}" for name, why in selection.unresolved.items()]
    if rows:
        listing.notes += reasons
    else:
        listing.reason = "; ".join(reasons)
    return listing


def _hooked_row(probe: Probe, sets: list[HookSet]) -> FunctionRow:
    place, hook = probe.place, probe.hook
    if isinstance(place, FilePlace):
        file_name, hooks = Path(place.path).name, [one for found in sets for one in found.hooks]
        named = {
            one.library for one in hooks if one.target == "uprobe" and same_library(file_name, one.library)
        }
        having = {name for library in named for name in _sets_with(sets, "uprobe", library)(probe.symbol, "")}
        in_sets = tuple(found.name for found in sets if found.name in having)
        library = place.path if "/" in hook.library else hook.library  # it may be a pattern of paths
        return FunctionRow(f"uprobe:{library}:{probe.symbol}", probe.symbol, place.path, in_sets)
    if isinstance(place, KernelPlace):
        in_sets = _sets_with(sets, "kprobe")(probe.symbol, place.module)
        spec = ":".join(["kprobe", *[place.module] * bool(hook.modules), probe.symbol])
        return FunctionRow(spec, probe.symbol, place.module, in_sets)
    point = place.point.replace("/", ":")
    in_sets = _sets_with(sets, "tracepoint")(point, "")
    return FunctionRow(f"tracepoint:{point}", probe.symbol, point.partition(":")[0], in_sets)


def _sets_with(sets: list[HookSet], target: str, library: str = "") -> Callable[[str, str], tuple[str, ...]]:
    """A function that names the sets that have hooks on a symbol, which is in a kernel module."""
    indexes = {}
    for hooks in sets:
        own = [hook for hook in hooks.hooks if hook.target == target and hook.library == library]
        indexes[hooks.name] = HookIndex(own, hooks.variants)

    def named(symbol: str, module: str) -> tuple[str, ...]:
        found = {name: index.find(symbol) for name, index in indexes.items()}
        return tuple(n for n, hook in found.items() if hook and (not hook.modules or module in hook.modules))

    return named


def _fits(pattern: str, place: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{Path(place).name}:{name}", pattern)
