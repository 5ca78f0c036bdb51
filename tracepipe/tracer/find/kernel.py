"""Finds functions of the kernel and its modules in /proc/kallsyms, and tracepoints in tracefs.

    ffffffffc0a81230 t nvidia_ioctl<TAB>[nvidia]

A line of kallsyms has address, kind, name and module; the kernel's own functions have no module. A hidden
address reads 0 (kernel.kptr_restrict). A part that the compiler split off a function has a dot in its name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable, InputError, TracepipeError
from tracepipe.hooks.hook import (
    INTEGER_KINDS,
    TEXT_FORMS,
    Argument,
    Condition,
    Hook,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.hooks.names import did_you_mean, near_names
from tracepipe.hooks.signature import Entry, NamedCondition, check_range
from tracepipe.paths import is_folder, is_there
from tracepipe.tracer.bpf.bpf import KPROBE_PMU

SYMBOLS = Path("/proc/kallsyms")
_SYSTEM_MODULES = Path("/sys/module")
_NO_MODULE = (b"bpf", b"__builtin__ftrace", b"__builtin__kprobes")  # code that is made at run time

HOW_TO_MOUNT = (
    "mount -t tracefs none /sys/kernel/tracing   "
    "(a container needs --privileged, or its host's: -v /sys/kernel/tracing:/sys/kernel/tracing:ro)"
)
_FOLDERS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))

_INTERRUPTS = Path("/proc/interrupts")
# `	field:unsigned int ctx;	offset:24;	size:4;	signed:0;`
_FIELD = re.compile(r"field:([^;]*?)(\w+)(\[[^]]*\])?;\s*offset:(\d+);\s*size:(\d+);\s*signed:(\d);")
_SAID = {True: "a text", False: "a number"}
_KINDS = {INTEGER_KINDS[kind]: kind for kind in ("u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64")}


def no_kprobes() -> str:
    """Why this kernel has no kprobes; "" if it has them."""
    return "" if is_there(KPROBE_PMU) else "this kernel has no kprobes (CONFIG_KPROBES, CONFIG_KPROBE_EVENTS)"


def not_loaded(modules: Collection[str]) -> str:
    """Why nothing can be found in `modules`; "" if one of them is loaded, or `modules` is empty."""
    if not modules or any(is_folder(_SYSTEM_MODULES / module) for module in modules):
        return ""
    names = ", ".join(modules)
    if modules and all(module.startswith("nvidia") for module in modules):
        return f"the NVIDIA driver is not loaded on this machine (no module {names})"
    return f"not loaded on this machine: {names}"


class KernelSymbols:
    """The symbols, read once."""

    def __init__(self) -> None:
        self._data = b""

    def functions(self, modules: Collection[str], patterns: Collection[str]) -> Iterator[KernelPlace]:
        """The functions whose names match one of the shell patterns, in these modules, or anywhere if it is
        empty.

        There is one for each name and module. Where addresses are hidden there is one for each name, as the
        kernel then finds the function by its name. Raises OSError.
        """
        data = self._data = self._data or SYMBOLS.read_bytes()
        start = data.rfind(b"\n", 0, max(data.find(b"\t["), 0)) + 1 if modules else 0  # of the first module
        # One regular expression searches all lines: making 200 000 objects of them would take half a second.
        names = b"|".join(map(_in_bytes, patterns))
        suffix = b"|".join(re.escape(module.encode()) for module in modules) or rb"\w+"
        suffix = rb"\t\[(" + suffix + (rb")\]" if modules else rb")\]|")
        form = re.compile(rb"^([0-9a-f]+) [tTwW] (" + names + rb")(?:" + suffix + rb")$", re.MULTILINE)
        found = set()
        for match in form.finditer(data, start):
            address, name, module = int(match[1], 16), match[2], match[3] or b""
            place = (module if address else b"", name)
            if place not in found and module not in _NO_MODULE and b"." not in name:
                found.add(place)
                yield KernelPlace(name.decode(errors="replace"), module.decode(), address)


def _in_bytes(pattern: str) -> bytes:
    """A shell pattern as a regular expression for a name in a line."""
    expression = ""
    for part in re.findall(r"\*|\?|\[!?[^]]+\]|.", pattern):
        if part in "*?":
            expression += r"[^\s.]" + part.strip("?")
        else:
            expression += part.replace("[!", "[^\\s.") if len(part) > 1 else re.escape(part)
    return expression.encode()


def tracing_folder() -> Path:
    """The folder of tracefs, which is mounted now if it was not. Raises CaptureUnavailable."""
    for folder in _FOLDERS:
        if is_folder(folder / "events"):
            return folder
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(_FOLDERS[0]), b"tracefs", 0, None):
        reason = os.strerror(ctypes.get_errno())
        raise CaptureUnavailable(
            f"tracefs is not mounted and cannot be mounted: {reason}.",
            HOW_TO_MOUNT,
        )
    return _FOLDERS[0]


def tracepoint_id(folder: Path, name: str) -> int:
    """The id of the tracepoint `group/name`. Raises CaptureUnavailable."""
    return int(_read(folder, name, "id"))


def field_offsets(folder: Path, name: str) -> dict[str, int]:
    """The offset of every field in the record of the tracepoint `group/name`. Raises CaptureUnavailable."""
    found = _FIELD.findall(_read(folder, name, "format"))
    return {field: int(offset) for _, field, _, offset, _, _ in found}


def _read(folder: Path, name: str, file: str) -> str:
    try:
        return (folder / "events" / name / file).read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # a shortage, not a missing tracepoint
            raise
        raise CaptureUnavailable(
            f"The kernel has no tracepoint {name}: {error.strerror}.",
            "Use a kernel built with CONFIG_FTRACE_SYSCALLS and CONFIG_EVENT_TRACING.",
        ) from None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a tracepoint's record: `offset` and `size` are in bytes; `text_form` is that of a text."""

    name: str
    offset: int
    size: int
    signed: bool
    is_array: bool
    text_form: str = ""

    @property
    def kind(self) -> str:
        """The kind of its values; "" if it cannot be recorded."""
        if self.text_form:
            return "str"
        return "" if self.is_array else _KINDS.get((self.size * 8, self.signed), "")


