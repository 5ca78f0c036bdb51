"""Reads hooks as they are written: where to look, and the signature of the functions.

    hooks     = hook {"," hook}            on the command line: at least one must exist
    hook      = TARGET ":" [PLACE ":"] SIGNATURE
    TARGET    = uprobe | kprobe | tracepoint
    PLACE     = LIBRARY {"," LIBRARY}      a uprobe: a soname, a path, a pattern of paths, "" the program
              | MODULE {"," MODULE}        a kprobe
    SIGNATURE = NAME-PATTERN {"|" NAME-PATTERN} [ "(" argument {"," argument} ")" ] [ "->" KIND ]
                [ "if" NAME OPERATOR VALUE ]
    argument  = "_" | ["out"] NAME [":" KIND]

`uprobe:libcuda.so.1:cuMemAlloc*(out address: ptr, size_bytes: u64) -> CUresult if size_bytes > 4`

Of several names, at least one must exist. A tracepoint without a group has that of the one before it. The
position of an argument in the text is that in the call; the arguments of a tracepoint are fields, by name.

A structure that is passed by value (`hash128`) lies on the stack on x86-64, where it takes no register, and
behind a pointer on aarch64.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tracepipe.errors import InputError
from tracepipe.hooks.hook import (
    HASH_KINDS,
    HASHED_WORDS,
    INTEGER_KINDS,
    OPERATORS,
    WHOLE_KINDS,
    Argument,
    Condition,
    Signature,
)
from tracepipe.hooks.names import did_you_mean
from tracepipe.hooks.slots import MAX_SLOTS, slots

WORDS = 16
"""The machine words of arguments that can be read: registers, then the stack."""
REGISTERS = 6
"""The words of arguments that x86-64 passes in registers."""
FIELDS = 4
"""The most fields in the record of a tracepoint's hit."""

ValueNames = Mapping[int, str]
FindTable = Callable[[str], "ValueNames | None"]
"""Returns the names of a kind's values, None if no set has the kind."""

_SIGNATURE = re.compile(
    r"(?P<pattern>[^\s()]+)\s*(?:\((?P<arguments>[^()]*)\))?\s*(?:->\s*(?P<result>[^\s()]+))?"
    r"\s*(?:\bif\s+(?P<condition>.+))?"
)
_PATTERN = re.compile(r"[\w.$@*?\[\]!:-]+")
_ALTERNATIVE = "|"
_ARGUMENT = re.compile(r"(?:(out)\s+)?([^\s:]+)(?:\s*:\s*(\S+))?")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[xyz])?")
_FORM = "Write NAME(ARGUMENT, …) -> KIND if NAME OPERATOR VALUE; all but the name may be left out."
_BY_VALUE = "stack" if platform.machine() == "x86_64" else "pointer"
_TRUTH = {"true": "1", "false": "0"}
_CONDITION = re.compile(r"([\w.]+)\s*([=!<>&~|^]+)\s*(\S+)")

TARGETS = ("uprobe", "kprobe", "tracepoint")
_RETURN_TARGETS = ("uretprobe", "kretprobe")  # bpftrace's
# A path may have a colon, so what follows must look like a signature.
_PLACE_AND_SIGNATURE = re.compile(r"(?P<place>.*?):(?P<signature>[\w.$@*?\[\]!|,-]+\s*(?:[(\s].*|$))")
_NEXT_HOOK = re.compile(rf",\s*(?=(?:{'|'.join((*TARGETS, *_RETURN_TARGETS))}):)")
_ANY_VERSION = re.compile(r"\.so\.?\*$")


