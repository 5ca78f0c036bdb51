"""The layout of a call's arguments in records, up to eight words of 64 bits, and their formatting.

Arguments are placed in order. Two consecutive ones of at most 32 bits share a slot, any other has its own,
and a dim3 has two. `str` and `out` arguments have no slot, but separate records.

    63            32 31             0      launch(function: ptr, grid: dim3, threads: u32, flags: u32)
    ┌───────────────┬────────────────┐
    │ function                       │ 0    low 0
    │ grid y        │ grid x         │ 1    low 1
    │ (undefined)   │ grid z         │ 2    low 2, 32 bits
    │ flags         │ threads        │ 3    low 3, high 4
    └───────────────┴────────────────┘

The bits above a value that is narrower than its half are undefined, as registers are recorded unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tracepipe.hooks.hook import HASH_KINDS, INTEGER_KINDS, Argument, Signature
from tracepipe.hooks.ioctl import command_text

MAX_SLOTS = 8
"""The most u64 words of arguments in the records of a call."""

ValueNames = Mapping[str, Mapping[int, str]]
"""Kind → value → its name."""
ArgumentText = Callable[[Sequence[int]], str]
"""Makes the members of a JSON object from the words of a call's slots."""
ValueReader = Callable[[Sequence[int]], int]
"""Reads a number from the words of a call's slots."""

_HALF_BITS = 32
# Cached texts of a value. A program can pass any number of values; tables of names are far smaller.
_KNOWN_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """The source of a slot: positions in machine words, as Argument.position counts them.

    Without `high` the slot is the whole word `low`, of which `bits` are used. With `high` it has the lower 32
    bits of `low`, and those of `high` above them.
    """

    low: int
    high: int | None = None
    bits: int = 64


def slots(signature: Signature) -> list[Slot]:
    """The slots of a signature in order; a record has room for only MAX_SLOTS."""
    return [slot for slot, _ in _placed(signature)]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of an argument: `bits` of slot `slot` from `shift` on; `name` is its key in the output."""

    name: str
    kind: str
    slot: int
    shift: int
    bits: int

    def reader(self) -> ValueReader:
        """A function that reads the number from the words of a call's slots."""
        made: ValueReader = eval(f"lambda words: {self.code()}")
        return made

    def code(self) -> str:
        """Code that reads the number from `words`; it contains only numbers of this file."""
        word = f"words[{self.slot}]"
        if self.shift:
            word = f"{word} >> {self.shift}"
        if self.bits + self.shift < 64:
            word = f"({word}) & {(1 << self.bits) - 1}"
        if self.kind not in HASH_KINDS and INTEGER_KINDS.get(self.kind, (32, True))[1]:
            sign = 1 << (self.bits - 1)
            word = f"(({word}) ^ {sign}) - {sign}"
        return word


def values(signature: Signature) -> dict[str, Value]:
    """The values of a signature's arguments, by name; those of a dim3 are `grid.x`, `grid.y`, `grid.z`."""
    return {value.name: value for _, found in _placed(signature) for value in found}


def _placed(signature: Signature) -> Iterator[tuple[Slot, list[Value]]]:
    """Every slot with the values in it."""
    waiting: Argument | None = None  # of at most 32 bits: the next such argument shares its slot
    index = 0
    for argument in signature.arguments:
        if argument.out or argument.kind == "str":
            continue
        is_half = argument.kind != "dim3" and argument.bits <= _HALF_BITS
        if waiting is not None:
            pair = [_value(waiting, index, 0)]
            if is_half:
                pair.append(_value(argument, index, _HALF_BITS))
                yield Slot(waiting.position, argument.position), pair
            else:
                yield Slot(waiting.position, bits=waiting.bits), pair
            waiting, index = None, index + 1
            if is_half:
                continue
        if is_half:
            waiting = argument
        elif argument.kind == "dim3":
            axes = [
                Value(f"{argument.name}.{axis}", "u32", index + (axis == "z"), shift, _HALF_BITS)
                for axis, shift in (("x", 0), ("y", _HALF_BITS), ("z", 0))
            ]
            yield Slot(argument.position), axes[:2]
            yield Slot(argument.position + 1, bits=_HALF_BITS), axes[2:]
            index += 2
        else:
            yield Slot(argument.position), [_value(argument, index, 0)]
            index += 1
    if waiting is not None:
        yield Slot(waiting.position, bits=waiting.bits), [_value(waiting, index, 0)]


def _value(argument: Argument, slot: int, shift: int) -> Value:
    return Value(argument.name, argument.kind, slot, shift, argument.bits)


def argument_text(
    signature: Signature, value_names: ValueNames, only: Sequence[str] | None = None
) -> ArgumentText:
    """A formatter of a call's slots: `"size_bytes":4096,"grid":[4,1,1]`, or "" for a signature without slots.

    A value of a kind with names is written as its name, if it has one, and an ioctl's command as the result
    of `decode_command`. `str` and `out` arguments are left out. `only` names the values to write, in order;
    unknown ones are ignored.
    """
    known = values(signature)
    placed = list(known.values()) if only is None else [known[name] for name in only if name in known]
    if not placed:
        return lambda _: ""
    # A formatter is called for every event. So it is generated code with one `template % (…)`, which takes
    # less than half the time of a loop over values. Only numbers go into the code; names are in the template.
    members: list[str] = []
    code: list[str] = []
    tables: dict[str, object] = {}

    def looked_up(value: Value, text_of: Callable[[int], str]) -> str:
        """Add the code of a value that becomes a text."""
        name = f"table{len(tables)}"
        tables[name] = Texts(text_of)
        code.append(f"{name}[{value.code()}]")
        return "%s"

    def placeholder(value: Value) -> str:
        """Add the code of a value."""
        if value.kind == "bool":
            return looked_up(value, lambda number: "true" if number else "false")
        if (names := value_names.get(value.kind)) is not None:
            texts = {number: json.dumps(name) for number, name in names.items()}
            return looked_up(value, lambda number: texts.get(number) or str(number))
        code.append(value.code())
        return '"%016x"' if value.kind in HASH_KINDS else "%d"

    index = 0
    while index < len(placed):
        axes = placed[index : index + 3]
        name = axes[0].name[:-2]
        if [axis.name for axis in axes] == [f"{name}.x", f"{name}.y", f"{name}.z"]:
            inner = ",".join(map(placeholder, axes))
            members.append(f"{_quoted(name)}:[{inner}]")
            index += 3
            continue
        value = placed[index]
        if value.kind == "ioctl":
            members.append(looked_up(value, partial(command_text, name=value.name)))
        else:
            members.append(f"{_quoted(value.name)}:{placeholder(value)}")
        index += 1
    formatter = f"lambda words: template % ({','.join(code)},)"
    made: ArgumentText = eval(formatter, {"template": ",".join(members), **tables})
    return made


def out_text(argument: Argument, value_names: ValueNames) -> Callable[[int], str]:
    """A formatter of the member that an `out` argument becomes: `"address":140000`."""
    text = argument_text(Signature((Argument(argument.name, 0, argument.kind),)), value_names)
    return lambda value: text((value,))


def _quoted(name: str) -> str:
    return json.dumps(name).replace("%", "%%")


class Texts(dict[int, str]):
    """Texts of values, each made by `text_of` at its first use; at most `limit` are kept."""

    def __init__(self, text_of: Callable[[int], str], limit: int = _KNOWN_TEXTS) -> None:
        super().__init__()
        self._text_of, self._limit = text_of, limit

    def __missing__(self, value: int) -> str:
        text = self._text_of(value)
        if len(self) < self._limit:
            self[value] = text
        return text
