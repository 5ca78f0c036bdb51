"""What this program and the bpftrace script say to each other: lines, orders, and pieces of script.

Every event is one line of hexadecimal numbers:

    OP TS TID CPU SEQ FIELD …

    OP    what happened (`LineKind`), followed by the index of the probe where there is one: `c1f`
    TS    `nsecs`: which clock that is differs between versions of bpftrace
    TID   the current thread, 0 for a processor's idle thread
    SEQ   counts the lines of this thread and layer, so that a gap tells what was lost

A text comes last, as it is, and ends with a mark that nobody can guess: it may contain anything.

bpftrace takes no commands while it runs, so the script has a probe on a function of the C library
that only this process calls, with what it wants to say as arguments (`Order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tracepipe.capture.records.record import DROP_LAYERS
from tracepipe.capture.request import Filters
from tracepipe.hooks.hook import INTEGER_KINDS, Condition

TEXT_PIECE_BYTES = 124
"""Of a text; two pieces make TEXT_BYTES. Printing has a string on BPF's 512 bytes of stack twice."""
IDLE = 1 << 32
"""Plus the processor: whose sequence the lines of an idle thread are in. They all have the tid 0."""


class Order(IntEnum):
    """What this process says to the script: the second argument of its call; the first is the word."""

    TRACK = 1  # word: tgid<<32|tid of a thread that runs already
    START = 2  # word: process whose next exec starts the recording, or 0
    MARK = 3  # print where every line before it on this processor has been printed; word: which mark
    STOP = 4  # follow nobody any more, then as MARK
    COUNTS = 5  # print the last sequence numbers and the filtered events, then as MARK


class LineKind:
    """First letters of the lines."""

    ENTER = "c"  # tgid [began] [served] slot …
    TEXT = "s"  # piece of an entry's text, or which of a hit's, text; SEQ is that of what follows
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
    MARK = "k"  # word; SEQ is 0 from the probe that is listed first, 1 from the last


SYSCALL, SCHEDULER = DROP_LAYERS.index("syscall"), DROP_LAYERS.index("scheduler")
THREADS = DROP_LAYERS.index(None)
_PER_THREAD = "(uint64)tid"
_MAYBE_IDLE = f"(tid == 0 ? (uint64){IDLE:#x} + cpu : (uint64)tid)"
HEAD = "%lx %x %x %lx"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the script needs of the architecture: registers by bpftrace's names."""

    registers: int  # that carry arguments
    stack_bytes: int  # from the stack pointer to the first argument above it, at the entry
    frame_bytes: int  # what the stack pointer has grown by when a function has returned
    instruction: str  # the name of the register
    breakpoint_bytes: int  # what that register is ahead of a kprobe's function


ARCHITECTURES = {"x86_64": Architecture(6, 8, 8, "ip", 1), "aarch64": Architecture(8, 0, 0, "pc", 0)}


@dataclass(frozen=True, slots=True)
class Language:
    """Statements of the script, for an architecture and the filters of a plan.

    `widest` is how many words the call with the most has: all that wait for their return are in one map.
    """

    architecture: Architecture
    filters: Filters
    text_end: str
    widest: int

    @property
    def defers(self) -> bool:
        """Whether entries are printed at the return, when it is known how long the call took."""
        return self.filters.min_duration_ns > 0

    def line(self, op: str, layer: int, *fields: tuple[str, str], idle: bool = False, text: str = "") -> str:
        """A statement that prints a line; `fields` are format and value. `idle`: it may be an idle thread."""
        who = _MAYBE_IDLE if idle else _PER_THREAD
        forms = " ".join([op, HEAD, *(form for form, _ in fields)])
        values = ["nsecs", "tid", "cpu", f"@s[{who}, (uint64){layer}]++", *(value for _, value in fields)]
        if text:
            forms, values = f"{forms} %s{self.text_end}", [*values, text]
        return f'printf("{forms}\\n", {", ".join(values)});'

    def text_line(self, index: int, layer: int, piece: int, text: str, *, idle: bool = False) -> str:
        """A statement that prints a piece of a text of the entry, or a text of the hit, that follows."""
        number = f"@s[{_MAYBE_IDLE if idle else _PER_THREAD}, (uint64){layer}]"
        form = f"{LineKind.TEXT}{index:x} {HEAD} {piece} %s{self.text_end}"
        return f'printf("{form}\\n", nsecs, tid, cpu, {number}, {text});'

    def filtered(self, layer: int, events: int, *, idle: bool = False) -> str:
        """A statement that counts events which a filter left out."""
        return f"@f[{_MAYBE_IDLE if idle else _PER_THREAD}, (uint64){layer}] += {events};"

    def sampled(self, index: int, statement: str, refused: str) -> str:
        """`statement` for one in so many calls on each processor, `refused` for the others."""
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
        # The order of signed numbers is that of unsigned ones with the sign turned over.
        sign = 1 << (bits - 1)
        value, want = f"({value} ^ {_number(sign)})", want ^ sign
    return f"{value} {condition.operator} {_number(want)}"


def _number(value: int) -> str:
    """An unsigned constant: bpftrace's own are signed."""
    if value < 1 << 63:
        return f"(uint64){value:#x}"
    return f"(((uint64){value >> 32:#x} << 32) | (uint64){value & 0xFFFFFFFF:#x})"


def quoted(text: str) -> str:
    """What stands between quotes; bytes that are not plain become octal escapes."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
