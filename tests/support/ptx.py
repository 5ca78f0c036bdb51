"""Runs the few instructions of PTX that a mark is made of, as one thread does, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"(?:@(?P<guard>%?\w+)\s+)?(?P<op>[a-z0-9_.]+)\s*(?P<operands>[^;]*);")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@dataclass
class Thread:
    """`special` are the special registers by their names, `constants` the words of the marks' buffer by their
    offsets. `memory` is the GPU's, by 4 bytes; what `written` names was written.
    """

    special: dict[str, int]
    constants: dict[int, int]
    memory: dict[int, int] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Raises KeyError for an instruction or a register that is not known."""
        lines = [line.split("//")[0].strip() for line in text.splitlines()]
        labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"[\w$]+:", line)}
        values: dict[str, int] = {}
        at = 0
        while at < len(lines):
            match = _INSTRUCTION.fullmatch(lines[at])
            at += 1
            if match is None or match["op"].startswith("."):
                continue
            if match["guard"] and not values[match["guard"]]:
                continue
            operands = re.findall(r"[^,\[\]{}\s+]+(?:\s*\+\s*\d+)?", match["operands"])
            if match["op"] in ("bra", "ret"):
                if match["op"] == "ret":
                    return
                at = labels[operands[0]]
            else:
                self._step(match["op"].split("."), operands, values)

    def _step(self, op: list[str], operands: list[str], values: dict[str, int]) -> None:
        bits = 64 if op[-1][1:] == "64" else 32
        mask = (1 << bits) - 1

        def value(name: str) -> int:
            if name in values:
                return values[name]
            return self.special[name[1:]] if name.startswith("%") else int(name, 0) & mask

        if op[0] == "ld":
            place = operands[1]
            if op[1] == "const":
                offset = int(place.partition("+")[2] or 0)
                values[operands[0]] = self.constants[offset]
            else:
                values[operands[0]] = self.memory.get(values[place], 0)
            return
        if op[0] == "st":
            words = [values[name] for name in operands[1:]]
            for number, word in enumerate(words):
                for half in range(bits // 32):
                    place = values[operands[0]] + number * bits // 8 + 4 * half
                    self.memory[place] = word >> 32 * half & 0xFFFFFFFF
                    self.written.append(place)
            return
        target, *rest = operands
        if op[0] == "activemask":
            values[target] = self.special["activemask"]
        elif op[0] == "setp":
            values[target] = _COMPARE[op[1]](value(rest[0]), value(rest[1])) or (
                op[2] == "or" and bool(values[rest[2]])
            )
        else:
            name = ".".join(op[:2]) if op[0] in ("mad", "mul") else op[0]
            result = _RESULTS[name](*map(value, rest))
            values[target] = result & (mask if "wide" not in op else (1 << 64) - 1)


_RESULTS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: ~a,
    "add": lambda a, b: a + b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "mul.wide": lambda a, b: a * b,
    "mad.wide": lambda a, b, c: a * b + c,
    "mad.lo": lambda a, b, c: a * b + c,
    "bfi": lambda a, b, at, bits: b & ~((1 << bits) - 1 << at) | (a & (1 << bits) - 1) << at,
}
