"""Resolves hooks to probes: the functions and tracepoints that hooks name and this machine has.

Each place gets one probe: that of the first set, and within it of the hook that applies (hooks/names.py).
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tracepipe.errors import InputError
from tracepipe.hooks.hook import OWN_LAYER, Condition, FilePlace, Hook, Probe, Selection
from tracepipe.hooks.names import HookIndex, NameFilter, near_names
from tracepipe.hooks.sets import HookSet
from tracepipe.tracer.find.functions import FunctionTables
from tracepipe.tracer.find.kernel import SYMBOLS, KernelSymbols, Tracepoints, no_kprobes, not_loaded
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.request import Notify

_CUDA_FUNCTION = re.compile(r"_*cu(da)?[A-Z]")
MOST_PROBES = 5000
"""All of libcuda, libcudart and the driver are about 1500; tens of thousands would slow the machine down."""


def resolve(
    sets: list[HookSet],
    libraries: LibrarySearch,
    *,
    only: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    is_partial: bool = False,
    notify: Notify = lambda message: None,
) -> Selection:
    """The probes of all sets, in their order; and why a shipped set, or a hook of the user, found none.

    Hooks with the same origin are alternatives, of which one must be found. Of a user's hooks in the same
    group one must be found; the others are skipped with a message.

    `only` and `exclude` are shell patterns of function names, with or without a set's variants. `notify` gets
    messages about libraries that could not be asked. Unless `is_partial`, raises InputError for hooks that
    match too many functions, and for a given library that no hook names. With `is_partial` nothing will be
    attached, and the library may be one that other sets name.
    """
    if not is_partial:
        _check_given(sets, libraries)
    sources = _Sources(libraries, FunctionTables(notify))
    selection, places = Selection(), _Places()
    for hooks in sets:
        found = _Found(hooks, NameFilter(only, exclude, hooks.variants))
        for target, look in _LOOKS.items():
            chosen = [hook for hook in hooks.hooks if hook.target == target]
            if chosen:
                look(chosen, sources, found)
        selection.probes.extend(probe for probe in found.probes if places.take(probe))
        found.say(selection)
    if not is_partial:
        _check_number(selection.probes)
    return selection


def hook_text(hook: Hook) -> str:
    """The text of a hook as the command line writes it: `kprobe:nvidia_*`."""
    place = [hook.library] if hook.target == "uprobe" else [",".join(hook.modules)] * bool(hook.modules)
    return ":".join([hook.target, *place, hook.pattern])


@dataclass
class _Sources:
    """The places to search, of which each is read once."""

    libraries: LibrarySearch
    tables: FunctionTables
    symbols: KernelSymbols = field(default_factory=KernelSymbols)
    tracepoints: Tracepoints = field(default_factory=Tracepoints)


class _Found:
    """The result of one set: its probes, which of its hooks match something, and why the others do not."""

    def __init__(self, hooks: HookSet, wanted: NameFilter) -> None:
        self.hooks, self.wanted = hooks, wanted
        self.probes: list[Probe] = []
        self._fitted: set[str] = set()
        self._groups: set[str] = set()
        self._reasons: dict[tuple[str, str], Hook] = {}

    def add(self, probe: Probe, names: Iterable[str]) -> None:
        """Add a probe, unless the user has excluded one of its names."""
        self.fits(probe.hook)
        if self.wanted.passes(names):
            self.probes.append(probe)

    def fits(self, hook: Hook) -> None:
        """Note that the hook has matched something, even if only another name of a place that has a probe."""
        self._fitted.add(hook.origin)
        self._groups.add(hook.group)

    def without_fit(self, hooks: Iterable[Hook]) -> list[Hook]:
        """The hooks that have found nothing, that are reported to the user."""
        if self.hooks.is_shipped and self._fitted:
            return []  # a shipped set names functions of many versions
        return [hook for hook in hooks if hook.origin not in self._fitted]

    def missing(self, hooks: Iterable[Hook], reason: Callable[[Hook], str] | str) -> None:
        """Note why those of the hooks that match nothing do not."""
        for hook in self.without_fit(hooks):
            self._reasons.setdefault((hook.origin, reason if isinstance(reason, str) else reason(hook)), hook)

    def say(self, selection: Selection) -> None:
        """Add the messages for the user about a set or its hooks, joined where the reason is the same."""
        lacking: dict[str, list[Hook]] = {}
        passed_over: dict[str, list[Hook]] = {}
        for (origin, reason), hook in self._reasons.items():
            if origin not in self._fitted:  # an alternative may have been found since then
                which = passed_over if hook.group in self._groups else lacking
                which.setdefault(reason, []).append(hook)
        name = self.hooks.name
        if self.hooks.is_shipped:
            if lacking and not self._fitted:
                selection.unresolved[name] = "; ".join(lacking)
        elif len({hook.origin for hook in self.hooks.hooks}) == 1:
            if lacking:
                several = len({hook.pattern for hooks in lacking.values() for hook in hooks}) > 1
                reasons = [f"{hooks[0].pattern}: {why}" if several else why for why, hooks in lacking.items()]
                selection.unresolved[name] = "; ".join(reasons)
        else:
            selection.unresolved.update(self._messages(lacking))
            over = self._messages(passed_over)
            selection.passed_over.extend(f"{place}: {why}" for place, why in over.items())

    def _messages(self, by_reason: dict[str, list[Hook]]) -> dict[str, str]:
        messages = {}
        for reason, hooks in by_reason.items():
            more = f" and {len(hooks) - 1} more" if len(hooks) > 1 else ""
            messages[f"{self.hooks.name}, {hook_text(hooks[0])}{more}"] = reason
        return messages


class _Places:
    """The places that have a probe, and the hook of each."""

    def __init__(self) -> None:
        self._owners: dict[object, str] = {}
        self._taken: set[tuple[object, Condition | None]] = set()
        self._files: dict[str, object] = {}

    def take(self, probe: Probe) -> bool:
        """Take a place for a probe; returns whether it was free. A hook may have several probes at one place,
        each with its own condition.
        """
        place = self._identity(probe)
        entry = (place, probe.hook.condition)
        if self._owners.setdefault(place, probe.hook.origin) != probe.hook.origin or entry in self._taken:
            return False
        self._taken.add(entry)
        return True

    def _identity(self, probe: Probe) -> object:
        place = probe.place
        if not isinstance(place, FilePlace):
            return place
        if place.path not in self._files:
            status = Path(place.path).stat()
            self._files[place.path] = (status.st_dev, status.st_ino)
        return self._files[place.path], place.offset


def _look_in_libraries(hooks: list[Hook], sources: _Sources, found: _Found) -> None:
    for library in dict.fromkeys(hook.library for hook in hooks):
        own = [hook for hook in hooks if hook.library == library]
        _look_in_library(library, own, sources, found)


def _look_in_library(library: str, hooks: list[Hook], sources: _Sources, found: _Found) -> None:
    libraries, tables = sources.libraries, sources.tables
    files = tables.of(library, libraries, index := HookIndex(hooks, found.hooks.variants))
    for path, functions in files.items():
        _add_functions(path, functions, index, found)
    if not found.hooks.is_shipped and found.without_fit(hooks):
        for path in files:  # a user may name a function that is not exported
            _add_functions(
                path, tables.all_of(path), HookIndex(found.without_fit(hooks), found.hooks.variants), found
            )
    if not files:
        name = library or "the program"
        found.missing(hooks, f"no {name} found: {libraries.where(library)}")
        return

    def reason(hook: Hook) -> str:
        names = {name for path in files for names in tables.all_of(path).values() for name in names}
        place = " or ".join(files)
        return f"no such function in {place}{_near(hook.pattern, names)}"

    found.missing(hooks, reason)


def _add_functions(path: str, functions: dict[int, list[str]], index: HookIndex, found: _Found) -> None:
    """Add probes for functions (offset → names); of several matching names, the shortest is used."""
    for offset, names in functions.items():
        fitting = [(len(name), name, hook) for name in names if (hook := index.find(name)) is not None]
        if not fitting:
            continue
        _, name, hook = min(fitting, key=lambda item: item[:2])
        found.add(Probe(name, hook.name or name, FilePlace(path, offset), _filed(hook, path, name)), names)
        for _, _, other in fitting:
            found.fits(other)


def _filed(hook: Hook, path: str, symbol: str) -> Hook:
    """The hook with the layer of its file, if it has that one; CUDA functions in a program are in
    `userspace`.
    """
    if hook.layer != OWN_LAYER or hook.layer_name:
        return hook
    if ".so" not in hook.library and _CUDA_FUNCTION.match(symbol):
        return replace(hook, layer="userspace")
    named = hook.library if hook.library and not glob.has_magic(hook.library) else path
    return replace(hook, layer_name=Path(named).name)


def _look_in_kernel(hooks: list[Hook], sources: _Sources, found: _Found) -> None:
    if no_kprobes():
        found.missing(hooks, no_kprobes())
        return
    for modules in dict.fromkeys(hook.modules for hook in hooks):
        own = [hook for hook in hooks if hook.modules == modules]
        absent = not_loaded(modules)
        if absent:
            found.missing(own, absent)
            continue
        try:
            _look_in_modules(modules, own, sources, found)
        except OSError as error:
            found.missing(own, f"{SYMBOLS} cannot be read: {error.strerror}")


def _look_in_modules(modules: tuple[str, ...], hooks: list[Hook], sources: _Sources, found: _Found) -> None:
    index = HookIndex(hooks, found.hooks.variants)
    patterns = [hook.pattern + ending for hook in hooks for ending in ("", *found.hooks.variants)]
    for place in sources.symbols.functions(modules, patterns):
        hook = index.find(place.symbol)
        if hook is not None:
            found.add(Probe(place.symbol, hook.name or place.symbol, place, hook), [place.symbol])
    if found.without_fit(hooks):
        names = {place.symbol for place in sources.symbols.functions(modules, ["*"])}
        where = f" in {', '.join(modules)}" if modules else ""
        found.missing(hooks, lambda hook: f"no such function{where}{_near(hook.pattern, names)}")


def _look_in_tracefs(hooks: list[Hook], sources: _Sources, found: _Found) -> None:
    for hook in hooks:
        reasons = []
        for probe in sources.tracepoints.probes(hook):
            if isinstance(probe, str):
                reasons.append(probe)
            else:
                point = f"{hook.pattern.partition(':')[0]}:{probe.symbol}"
                found.add(probe, [probe.symbol, point])
        if reasons:
            found.missing([hook], "; ".join(dict.fromkeys(reasons)))


_LOOKS: dict[str, Callable[[list[Hook], _Sources, _Found], None]] = {
    "uprobe": _look_in_libraries,
    "kprobe": _look_in_kernel,
    "tracepoint": _look_in_tracefs,
}


def _near(pattern: str, names: Iterable[str]) -> str:
    near = near_names(pattern, list(names))
    return f"; near: {', '.join(near)}" if near else ""


def _check_given(sets: list[HookSet], libraries: LibrarySearch) -> None:
    wanted = tuple(dict.fromkeys(hook.library for hooks in sets for hook in hooks.hooks if hook.library))
    for path in libraries.unused(wanted):
        named = ", ".join(name for name in wanted if "/" not in name) or "none"
        hint = f"Hooks name {named}. For another library: --hook 'uprobe:{path}:FUNCTION'."
        raise InputError("no hook names its file name or its soname", hint, path=path)


def _check_number(probes: list[Probe]) -> None:
    if len(probes) > MOST_PROBES:
        ((hook, count),) = Counter(hook_text(probe.hook) for probe in probes).most_common(1)
        message = (
            f"the hooks match {len(probes)} functions, {hook} alone {count}; "
            f"at most {MOST_PROBES} can be probed"
        )
        raise InputError(message, "Give a narrower pattern, or --exclude 'PATTERN'.")
