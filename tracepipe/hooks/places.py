"""Reads where a hook looks for functions: `uprobe:libcuda.so.1`, `kprobe:nvidia,nvidia_uvm`, `tracepoint`.

hooks     = hook {"," hook}            of the command line: at least one must exist
hook      = TARGET ":" [PLACE ":"] SIGNATURE
PLACE     = LIBRARY {"," LIBRARY}      of a uprobe: a soname, a path, a pattern of paths, "" for the program
          | MODULE {"," MODULE}        of a kprobe
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracepipe.hooks.near_names import did_you_mean
from tracepipe.hooks.signature import Entry

TARGETS = ("uprobe", "kprobe", "tracepoint")
_RETURN_TARGETS = ("uretprobe", "kretprobe")  # bpftrace's
# A path may have a colon, so what follows must look like a signature.
_PLACE_AND_SIGNATURE = re.compile(r"(?P<place>.*?):(?P<signature>[\w.$@*?\[\]!|,-]+\s*(?:[(\s].*|$))")
_NEXT_HOOK = re.compile(rf",\s*(?=(?:{'|'.join((*TARGETS, *_RETURN_TARGETS))}):)")
_ANY_VERSION = re.compile(r"\.so\.?\*$")


@dataclass(frozen=True, slots=True)
class HookPlace:
    """A target; a uprobe's libraries, or a kprobe's kernel modules, all if empty."""

    target: str
    libraries: tuple[str, ...] = ("",)
    modules: tuple[str, ...] = ()


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


def read_place(text: str, entry: Entry) -> HookPlace:
    """Read the part before a signature. Raises InputError."""
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
        return HookPlace(target, tuple(dict.fromkeys(names)))
    modules = tuple(name.strip().replace("-", "_") for name in place.split(",") if name.strip())
    wrong = next((name for name in modules if not re.fullmatch(r"\w+", name)), None)
    if wrong is not None:
        raise entry.wrong("target", f"{wrong} is no module's name", "Write kprobe:nvidia,nvidia_uvm.")
    return HookPlace(target, modules=modules)


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