class Tracepoints:
    """The tracepoints of this machine, read from tracefs on demand. Raises TracepipeError."""

    @cached_property
    def _folder(self) -> Path:
        return tracing_folder() / "events"

    def names(self, pattern: str) -> list[str]:
        """`group:name` of all tracepoints that match a shell pattern of that form."""
        group, _, name = pattern.partition(":")
        return [
            f"{folder}:{event}"
            for folder in self._fitting(self._folder, group)
            for event in self._fitting(self._folder / folder, name)
        ]

    def fields(self, name: str) -> dict[str, Field]:
        """The fields of `group:name`, without those that are common to all tracepoints."""
        text = (self._folder / name.replace(":", "/") / "format").read_text()
        found = {}
        for kind, field, array, offset, size, signed in _FIELD.findall(text):
            form = next((form for form in TEXT_FORMS if form in kind), "array")
            is_array = bool(array) or "[" in kind or form != "array"
            is_text = is_array and re.search(r"(?<!unsigned )\bchar\b", kind) and "*" not in kind
            if not field.startswith("common_"):
                place = int(offset), int(size), signed == "1"
                found[field] = Field(field, *place, is_array, form if is_text else "")
        return found

    def probes(self, hook: Hook) -> Iterator[Probe | str]:
        """The probes for a hook; a text for each matching tracepoint that has none, with the reason."""
        try:
            names = self.names(hook.pattern)
            if not names:
                group, _, own = hook.pattern.partition(":")
                found = [
                    f"{group}:{near}" for near in near_names(own, self._fitting(self._folder / group, "*"))
                ]
                found = found or near_names(hook.pattern, self.names("*:*"))
                found = found or [f"{near}:*" for near in near_names(group, self._fitting(self._folder, "*"))]
                yield f"no such tracepoint{'; near: ' + ', '.join(found) if found else ''}"
            for name in names:
                yield from self._at(name, hook)
        except TracepipeError as error:
            yield f"{error.message} {error.hint}".strip()
        except OSError as error:
            yield f"tracefs cannot be read: {error.strerror}"

    def _at(self, name: str, hook: Hook) -> Iterator[Probe | str]:
        try:
            arguments = self._arguments(name, hook)
            conditions = _conditions(hook, arguments)
        except InputError as error:
            yield f"{error.message} {error.hint}".strip()
            return
        group, _, own = name.partition(":")
        for condition in conditions:
            resolved = replace(
                hook,
                condition=condition,
                signature=replace(hook.signature, arguments=tuple(arguments.values())),
            )
            yield Probe(own, hook.name or own, TracepointPlace(f"{group}/{own}"), resolved)

    def _arguments(self, name: str, hook: Hook) -> dict[str, Argument]:
        fields = self.fields(name) if hook.signature.arguments else {}
        arguments = {}
        for argument in hook.signature.arguments:
            field = fields.get(argument.name)
            if field is None:
                hint = did_you_mean(argument.name, fields)
                raise InputError(f"{name} has no field {argument.name}.", hint)
            if not field.kind:
                usable = [known.name for known in fields.values() if known.kind]
                message = f"{name}: the field {argument.name} is neither a number nor a text."
                raise InputError(message, f"Those that are: {', '.join(usable) or 'none'}.")
            kind = argument.kind or field.kind
            if "str" in (kind, field.kind) and kind != field.kind:
                message = f"{name}: the field {argument.name} is {_SAID[field.kind == 'str']}."
                raise InputError(message, "Leave the kind out.")
            if kind != "str" and Argument("", 0, kind).bits != field.size * 8:
                message = (
                    f"{name}: the field {argument.name} has {field.size * 8} bits, which {kind} has not."
                )
                raise InputError(message, "Leave the kind out.")
            is_array = field.text_form == TEXT_FORMS[0]
            arguments[argument.name] = replace(
                argument,
                position=field.offset,
                kind=kind,
                text_form=field.text_form,
                size_bytes=field.size if is_array else 0,
            )
        return arguments

    def _fitting(self, folder: Path, pattern: str) -> list[str]:
        if not re.search(r"[*?[]", pattern):
            return [pattern] if pattern and paths.is_folder(folder / pattern) else []
        if not paths.is_folder(folder):
            return []
        return sorted(
            path.name
            for path in folder.iterdir()
            if fnmatchcase(path.name, pattern) and paths.is_folder(path)
        )


