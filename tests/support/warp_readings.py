"""Made-up readings of warps: what GPUs of many kinds would show, and what no GPU shows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracepipe.clocks.sm_clock import HAS_CLOCKS, HAS_COUNTS, HAS_SLOT, NativeSmClocks, WarpReadings

Column: TypeAlias = npt.NDArray[np.int64]
Batch: TypeAlias = tuple[int, Column, Column, Column, "Column | None", Column, Column, "Column | None"]
"""A time, and the columns of `WarpReadings`."""


def read(batch: Batch) -> tuple[int, WarpReadings]:
    """The arguments of `SmClocks.refine`."""
    return batch[0], WarpReadings(*batch[1:])


def refined_in_c(clocks: NativeSmClocks, batch: Batch) -> tuple[Column, Column] | None:
    """A batch by itself, as `SmClocks.refine` has it."""
    base_ns, *columns = batch
    has = HAS_CLOCKS | HAS_SLOT * (columns[3] is not None) | HAS_COUNTS * (columns[6] is not None)
    counts = (np.array([number], np.int64) for number in (base_ns, len(columns[0]), len(columns[1])))
    finer, entered, stayed = clocks.refine_all(*counts, np.array([has], np.uint8), columns)
    return (entered, stayed) if finer[0] else None


@dataclass
class Rows:
    """A batch on its way: what each warp reads."""

    sm: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    entry_ns: list[int] = field(default_factory=list)
    entry_clk: list[int] = field(default_factory=list)
    exit_ns: list[int] = field(default_factory=list)
    exit_clk: list[int] = field(default_factory=list)
    exit_count: list[int] = field(default_factory=list)

    def batch(self, base_ns: int, has_slots: bool, has_counts: bool) -> Batch:
        """Its columns."""
        columns = (self.entry_ns, self.exit_ns, self.sm, self.slot, self.entry_clk, self.exit_clk)
        entry_ns, exit_ns, sm, slot, *clk = (np.array(column, np.int64) for column in columns)
        slots, counts = (slot if has_slots else None), np.array(self.exit_count, np.int64)
        return base_ns, entry_ns, exit_ns, sm, slots, clk[0], clk[1], counts if has_counts else None


class LikelyGpu:
    """Batches of a GPU whose SMs, clocks, strays and gaps are up to the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.step_ns = dice.choice((1, 2, 7, 32, 32, 1000, 1024, 1024))
        self.sms = dice.sample(range(dice.choice((200, 1 << 16))), dice.choice((1, 2, 8, 40, 132)))
        self.slots = dice.sample(range(dice.choice((64, 1 << 12))), dice.choice((1, 8, 64)))
        self.stray, self.stray_clk = dice.choice((0, 0, 0.01, 0.2)), dice.choice((100, 10_000, 10**7))
        self.lag_ns, self.stay_ns = dice.choice((0, 0, 25, -30, 500)), dice.choice((100, 2_000, 10**6))
        self.gap_ns = dice.choice((0, 1_000, 10**10, 10**12))
        self.has_counts, self.has_slots = dice.random() < 0.5, dice.random() < 0.8
        self.base_ns = dice.choice((0, dice.randrange(1 << 61))) // self.step_ns * self.step_ns
        self.now_ns, self.ghz = 0.0, 0.0
        self.free_ns: dict[tuple[int, int], float] = {}
        self.change_clocks()

    def change_clocks(self) -> None:
        """Another rate, and every SM counts from another number."""
        self.ghz = self.dice.choice((0.345, 1.2, 1.98, 2.5))
        self.from_clk = {sm: self.dice.randrange(1 << 36) for sm in self.sms}

    def read(self, ns: float) -> int:
        """%globaltimer at that time."""
        return int(ns // self.step_ns) * self.step_ns

    def clk(self, sm: int, ns: float) -> int:
        """%clock64 at that time, or at some other."""
        astray = self.dice.randrange(self.stray_clk) if self.dice.random() < self.stray else 0
        return self.from_clk[sm] + int(ns * self.ghz) + astray

    def batches(self) -> list[Batch]:
        """Some batches, one after the other; some are empty."""
        made = []
        for _ in range(self.dice.choice((1, 3, 8))):
            if self.dice.random() < 0.1:
                self.change_clocks()
            made.append(self.batch(self.dice.choice((0, 1, 2, 20, 60, 200, 600))))
            self.now_ns += self.gap_ns
        return made

    def batch(self, warps: int) -> Batch:
        """One with so many warps, each of which waits for its slot."""
        dice, rows, from_ns = self.dice, Rows(), self.read(self.now_ns)
        sms = self.sms[: dice.choice((1, len(self.sms)))]
        for _ in range(warps):
            self.now_ns += dice.random() * dice.choice((1, 30, 200))
            place = sm, slot = dice.choice(sms), dice.choice(self.slots)
            entered = max(self.now_ns, self.free_ns.get(place, 0) + dice.random() * 40)
            exits = dice.choice((0, 1, 1, 1, 2, 3)) if self.has_counts else 1
            left = sorted(entered + dice.random() * self.stay_ns for _ in range(exits))
            self.free_ns[place] = max([entered, *left])
            rows.sm.append(sm)
            rows.slot.append(slot)
            rows.entry_ns.append(self.read(entered) - from_ns)
            rows.entry_clk.append(self.clk(sm, entered))
            rows.exit_ns += [self.read(ns + self.lag_ns) - from_ns - rows.entry_ns[-1] for ns in left]
            rows.exit_clk += [self.clk(sm, ns) - rows.entry_clk[-1] for ns in left]
            rows.exit_count.append(exits)
        return rows.batch(self.base_ns + from_ns, self.has_slots, self.has_counts)


def hostile_batches(seed: int) -> list[Batch]:
    """Numbers of every size, some of them out of all limits."""
    dice = random.Random(seed)
    ns_bits, clk_bits = dice.choice((8, 32, 50, 57, 58, 60)), dice.choice((8, 32, 50, 57, 58, 63))
    step_ns, sms = dice.choice((1, 32, 1000, 1 << 20, 1 << 56)), dice.choice((1, 3, 1 << 16))

    def ns() -> int:
        return dice.choice((1, 1, -1)) * dice.randrange(1 << dice.randint(1, ns_bits)) // step_ns * step_ns

    def clk() -> int:
        return dice.choice((1, 1, -1)) * dice.randrange(1 << dice.randint(1, clk_bits))

    made = []
    for _ in range(dice.choice((1, 2, 6))):
        rows, warps = Rows(), dice.choice((0, 1, 2, 20, 100))
        rows.exit_count = [dice.randrange(3) for _ in range(warps)]
        exits = sum(rows.exit_count)
        rows.sm = [dice.randrange(sms) for _ in range(warps)]
        rows.slot = [dice.randrange(1 << 12) for _ in range(warps)]
        rows.entry_ns, rows.exit_ns = [ns() for _ in range(warps)], [ns() for _ in range(exits)]
        rows.entry_clk, rows.exit_clk = [clk() for _ in range(warps)], [clk() for _ in range(exits)]
        if warps and dice.random() < 0.1:
            column = dice.choice((rows.sm, rows.slot, rows.entry_ns, rows.entry_clk))
            column[dice.randrange(warps)] = dice.choice((-1, 1 << 12, 1 << 16, (1 << 63) - 1, -(1 << 63)))
        base_ns = dice.randrange(1 << 62) // step_ns * step_ns
        made.append(rows.batch(base_ns, has_slots=True, has_counts=True))
    return made
