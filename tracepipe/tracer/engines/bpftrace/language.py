"""The language between this program and the bpftrace script: lines, orders, and pieces of script.

Every event is one line of hexadecimal numbers:

    OP TS TID CPU SEQ FIELD …

    OP    what happened (`LineKind`), followed by the index of the probe where there is one: `c1f`
    TS    `nsecs`, whose clock differs between versions of bpftrace
    TID   the current thread, 0 for a processor's idle thread
    SEQ   counts the lines of this thread and layer, so a gap shows how many were lost

A text is the last field, unescaped, and ends with a random mark: the text may contain anything else.

bpftrace accepts no commands while it runs. The script therefore has a probe on a function of the C library
that only this process calls, with orders as arguments (`Order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tracepipe.hooks.hook import INTEGER_KINDS, Condition
from tracepipe.tracer.records.record import DROP_LAYERS
from tracepipe.tracer.request import Filters

TEXT_PIECE_BYTES = 124
"""The size of a piece of text; two pieces make TEXT_BYTES. Printing needs a string twice on BPF's stack of
512 bytes.
"""
IDLE = 1 << 32
"""Plus the processor: the key of an idle thread's sequence of lines, as all idle threads have the tid 0."""


class Order(IntEnum):
    """What this process tells the script: the second argument of its call; the first is the word."""

    TRACK = 1  # word: tgid<<32|tid of a thread that already exists
    START = 2  # word: process whose next exec starts the recording, or 0
    MARK = 3  # print after all earlier lines of this processor; word: the number of the mark
    STOP = 4  # stop following threads, then as MARK
    COUNTS = 5  # print the last sequence numbers and the filtered events, then as MARK


class LineKind:
    """The first letters of the lines."""

    ENTER = "c"  # tgid [began] [served] slot …
    TEXT = "s"  # piece of an entry's text or index of a hit's, text; SEQ is that of the next line
    RETURN = "r"  # tgid [served] result [out]
    HIT = "v"  # tgid, up to four values
    SYSCALL_ENTER = "n"  # tgid [began] number a0 a1 a2 a3
    SYSCALL_EXIT = "x"  # tgid number result
    SWITCH_OUT = "o"  # tgid state note
    SWITCH_IN = "i"  # tid tgid note
    WAKEUP = "w"  # tid tgid processor
    MIGRATE = "m"  # tid tgid from to
    THREAD_NEW = "t"  # tid tgid, text
    THREAD_NAME = "a"  # tid tgid, text
    MARK = "k"  # word; SEQ is 0 from the control probe that is listed first, 1 from the last


SYSCALL, SCHEDULER = DROP_LAYERS.index("syscall"), DROP_LAYERS.index("scheduler")
THREADS = DROP_LAYERS.index(None)
_PER_THREAD = "(uint64)tid"
_MAYBE_IDLE = f"(tid == 0 ? (uint64){IDLE:#x} + cpu : (uint64)tid)"
HEAD = "%lx %x %x %lx"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts about an architecture that the script needs; registers have bpftrace's names."""

    registers: int  # how many carry arguments
    stack_bytes: int  # from the stack pointer to the first argument above it, at the entry
    frame_bytes: int  # by how much the stack pointer has grown when a function has returned
    instruction: str  # the name of the instruction pointer
    breakpoint_bytes: int  # how far that register is past the start of a kprobe's function


ARCHITECTURES = {"x86_64": Architecture(6, 8, 8, "ip", 1), "aarch64": Architecture(8, 0, 0, "pc", 0)}


@dataclass(frozen=True, slots=True)
class Language:
    """Makes statements of the script, for an architecture and the filters of a plan.

    `widest` is the largest number of words of any call: all calls that wait for their return share one map.
    """

    architecture: Architecture
    filters: Filters
    text_end: str
    widest: int

    @property
    def defers(self) -> bool:
        """Whether entries are printed at the return, when the call's duration is known."""
        return self.filters.min_duration_ns > 0

    def line(self, op: str, layer: int, *fields: tuple[str, str], idle: bool = False, text: str = "") -> str:
        """A statement that prints a line; `fields` are pairs of format and value. `idle`: it may be an idle
        thread.
        """
        who = _MAYBE_IDLE if idle else _PER_THREAD
        forms = " ".join([op, HEAD, *(form for form, _ in fields)])
        values = ["nsecs", "tid", "cpu", f"@s[{who}, (uint64){layer}]++", *(value for _, value in fields)]
        if text:
            forms, values = f"{forms} %s{self.text_end}", [*values, text]
        return f'printf("{forms}\\n", {", ".join(values)});'

    def text_line(self, index: int, layer: int, piece: int, text: str, *, idle: bool = False) -> str:
        """A statement that prints a piece of the text of the entry, or a text of the hit, that follows."""
        number = f"@s[{_MAYBE_IDLE if idle else _PER_THREAD}, (uint64){layer}]"
        form = f"{LineKind.TEXT}{index:x} {HEAD} {piece} %s{self.text_end}"
        return f'printf("{form}\\n", nsecs, tid, cpu, {number}, {text});'

    def filtered(self, layer: int, events: int, *, idle: bool = False) -> str:
        """A statement that counts events that a filter left out."""
        return f"@f[{_MAYBE_IDLE if idle else _PER_THREAD}, (uint64){layer}] += {events};"

    def sampled(self, index: int, statement: str, refused: str) -> str:
        """`statement` for every Nth call on each processor, as the filter says, and `refused` for the
        others.
        """
        if self.filters.sample <= 1:
            return statement
        key = f"@k[(uint64){index}, (uint64)cpu]"
        count = f"$k = {key}; {key} = $k + 1;"
        return f"{count} if ($k % {self.filters.sample} == 0) {{ {statement} }} else {{ {refused} }}"


def comparison(condition: Condition, word: str) -> str:
    """The test of a condition on a machine word, whose bits above the value's are undefined."""
    bits, signed = INTEGER_KINDS.get(condition.argument.kind, (32, True))
    mask = (1 << bits) - 1
    value = f"({word} & {_number(mask)})" if bits < 64 else f"({word})"
    want = condition.value & mask
    if condition.operator == "&":
        return f"({value} & {_number(want)}) != 0"
    if signed and condition.operator not in ("==", "!="):
        # With the sign bit inverted, signed numbers have the order of unsigned ones.
        sign = 1 << (bits - 1)
        value, want = f"({value} ^ {_number(sign)})", want ^ sign
    return f"{value} {condition.operator} {_number(want)}"


def _number(value: int) -> str:
    """An unsigned constant; plain constants of bpftrace are signed."""
    if value < 1 << 63:
        return f"(uint64){value:#x}"
    return f"(((uint64){value >> 32:#x} << 32) | (uint64){value & 0xFFFFFFFF:#x})"


def quoted(text: str) -> str:
    """A text for use between quotes; other bytes than plain ASCII become octal escapes."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
