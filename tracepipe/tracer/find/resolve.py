"""Resolves hooks to probes: the functions and tracepoints that hooks name and this machine has.

Each place gets one probe: that of the first set, and within it of the hook that applies (hooks/names.py).
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Collection, Iterable
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
        wanted = tuple(dict.fromkeys(hook.library for hooks in sets for hook in hooks.hooks if hook.library))
        for path in libraries.unused(wanted):
            named = ", ".join(name for name in wanted if "/" not in name) or "none"
            hint = f"Hooks name {named}. For another library: --hook 'uprobe:{path}:FUNCTION'."
            raise InputError("no hook names its file name or its soname", hint, path=path)
    tables, symbols, tracepoints = FunctionTables(notify), KernelSymbols(), Tracepoints()
    selection = Selection()
    owners: dict[object, str] = {}  # place → the origin of the hook that has its probe
    accepted: set[tuple[object, Condition | None]] = set()

    for hooks in sets:
        wanted_names = NameFilter(only, exclude, hooks.variants)
        search = _SetSearch(hooks, wanted_names, libraries, tables, symbols, tracepoints)
        for probe in search.probes:
            place: object = probe.place
            if isinstance(probe.place, FilePlace):
                place = tables.ids[probe.place.path], probe.place.offset
            # A hook may have several probes at one place, each with its own condition.
            is_owner = owners.setdefault(place, probe.hook.origin) == probe.hook.origin
            if is_owner and (place, probe.hook.condition) not in accepted:
                accepted.add((place, probe.hook.condition))
                selection.probes.append(probe)
        search.report(selection)
    count = len(selection.probes)
    if not is_partial and count > MOST_PROBES:
        ((text, most),) = Counter(hook_text(probe.hook) for probe in selection.probes).most_common(1)
        raise InputError(
            f"the hooks match {count} functions, {text} alone {most}; at most {MOST_PROBES} can be probed",
            "Give a narrower pattern, or --exclude 'PATTERN'.",
        )
    return selection


def hook_text(hook: Hook) -> str:
    """The text of a hook as the command line writes it: `kprobe:nvidia_*`."""
    place = [hook.library] if hook.target == "uprobe" else [",".join(hook.modules)] * bool(hook.modules)
    return ":".join([hook.target, *place, hook.pattern])


@dataclass
class _SetSearch:
    """The search for one set: its probes, which of its hooks match something, and why the others do not."""

    hooks: HookSet
    wanted: NameFilter
    libraries: LibrarySearch
    tables: FunctionTables
    symbols: KernelSymbols
    tracepoints: Tracepoints
    probes: list[Probe] = field(default_factory=list)
    _fitted: set[str] = field(default_factory=set)
    _groups: set[str] = field(default_factory=set)
    _reasons: dict[tuple[str, str], Hook] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target, look in {
            "uprobe": self._look_in_libraries,
            "kprobe": self._look_in_kernel,
            "tracepoint": self._look_in_tracefs,
        }.items():
            if some := [hook for hook in self.hooks.hooks if hook.target == target]:
                look(some)

    def _look_in_libraries(self, all_hooks: list[Hook]) -> None:
        libraries, tables, variants = self.libraries, self.tables, self.hooks.variants
        for library in dict.fromkeys(hook.library for hook in all_hooks):
            hooks = [hook for hook in all_hooks if hook.library == library]
            index = HookIndex(hooks, variants)
            files = tables.functions_of(library, libraries, index)
            for path, functions in files.items():
                self._add_functions(path, functions, index)
            if not self.hooks.is_shipped and self._without_fit(hooks):
                for path in files:  # a user may name a function that is not exported
                    self._add_functions(
                        path, tables.all_of(path), HookIndex(self._without_fit(hooks), variants)
                    )
            if not files:
                name = library or "the program"
                self._missing(hooks, f"no {name} found: {libraries.where(library)}")
            elif self._without_fit(hooks):
                names = {name for path in files for found in tables.all_of(path).values() for name in found}
                damaged = [tables.unreadable[path] for path in files if path in tables.unreadable]
                self._missing(
                    hooks, "; ".join(damaged[:3]) or f"no such function in {' or '.join(files)}", names
                )

    def _add_functions(self, path: str, functions: dict[int, list[str]], index: HookIndex) -> None:
        """Add probes for functions (offset → names); of several matching names, the shortest is used."""
        for offset, names in functions.items():
            fitting = [(len(name), name, hook) for name in names if (hook := index.find(name)) is not None]
            if not fitting:
                continue
            _, name, hook = min(fitting, key=lambda item: item[:2])
            place = FilePlace(path, offset)
            self._add(Probe(name, hook.name or name, place, _in_files_layer(hook, path, name)), names)
            for _, _, other in fitting:
                self._note_fit(other)

    def _look_in_kernel(self, all_hooks: list[Hook]) -> None:
        for modules in dict.fromkeys(hook.modules for hook in all_hooks):
            hooks = [hook for hook in all_hooks if hook.modules == modules]
            if reason := no_kprobes() or not_loaded(modules):
                self._missing(hooks, reason)
                continue
            index, symbols = HookIndex(hooks, self.hooks.variants), self.symbols
            patterns = [hook.pattern + ending for hook in hooks for ending in ("", *self.hooks.variants)]
            try:
                for place in symbols.functions(modules, patterns):
                    if (hook := index.find(place.symbol)) is not None:
                        self._add(Probe(place.symbol, hook.name or place.symbol, place, hook), [place.symbol])
                if self._without_fit(hooks):
                    names = {place.symbol for place in symbols.functions(modules, ["*"])}
                    where = f" in {', '.join(modules)}" if modules else ""
                    self._missing(hooks, f"no such function{where}", names)
            except OSError as error:
                self._missing(hooks, f"{SYMBOLS} cannot be read: {error.strerror}")

    def _look_in_tracefs(self, hooks: list[Hook]) -> None:
        for hook in hooks:
            reasons = []
            for probe in self.tracepoints.probes(hook):
                if isinstance(probe, str):
                    reasons.append(probe)
                else:
                    point = f"{hook.pattern.partition(':')[0]}:{probe.symbol}"
                    self._add(probe, [probe.symbol, point])
            if reasons:
                self._missing([hook], "; ".join(dict.fromkeys(reasons)))

    def _add(self, probe: Probe, names: Iterable[str]) -> None:
        """Add a probe, unless the user has excluded one of its names."""
        self._note_fit(probe.hook)
        if self.wanted.passes(names):
            self.probes.append(probe)

    def _note_fit(self, hook: Hook) -> None:
        """Note that the hook has matched something, even if only another name of a place that has a probe."""
        self._fitted.add(hook.origin)
        self._groups.add(hook.group)

    def _without_fit(self, hooks: Iterable[Hook]) -> list[Hook]:
        """The hooks that have found nothing, that are reported to the user."""
        if self.hooks.is_shipped and self._fitted:
            return []  # a shipped set names functions of many versions
        return [hook for hook in hooks if hook.origin not in self._fitted]

    def _missing(self, hooks: Iterable[Hook], reason: str, names: Collection[str] = ()) -> None:
        """Note why those of the hooks that match nothing do not; `names`: those that are there."""
        for hook in self._without_fit(hooks):
            near = near_names(hook.pattern, names)
            stated = f"{reason}; near: {', '.join(near)}" if near else reason
            self._reasons.setdefault((hook.origin, stated), hook)

    def report(self, selection: Selection) -> None:
        """Add the messages for the user about a set or its hooks, joined where the reason is the same."""
        lacking: dict[str, list[Hook]] = {}
        skipped: dict[str, list[Hook]] = {}
        for (origin, reason), hook in self._reasons.items():
            if origin not in self._fitted:  # an alternative may have been found since then
                which = skipped if hook.group in self._groups else lacking
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
            over = self._messages(skipped)
            selection.skipped.extend(f"{place}: {why}" for place, why in over.items())

    def _messages(self, by_reason: dict[str, list[Hook]]) -> dict[str, str]:
        messages = {}
        for reason, hooks in by_reason.items():
            more = f" and {len(hooks) - 1} more" if len(hooks) > 1 else ""
            messages[f"{self.hooks.name}, {hook_text(hooks[0])}{more}"] = reason
        return messages


def _in_files_layer(hook: Hook, path: str, symbol: str) -> Hook:
    """The hook with its file's own layer, if it has that one; CUDA's are in `userspace`."""
    if hook.layer != OWN_LAYER or hook.layer_name:
        return hook
    if ".so" not in hook.library and _CUDA_FUNCTION.match(symbol):
        return replace(hook, layer="userspace")
    named = hook.library if hook.library and not glob.has_magic(hook.library) else path
    return replace(hook, layer_name=Path(named).name)
