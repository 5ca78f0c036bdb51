"""Reads sets of hooks: the shipped ones, users' TOML files of the same form, and hooks on the command line.

    about = "one line"                  source = "where the names come from"
    target = "uprobe:libcuda.so.1"      # or kprobe, kprobe:nvidia,nvidia_uvm (modules), tracepoint
    layer = "userspace"                 variants = ["_v2", "_ptsz"]
    [[hook]]
    functions = ["cuMemAlloc(out address: ptr, size_bytes: u64) -> CUresult"]
    effect = "alloc"                    # and name, layer, target, direction, returns, everywhere, condition
    [values.CUresult]
    0 = "CUDA_SUCCESS"

Everything in a file is checked when it is read; an error names file, hook and field.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final

from tracepipe.errors import InputError
from tracepipe.hooks.calls import CALL_SETS
from tracepipe.hooks.hook import EFFECTS, INTEGER_KINDS, OWN_LAYER, PROBED_LAYERS, Hook
from tracepipe.hooks.names import base_names, did_you_mean
from tracepipe.hooks.signature import (
    Entry,
    ValueNames,
    divided,
    place_and_signature,
    read_condition,
    read_place,
    read_signature,
    starts_as_hook,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


COMMAND_LINE = "--hook"
_FOLDER = Path(__file__).with_name("shipped")
_OF_CUDA = re.compile(r"libcuda(rt)?(-[0-9a-f]{8})?(\.so.*)?")
_TAKEN = ("memory", "transfer", "gpu_kernel", "gpu_warp", "gpu_thread", OWN_LAYER)
_LAYER_NAME_MAX = 64
_SET_FIELDS: dict[str, type] = {
    "about": str, "source": str, "target": str, "layer": str, "variants": list, "hook": list, "values": dict
}  # fmt: skip
_HOOK_FIELDS: dict[str, type] = {
    "functions": list, "name": str, "layer": str, "effect": str, "direction": str, "returns": bool,
    "everywhere": bool, "target": str, "condition": str,
}  # fmt: skip
_TYPE_NAMES = {str: "a text", list: "an array", dict: "a table", bool: "true or false"}
# The arguments that an effect needs; of alternatives in one text, one is enough.
_EFFECT_NEEDS = {
    "alloc": ("address",),
    "free": ("address",),
    "alloc_host": ("address",),
    "free_host": ("address",),
    "set": ("address",),
    "transfer": ("size_bytes or width_bytes",),
    "name": ("handle", "symbol or function"),
    "communicator": ("comm",),
}

MEMORY_EFFECTS: Final = ("alloc", "free", "alloc_host", "free_host", "set")


@dataclass(frozen=True, slots=True)
class HookSet:
    """Hooks in the order in which they are compared with a symbol.

    `variants` are endings that are removed from a symbol to compare it; `values` the names of a kind's
    values; `origin` the file, or the option with a single hook.
    """

    name: str
    about: str = ""
    source: str = ""
    hooks: list[Hook] = field(default_factory=list)
    variants: tuple[str, ...] = ()
    values: dict[str, dict[int, str]] = field(default_factory=dict)
    origin: str = COMMAND_LINE

    @property
    def is_shipped(self) -> bool:
        """Whether the set comes with tracepipe: it is made for many versions, of which a machine has one."""
        return Path(self.origin).parent == _FOLDER


def shipped_sets() -> dict[str, Path]:
    """The sets that come with tracepipe: name → file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def names_hooks(text: str) -> bool:
    """Whether a text has a form that `read_hooks` takes: a set, a file, or a hook with its target."""
    return starts_as_hook(text) or text.endswith(".toml") or text in shipped_sets()


def read_hooks(options: list[str]) -> list[HookSet]:
    """Read options: each is a shipped set's name, a .toml file, or a hook. Raises InputError."""
    shipped = shipped_sets()
    sets = []
    for option in options:
        if option in shipped or option.endswith(".toml"):
            sets.append(load_set(option))
        elif ":" in option:
            sets.append(_of_command_line(option))
        else:
            hint = did_you_mean(option, shipped) or f"Sets: {', '.join(shipped)}."
            message = f"there is no set of hooks {option}"
            raise InputError(
                message, f"{hint} Or write TARGET:PLACE:FUNCTION, or FILE.toml.", path=COMMAND_LINE
            )
    return sets


def load_set(name_or_path: str) -> HookSet:
    """Load the shipped set with that name, or the set in a file. Raises InputError."""
    path = shipped_sets().get(name_or_path, Path(name_or_path))
    return _SetReader(str(path), path.stem).read(_table(path))


