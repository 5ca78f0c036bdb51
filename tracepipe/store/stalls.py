"""Sums of stall samples: by function and reason, and by instruction and reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, NamedTuple

from tracepipe.event.model import Record

# The most functions, instructions and names of reasons that are kept apart; the rest is only counted.
_FUNCTIONS_MAX: Final = 1 << 13
_INSTRUCTIONS_MAX: Final = 1 << 17
_REASONS_MAX: Final = 1 << 8
_OTHER_REASONS: Final = "other reasons"


class Instruction(NamedTuple):
    """An instruction of a function; `module` is the CRC of its module, or "" where it is not known."""

    function: str
    module: str
    offset_bytes: int


@dataclass(slots=True)
class Stalls:
    """The samples of an instruction by reason, and its source line, or "" where it is not known."""

    samples: Counter[str] = field(default_factory=Counter)
    line: str = ""


class StallTable:
    """The stall samples of a recording. Call `add` for each record of them."""

    def __init__(self) -> None:
        self.functions: dict[str, Counter[str]] = {}
        """Function → reason → samples."""
        self.instructions: dict[Instruction, Stalls] = {}
        self.left_out = 0
        """The samples of functions and instructions beyond the number that is kept apart."""
        self.period_cycles: set[int] = set()
        self._reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.functions)

    def add(self, record: Record) -> None:
        """Add the samples of a record."""
        reasons = [self._reason(name) for name in record["reasons"]]
        if record["type"] == "gpu_stall_pc":
            self._add_instructions(record, reasons)
            return
        if "period_cycles" in record and len(self.period_cycles) < _REASONS_MAX:
            self.period_cycles.add(record["period_cycles"])
        functions = record["functions"]
        for function, reason, samples in _columns(record, "function", "reason", "samples"):
            name = functions[function]
            found = self.functions.get(name)
            if found is None and len(self.functions) >= _FUNCTIONS_MAX:
                self.left_out += samples
                continue
            if found is None:
                found = self.functions[name] = Counter()
            found[reasons[reason]] += samples

    def state(self) -> dict[str, Any]:
        """All sums, as JSON can have them."""
        return {
            "functions": self.functions,
            "instructions": [[*key, found.samples, found.line] for key, found in self.instructions.items()],
            "left_out": self.left_out,
            "period_cycles": sorted(self.period_cycles),
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> StallTable:
        """The table with the sums of `state`."""
        table = cls()
        table.functions = {name: Counter(samples) for name, samples in state["functions"].items()}
        table.instructions = {
            Instruction(*key): Stalls(Counter(samples), line) for *key, samples, line in state["instructions"]
        }
        table.left_out, table.period_cycles = state["left_out"], set(state["period_cycles"])
        return table

    def _add_instructions(self, record: Record, reasons: list[str]) -> None:
        functions, lines = record["functions"], ["", *record.get("lines", ())]
        modules = record.get("modules") or [""] * len(functions)
        line_of = record.get("line") or repeat(0)
        rows = _columns(record, "function", "reason", "samples", "offset")
        for (function, reason, samples, offset), line in zip(rows, line_of, strict=False):
            key = Instruction(functions[function], modules[function], offset)
            found = self.instructions.get(key)
            if found is None and len(self.instructions) >= _INSTRUCTIONS_MAX:
                self.left_out += samples
                continue
            if found is None:
                found = self.instructions[key] = Stalls()
            found.samples[reasons[reason]] += samples
            found.line = found.line or lines[line]

    def _reason(self, name: str) -> str:
        """The name as one object for all records; `_OTHER_REASONS` where there are too many names."""
        if name not in self._reasons and len(self._reasons) >= _REASONS_MAX:
            return _OTHER_REASONS
        return self._reasons.setdefault(name, name)


def _columns(record: Record, *names: str) -> zip[tuple[int, ...]]:
    return zip(*(record[name] for name in names), strict=True)