@dataclass(frozen=True, slots=True)
class NamedCondition(Condition):
    """A condition whose value is a name, for which the machine has numbers: `irq == nvidia`. `value` is 0."""

    value_name: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a hook for messages: the file, and the hook in it."""

    origin: str
    text: str = ""

    def wrong(self, field: str, message: str, hint: str = "") -> InputError:
        """The error for this place."""
        place = ", ".join(part for part in (self.text, field) if part)
        return InputError(message, hint, path=self.origin, field=place)


def read_signature(
    text: str, target: str, find_table: FindTable, entry: Entry
) -> tuple[tuple[str, ...], Signature, Condition | None]:
    """Read the signature of a hook on `target` (uprobe, kprobe, tracepoint), its patterns of names and its
    condition. The kind of a tracepoint's field is "" if the text gives none. Raises InputError.
    """
    match = _SIGNATURE.fullmatch(text.strip())
    if match is None:
        raise entry.wrong("", "not a signature", _FORM)
    is_tracepoint = target == "tracepoint"
    patterns = _patterns(match["pattern"], is_tracepoint, entry)
    arguments = _read_arguments(match["arguments"] or "", target, find_table, entry)
    result = match["result"] or ""
    if result:
        if is_tracepoint:
            raise entry.wrong("result", "a tracepoint has no result", f"Leave -> {result} out.")
        _check_kind("result", result, find_table, entry, whole=False)
    condition = None
    if match["condition"] is not None:
        condition = read_condition(match["condition"], arguments, find_table, entry, is_tracepoint)
    return patterns, Signature(arguments, result), condition


def _patterns(text: str, is_tracepoint: bool, entry: Entry) -> tuple[str, ...]:
    patterns: list[str] = []
    for name in text.split(_ALTERNATIVE):
        if not _PATTERN.fullmatch(name):
            hint = f"{_FORM} Of several names write a|b." if "," in name else _FORM
            raise entry.wrong("", "not a signature", hint)
        if is_tracepoint and ":" not in name and patterns:
            name = f"{patterns[-1].partition(':')[0]}:{name}"
        if is_tracepoint == (":" not in name):
            form = (
                "group:name, such as sched:sched_switch" if is_tracepoint else "a function's name, without :"
            )
            raise entry.wrong("", f"the name {name} does not fit", f"Write {form}.")
        patterns.append(name)
    return tuple(dict.fromkeys(patterns))


def read_condition(
    text: str, arguments: tuple[Argument, ...], find_table: FindTable, entry: Entry, is_tracepoint: bool
) -> Condition:
    """Read a condition on one of `arguments`. Raises InputError."""
    match = _CONDITION.fullmatch(text.strip())
    if match is None:
        raise entry.wrong(
            "condition", f"cannot be read: {text}", "Write NAME OPERATOR VALUE: size_bytes > 0."
        )
    name, operator, value = match.groups()
    if operator not in OPERATORS:
        hint = "Write ==." if operator == "=" else f"Operators: {' '.join(OPERATORS)}."
        raise entry.wrong("condition", f"no operator {operator}", hint)
    argument = next((known for known in arguments if known.name == name), None)
    if argument is None:
        names = [known.name for known in arguments]
        hint = did_you_mean(name, names) or f"Name it among the arguments: NAME(…, {name}, …)."
        raise entry.wrong("condition", f"{name} is not recorded", hint)
    if argument.out or argument.kind in WHOLE_KINDS:
        what = "is known only when the call returns" if argument.out else f"is a {argument.kind}"
        raise entry.wrong("condition", f"{name} {what}", "Compare a number that is passed in.")
    try:
        condition = Condition(argument, operator, int(_TRUTH.get(value, value), 0))
    except ValueError:  # the name of a value
        if table := None if argument.kind in INTEGER_KINDS else find_table(argument.kind):
            numbers = {known: number for number, known in table.items()}
            if value in numbers:
                return Condition(argument, operator, numbers[value])
            message = f"{argument.kind} has no value {value}"
            raise entry.wrong("condition", message, did_you_mean(value, list(numbers))) from None
        if not is_tracepoint or name != "irq":
            raise entry.wrong("condition", f"{value} is no number", "Write 4096 or 0x1000.") from None
        if operator != "==":
            hint = "A device's name is compared by ==."
            raise entry.wrong("condition", f"irq {operator} {value}", hint) from None
        return NamedCondition(argument, operator, 0, value)
    check_range(condition, entry)
    return condition


def check_range(condition: Condition, entry: Entry) -> None:
    """Raises InputError if no value of the argument's kind can equal the condition's."""
    if not condition.argument.kind:  # a field, whose kind comes from its tracepoint
        return
    bits, signed = INTEGER_KINDS.get(condition.argument.kind, (32, True))
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if not low <= condition.value <= high:
        kind = condition.argument.kind
        raise entry.wrong("condition", f"{condition.value} is no {kind}", f"Give {low} to {high}.")


def _read_arguments(text: str, target: str, find_table: FindTable, entry: Entry) -> tuple[Argument, ...]:
    """The arguments that are recorded."""
    is_tracepoint = target == "tracepoint"
    found: dict[str, Argument] = {}
    word = on_stack = 0
    for part in map(str.strip, text.split(",") if text.strip() else ()):
        if part == "_" and not is_tracepoint:
            word += 1
            continue
        match = _ARGUMENT.fullmatch(part)
        if match is None or not _NAME.fullmatch(match[2]) or match[2] == "_":
            hint = "Write NAME, NAME: KIND or out NAME: KIND"
            hint += "." if is_tracepoint else "; _ alone stands for one that is not recorded."
            raise entry.wrong("arguments", f"cannot read {part!r}", hint)
        out, name, kind = bool(match[1]), match[2], match[3]
        field = f"argument {name}"
        if name in found:
            raise entry.wrong(field, "there are two of this name", "Give each a different name.")
        if is_tracepoint and (out or kind in ("dim3", *HASH_KINDS)):
            raise entry.wrong(field, "tracepoints have only numbers and texts", "Leave it out.")
        if kind in HASH_KINDS and target != "uprobe":
            raise entry.wrong(field, f"{kind} is of libraries' functions", "Leave it out.")
        if kind is not None:
            _check_kind(field, kind, find_table, entry, whole=not out)
        place = word + (on_stack if word >= REGISTERS else 0)
        argument = Argument(name, place, kind or ("" if is_tracepoint else "u64"), out)
        if kind == "hash128" and _BY_VALUE == "pointer":
            argument = replace(argument, kind="hash128*")
        elif kind == "hash128":
            argument = replace(argument, position=max(place, REGISTERS))
            on_stack += HASHED_WORDS
            word -= 1
        found[name] = argument
        width = 2 if kind == "dim3" else 1
        word += width
        if place + width > WORDS:
            message = f"it is word {place + width} of the arguments; {WORDS} can be read"
            raise entry.wrong(field, message, "Leave it out.")
    arguments = tuple(found.values())
    if is_tracepoint:
        if len(arguments) > FIELDS:
            message = f"{len(arguments)} fields; at most {FIELDS} can be recorded"
            raise entry.wrong("arguments", message, "Leave some out.")
        return arguments
    for what, some in (
        ("str", [known for known in arguments if known.kind == "str"]),
        ("hash128", [known for known in arguments if known.is_hashed]),
        ("out", [known for known in arguments if known.out]),
    ):
        if len(some) > 1:
            message = f"{len(some)} {what} arguments; one can be recorded"
            raise entry.wrong(f"argument {some[1].name}", message, "Write _ in its place.")
    count = len(slots(Signature(arguments)))
    if count > MAX_SLOTS:
        message = f"they take {count} words of 64 bits; {MAX_SLOTS} can be recorded"
        hint = "Write _ for some, or give u32 kinds: two in a row share a word."
        raise entry.wrong("arguments", message, hint)
    return arguments


def _check_kind(field: str, kind: str, find_table: FindTable, entry: Entry, *, whole: bool) -> None:
    """Raises InputError if there is no such kind; `whole`: a text and a dim3 are allowed."""
    if kind in WHOLE_KINDS:
        if not whole:
            hint = f"Use one of {', '.join(INTEGER_KINDS)}, or a table of names."
            raise entry.wrong(field, f"{kind} cannot be recorded here", hint)
    elif kind not in INTEGER_KINDS and find_table(kind) is None:
        hint = did_you_mean(kind, [*INTEGER_KINDS, *WHOLE_KINDS])
        hint = f"{hint} Or give the names of its values as [values.{kind}]."
        raise entry.wrong(field, f"no kind {kind}", hint.strip())


def starts_as_hook(text: str) -> bool:
    """Whether a text begins as a hook of the command line."""
    return text.strip().partition(":")[0] in (*TARGETS, *_RETURN_TARGETS) and ":" in text


def divided(text: str) -> list[str]:
    """Split hooks of the command line at commas, but not at those between arguments."""
    parts, start = [], 0
    for comma in _NEXT_HOOK.finditer(text):
        before = text[start : comma.start()]
        if before.count("(") == before.count(")"):
            parts.append(before)
            start = comma.end()
    return [*parts, text[start:]]


def place_and_signature(text: str, entry: Entry) -> tuple[str, str]:
    """Split a hook of the command line into target with place, and signature. Raises InputError."""
    target, _, rest = text.strip().partition(":")
    _check_target(target, entry)
    match = _PLACE_AND_SIGNATURE.fullmatch(rest) if target != "tracepoint" else None
    if match:
        return f"{target}:{match['place']}", match["signature"]
    if target == "uprobe":
        hint = "Write uprobe:LIBRARY:FUNCTION, or uprobe::FUNCTION for one of the program itself."
        raise entry.wrong("", "there is no library or no function in it", hint)
    return f"{target}:", rest


def read_place(text: str, entry: Entry) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Read the part before a signature: the target, a uprobe's libraries ("" for others), and a kprobe's
    kernel modules, all if empty. Raises InputError.
    """
    target, colon, place = text.partition(":")
    _check_target(target, entry)
    if target == "tracepoint" and place:
        raise entry.wrong(
            "target", f"a tracepoint has no {place}", "Write tracepoint, and group:name as function."
        )
    if target == "uprobe":
        if not colon:
            hint = "Write uprobe:libcuda.so.1, or uprobe: for the program itself."
            raise entry.wrong("target", "a uprobe needs a library", hint)
        names = [
            _ANY_VERSION.sub(".so", name.strip()) if "/" not in name else name.strip()
            for name in place.split(",")
        ]
        return target, tuple(dict.fromkeys(names)), ()
    modules = tuple(name.strip().replace("-", "_") for name in place.split(",") if name.strip())
    wrong = next((name for name in modules if not re.fullmatch(r"\w+", name)), None)
    if wrong is not None:
        raise entry.wrong("target", f"{wrong} is no module's name", "Write kprobe:nvidia,nvidia_uvm.")
    return target, ("",), modules


def _check_target(target: str, entry: Entry) -> None:
    if target in _RETURN_TARGETS:
        hint = (
            f"Write {target.replace('ret', '')}: a hook records entry and return, with the result of -> KIND."
        )
        raise entry.wrong("target", f"no target {target}", hint)
    if target not in TARGETS:
        hint = did_you_mean(target, TARGETS)
        hint = f"{hint} tracepipe hooks list '{entry.text}' shows hooks that fit a pattern."
        raise entry.wrong("target", f"no target {target}", hint)