def _of_command_line(text: str) -> HookSet:
    """The set of `uprobe:libcuda.so.1:cuInit(flags: u32)`, or of several such texts with commas between. The
    variants that the shipped sets have for a library apply too.
    """
    entry, reader = Entry(COMMAND_LINE, text), _SetReader(COMMAND_LINE, text)
    hooks = [
        hook
        for part in divided(text)
        for hook in reader.hooks(*place_and_signature(part, entry), {}, entry, entry.text)
    ]
    stems = {Path(hook.library).name.partition(".so")[0] for hook in hooks if ".so" in hook.library}
    variants = {end: None for stem, ends in _shipped_variants().items() if stem in stems for end in ends}
    return HookSet(text, hooks=hooks, variants=tuple(variants), values=reader.values)


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", "Check the path.", path=str(path)) from None
    except UnicodeDecodeError:
        raise InputError("not a text in UTF-8", "A set of hooks is a TOML file.", path=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        message = str(error)[: found.start()] if found else str(error)
        raise InputError(
            f"not TOML: {message}",
            "A text is written in quotes; see https://toml.io.",
            path=str(path),
            line=int(found[1]) if found else 0,
        ) from None
    except RecursionError:
        raise InputError("nested too deep", "A set of hooks has three levels.", path=str(path)) from None


@cache
def _shipped_values() -> dict[str, dict[int, str]]:
    """The tables of names of all shipped sets."""
    tables: dict[str, dict[int, str]] = {}
    for path in shipped_sets().values():
        tables |= _SetReader(str(path), path.stem).read_values(_table(path).get("values", {}))
    return tables


@cache
def _shipped_variants() -> dict[str, tuple[str, ...]]:
    """The variants of the shipped sets: library, without `.so` → endings."""
    return {
        table["target"].removeprefix("uprobe:").partition(".so")[0]: tuple(table["variants"])
        for table in map(_table, shipped_sets().values())
        if "variants" in table
    }


class _SetReader:
    """Reads a file or a hook; `values` has the tables of names that its hooks may use."""

    def __init__(self, origin: str, name: str) -> None:
        self._origin, self._name = origin, name
        self.values: dict[str, dict[int, str]] = {}

    def read(self, table: dict[str, Any]) -> HookSet:
        """The set in a parsed file."""
        entry = Entry(self._origin)
        _check_fields(table, _SET_FIELDS, entry)
        variants = _texts(table.get("variants", []), "variants", entry)
        self.values = self.read_values(table.get("values", {}))
        hooks = [
            hook
            for number, row in enumerate(table.get("hook", []), 1)
            for hook in self._row(number, row, table)
        ]
        if not hooks:
            raise entry.wrong("hook", "there is no hook in it", 'Add [[hook]] with functions = ["NAME"].')
        return HookSet(
            self._name,
            " ".join(table.get("about", "").split()),
            table.get("source", ""),
            hooks,
            tuple(variants),
            self.values,
            self._origin,
        )

    def read_values(self, tables: dict[str, Any]) -> dict[str, dict[int, str]]:
        """The tables [values.KIND] of a file: kind → number → name."""
        read: dict[str, dict[int, str]] = {}
        for kind, rows in tables.items():
            entry = Entry(self._origin, f"values.{kind}")
            if kind in (*INTEGER_KINDS, "str", "dim3") or not kind.isidentifier():
                raise entry.wrong("", "cannot be a kind's name", "Give it another name.")
            if not isinstance(rows, dict):
                raise entry.wrong("", "not a table", f'Write [values.{kind}] and lines such as 0 = "NAME".')
            read[kind] = {}
            for number, name in rows.items():
                if not isinstance(name, str):
                    raise entry.wrong(number, "its name is no text", f'Write {number} = "NAME".')
                try:
                    read[kind][int(number, 0)] = name
                except ValueError:
                    raise entry.wrong(number, "not a number", f'Write NUMBER = "{name}".') from None
        return read

    def hooks(self, target: str, text: str, row: dict[str, Any], entry: Entry, group: str) -> list[Hook]:
        """The hooks of a signature with its fields in `row`, one for each name and library."""
        kind, libraries, modules = read_place(target, entry)
        patterns, signature, condition = read_signature(text, kind, self._find_table, entry)
        is_tracepoint = kind == "tracepoint"
        if condition is None and (stated := row.get("condition", "")):
            arguments = signature.arguments
            condition = read_condition(stated, arguments, self._find_table, entry, is_tracepoint)
        first = Hook(
            kind,
            "",
            "",
            "",
            signature,
            name=row.get("name", ""),
            condition=condition,
            returns=row.get("returns", True) and not is_tracepoint,
            effect=row.get("effect", ""),
            direction=row.get("direction", ""),
            modules=modules,
            everywhere=row.get("everywhere", False),
            origin=f"{entry.origin}: {entry.text}",
            group=f"{entry.origin}: {group}",
        )
        _check_hook(first, entry)
        own = _layer(row["layer"], entry) if "layer" in row else None
        hooks = []
        for library in libraries:
            layer, layer_name = own or (layer_of(kind, library), "")
            given = replace(first, library=library, layer=layer, layer_name=layer_name)
            hooks += [replace(given, pattern=pattern) for pattern in patterns]
        return hooks

    def _row(self, number: int, row: object, table: dict[str, Any]) -> list[Hook]:
        entry = Entry(self._origin, f"hook {number}")
        if not isinstance(row, dict):
            raise entry.wrong("", "not a table", "Write [[hook]] above its lines.")
        _check_fields(row, _HOOK_FIELDS, entry)
        texts = _texts(row.get("functions", []), "functions", entry)
        if not texts:
            raise entry.wrong("functions", "there are none", 'Write functions = ["NAME"].')
        target = row.get("target", table.get("target"))
        if target is None:
            raise entry.wrong("target", "there is none", 'Write target = "uprobe:LIBRARY" at the top.')
        if "layer" in table:
            row = {"layer": table["layer"], **row}
        own = f"hook {number}"
        return [
            hook
            for text in texts
            for hook in self.hooks(target, text, row, Entry(self._origin, f"{own}, {text}"), own)
        ]

    def _find_table(self, kind: str) -> ValueNames | None:
        if kind not in self.values and kind in _shipped_values():
            self.values[kind] = _shipped_values()[kind]
        return self.values.get(kind)


def _layer(stated: str, entry: Entry) -> tuple[str, str]:
    """The layer that a hook states, and its name if it is not a known one. Raises InputError."""
    if stated in PROBED_LAYERS:
        return stated, ""
    if near := get_close_matches(stated, PROBED_LAYERS, 1, 0.8):
        hint = f"Did you mean {near[0]}? A new layer needs a name that differs more."
        raise entry.wrong("layer", f"no layer {stated}", hint)
    if stated in _TAKEN:
        hint = f"Use {', '.join(PROBED_LAYERS)}, or a new name."
        raise entry.wrong("layer", f"hooks cannot make events of {stated}", hint)
    if not stated.isprintable() or not 0 < len(stated) <= _LAYER_NAME_MAX:
        raise entry.wrong("layer", f"{stated!r} is no name", f"Write 1 to {_LAYER_NAME_MAX} letters.")
    return OWN_LAYER, stated


def layer_of(target: str, library: str) -> str:
    """The layer of a hook that states none: a library other than CUDA's has a layer with the file's name."""
    if target != "uprobe":
        return "kernel"
    return "userspace" if _OF_CUDA.fullmatch(Path(library).name) else OWN_LAYER


def _check_hook(hook: Hook, entry: Entry) -> None:
    if hook.effect not in EFFECTS:
        known = [effect for effect in EFFECTS if effect]
        raise entry.wrong("effect", f"no effect {hook.effect}", did_you_mean(hook.effect, known))
    names = {argument.name for argument in hook.signature.arguments}
    for needed in _EFFECT_NEEDS.get(hook.effect, ()):
        if names.isdisjoint(needed.split(" or ")):
            hint = f"Name {needed} among its arguments."
            raise entry.wrong("effect", f"{hook.effect} needs the argument {needed}", hint)
    if not hook.returns:
        waits = [argument.name for argument in hook.signature.arguments if argument.out]
        waits += [f"-> {hook.signature.result}"] * bool(hook.signature.result)
        # The effect `name` needs no return: it names a handle that the caller passes.
        waits += [f"effect {hook.effect}"] * (hook.effect not in ("", "name"))
        if waits:
            what = "a tracepoint" if hook.target == "tracepoint" else "returns = false"
            message = f"{what} has no return, which {waits[0]} needs"
            raise entry.wrong("returns", message, f"Leave {waits[0]} out.")


def _check_fields(table: dict[str, Any], fields: dict[str, type], entry: Entry) -> None:
    for key, value in table.items():
        if key not in fields:
            raise entry.wrong(key, "there is no such field", did_you_mean(key, fields))
        if not isinstance(value, fields[key]):
            raise entry.wrong(key, f"not {_TYPE_NAMES[fields[key]]}", f"It is {value!r}.")


def _texts(values: Collection[object], name: str, entry: Entry) -> list[str]:
    for value in values:
        if not isinstance(value, str) or not value:
            raise entry.wrong(name, f"{value!r} is no text", 'Write ["NAME", …].')
    return [str(value) for value in values]


@cache
def _effects() -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Function → effect and direction in the shipped hooks; and the endings that a name may have."""
    known: dict[str, tuple[str, str]] = {}
    variants: set[str] = set()
    for table in (_table(shipped_sets()[name]) for name in CALL_SETS):
        variants.update(table["variants"])
        for row in (row for row in table["hook"] if "effect" in row):
            # Reading the arguments too takes five times as long.
            names = [name.strip() for text in row["functions"] for name in text.partition("(")[0].split("|")]
            known |= dict.fromkeys(names, (row["effect"], row.get("direction", "")))
    return known, tuple(sorted(variants, key=len, reverse=True))


def effect_of(name: str) -> tuple[str, str]:
    """The effect of a successful call (`alloc`, …, `transfer`) and its direction; "" if unknown."""
    known, variants = _effects()
    return next((known[base] for base in base_names(name, variants) if base in known), ("", ""))
