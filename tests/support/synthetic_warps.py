"""Kernels on a simulated GPU, with or without effects planted in them.

Blocks are handed out in order to the SM slot that is free first, at most one every `ramp_ns`, so launches
ramp up, blocks start late where earlier ones hold the slots, and whole or partial waves come about by
themselves.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracepipe.analyses.findings.kernel_warps import NOT_RECORDED, KernelWarps, sort_warps

LANES = 32


def _heavy(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.standard_t(3, size) / np.sqrt(3)


def _two_speeds(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Hit or miss, as caches make it."""
    return (rng.random(size) < 0.3) * 1.9 - 0.57 + rng.standard_normal(size) * 0.5


# All with mean 0 and deviation 1.
NOISES = {
    "gaussian": lambda rng, size: rng.standard_normal(size),
    "exponential": lambda rng, size: rng.exponential(1.0, size) - 1,
    "heavy-tailed (t3)": _heavy,
    "two speeds": _two_speeds,
}


@dataclass
class SyntheticKernel:
    """What runs, and what is planted in it; shares are of `life_ns`, the life of a warp without noise."""

    blocks: int = 512
    grid: tuple[int, int, int] | None = None
    warps: int = 4
    launches: int = 1
    sms: int = 32
    blocks_per_sm: int = 4
    life_ns: float = 20_000
    noise: str = "gaussian"
    sigma: float = 0.02
    """Of blocks, and once more of the warps in each."""
    lane_sigma: float = 0.0
    """Of the threads of a warp, where every thread is timed for itself."""
    lanes_timed: bool = False
    entries: bool = True
    step_ns: int = 32
    ramp_ns: float = 8
    first_wave: float = 0.0
    """How much longer blocks take that start with the launch, as caches are cold."""
    oldest_first: float = 0.0
    """How much longer a block takes for each other one that its SM has when it starts, and serves first."""
    lane_step_ns: float = 0.0
    """How much later each lane of a warp reads the clock than the one before, where threads are timed."""
    late_lanes: tuple[int, ...] = ()
    late_lanes_share: float = 1.0
    """Of the warps, those in which they are late."""
    late_warps: tuple[int, ...] = ()
    late_blocks: tuple[int, ...] = ()
    late_launch: int | None = None
    """The one launch in which they are late; None: all."""
    late_sms: tuple[int, ...] = ()
    delay: float = 0.0
    """Of the late lanes, warps, blocks or blocks of the late SMs."""
    rest: float = 0.0
    """How much longer the block takes that ends last, whichever it is, as it does the rest of the work."""
    trend: float = 0.0
    """By how much the last block takes longer than the first."""
    in_order: float = 0.0
    """By how much each warp of a block leaves after the one before."""

    def run(self, seed: int) -> KernelWarps:
        rng = np.random.default_rng(seed)
        parts = [self._launch(rng, launch) for launch in range(self.launches)]
        columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        entry = columns.pop("entry").astype(np.int64) // self.step_ns * self.step_ns
        exits = (columns.pop("exits").astype(np.int64)) // self.step_ns * self.step_ns
        warps = entry.size
        if self.lanes_timed:
            warp_of = np.repeat(np.arange(warps), LANES)
            masks = np.tile(1 << np.arange(LANES), warps)
            times = exits.reshape(-1)
        else:
            warp_of, times, masks = self._masked(exits)
        if not self.entries:
            entry = np.full(warps, NOT_RECORDED)
        unsorted = KernelWarps(
            "synthetic",
            self.grid or (self.blocks, 1, 1),
            launch=columns["launch"],
            block=columns["block"],
            warp=columns["warp"],
            sm=columns["sm"] if self.entries else np.full(warps, NOT_RECORDED),
            entry_ns=entry,
            exit_warp=warp_of,
            exit_ns=times,
            exit_mask=masks,
            lanes_timed=self.lanes_timed,
        )
        return sort_warps(unsorted)

    def _masked(self, exits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One exit for the usual lanes and one for the late ones where there are any."""
        late_mask = sum(1 << lane for lane in self.late_lanes)
        usual = next(lane for lane in range(LANES) if not late_mask >> lane & 1)
        warp, times, masks = (
            np.arange(len(exits)),
            exits[:, usual],
            np.full(len(exits), 0xFFFFFFFF - late_mask),
        )
        if not self.late_lanes:
            return warp, times, masks
        late = exits[:, self.late_lanes[0]]
        return (
            np.concatenate([warp, warp]),
            np.concatenate([times, late]),
            np.concatenate([masks, np.full(len(exits), late_mask)]),
        )

    def _launch(self, rng: np.random.Generator, launch: int) -> dict[str, np.ndarray]:
        noise = NOISES[self.noise]
        shape = (self.blocks, self.warps)
        life = 1 + self.sigma * (noise(rng, (self.blocks, 1)) + noise(rng, shape))
        life = np.maximum(life, 0.2)
        life[:, list(self.late_warps)] += self.delay
        if self.late_launch in (None, launch):
            life[list(self.late_blocks)] += self.delay
        life *= (1 + self.trend * np.linspace(0, 1, self.blocks))[:, None]
        life += self.in_order * np.arange(self.warps)
        lanes = np.zeros((*shape, LANES))
        if self.lane_sigma:
            lanes = self.lane_sigma * noise(rng, lanes.shape)
        struck = rng.random(shape) < self.late_lanes_share
        for lane in self.late_lanes:
            lanes[:, :, lane] += struck * self.delay
        life, lanes = life * self.life_ns, lanes * self.life_ns + self.lane_step_ns * np.arange(LANES)
        start, sm, life = self._place(life, lanes)
        life[int((start + life.max(axis=1)).argmax())] += self.rest * self.life_ns
        start += 1e6 * self.life_ns * launch
        entry = start[:, None] + 4.0 * np.arange(self.warps)
        exits = (entry + life)[:, :, None] + lanes
        block = np.repeat(np.arange(self.blocks), self.warps)
        return {
            "launch": np.full(block.size, launch),
            "block": block,
            "warp": np.tile(np.arange(self.warps), self.blocks),
            "sm": np.repeat(sm, self.warps),
            "entry": entry.reshape(-1),
            "exits": exits.reshape(-1, LANES),
        }

    def _place(self, life: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When and where each block starts, and its warps' lives, which depend on where."""
        start, place = np.zeros(self.blocks), np.zeros(self.blocks, np.int64)
        free = [
            (0.0, slot * self.sms + sm, sm) for slot in range(self.blocks_per_sm) for sm in range(self.sms)
        ]
        heapq.heapify(free)
        life, handed_out = life.copy(), -self.ramp_ns
        ends: list[list[float]] = [[] for _ in range(self.sms)]
        for block in range(self.blocks):
            at, order, sm = heapq.heappop(free)
            handed_out = max(at, handed_out + self.ramp_ns)
            if at == 0:
                life[block] *= 1 + self.first_wave
            if sm in self.late_sms:
                life[block] += self.delay * self.life_ns
            ends[sm] = [end for end in ends[sm] if end > handed_out]
            life[block] *= 1 + self.oldest_first * len(ends[sm])
            start[block], place[block] = handed_out, sm
            end = handed_out + (life[block][:, None] + lanes[block]).max()
            ends[sm].append(end)
            heapq.heappush(free, (end + 300, order, sm))
        return start, place, life


def write_recording(
    path: Path, kernel: SyntheticKernel, seed: int, name: str = "synthetic", **header: Any
) -> Path:
    """A recording of a simulated kernel, a line for each launch; `header` has more of its header."""
    made = kernel.run(seed)
    records: list[dict[str, Any]] = [
        {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"], **header}
    ]
    first_exit = np.cumsum(made.exits) - made.exits
    for launch in made.launches.tolist():
        rows = np.flatnonzero(made.launch == launch)
        start = int(made.entry_ns[rows].min())
        exits = np.concatenate([np.arange(first_exit[r], first_exit[r] + made.exits[r]) for r in rows])
        records.append(
            {
                "ts_ns": start, "type": "gpu_warp", "name": name, "clock": "monotonic", "gpu": 0,
                "launch": launch + 40, "grid": list(made.grid or ()), "block": [32 * kernel.warps, 1, 1],
                "warp": (made.block[rows] * kernel.warps + made.warp[rows]).tolist(),
                "sm": made.sm[rows].tolist(), "slot": [0] * rows.size,
                "entry_ns": (made.entry_ns[rows] - start).tolist(),
                "entry_mask": [0xFFFFFFFF] * rows.size,
                "exit_count": made.exits[rows].tolist(),
                "exit_ns": (made.exit_ns[exits] - made.entry_ns[made.exit_warp[exits]]).tolist(),
                "exit_mask": made.exit_mask[exits].tolist(),
            }
        )  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