def interrupts_of(device: str, table: str) -> list[int]:
    """The numbers of the interrupts with an action that starts with `device`, from /proc/interrupts.

    ` 43:   1   0   PCI-MSI 524288-edge   nvidia, snd_hda` : number, a count for each processor, chip,
    actions.
    """
    numbers = []
    for line in table.splitlines()[1:]:
        number, colon, rest = line.partition(":")
        words = re.split(r"[\s,]+", rest)
        if colon and number.strip().isdigit() and any(word.startswith(device) for word in words):
            numbers.append(int(number))
    return numbers


def _conditions(hook: Hook, arguments: dict[str, Argument]) -> list[Condition | None]:
    """The hook's condition on the fields of this machine; one for each interrupt where it names a device."""
    condition = hook.condition
    if condition is None:
        return [None]
    argument = arguments[condition.argument.name]
    if not isinstance(condition, NamedCondition):
        if argument.kind == "str":
            message = f"{argument.name} is a text, which no condition compares."
            raise InputError(message, "Compare a number.")
        found = Condition(argument, condition.operator, condition.value)
        check_range(found, Entry(hook.origin))
        return [found]
    try:
        numbers = interrupts_of(condition.value_name, _INTERRUPTS.read_text())
    except OSError as error:
        raise InputError(f"{_INTERRUPTS} cannot be read: {error.strerror}") from None
    if not numbers:
        raise InputError(f"no device {condition.value_name}* has an interrupt ({_INTERRUPTS})")
    return [Condition(argument, condition.operator, number) for number in numbers]
