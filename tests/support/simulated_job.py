"""A training job of many ranks, as their recordings: each host's clock is off by milliseconds and drifts.

Each step loads data, computes, and runs collectives in three kinds of process groups: all ranks of a host,
the ranks of one number on all hosts, and all. A rank that comes to a collective waits there for the last one,
and then all transfer; the last one leaves a little later, as was seen on two H200s.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

Fault = Literal["gpu", "loader", "link", "crowded link"]
"""What is slow: a crowded link is slow for two of three transfers."""
_EPOCH_NS = 1_795_000_000_000_000_000
_COMPUTE_NS, _LOADING_NS, _SLOW_LOADING_NS = 12_000_000, 300_000, 9_000_000
_TRANSFERS_NS = {"host": 40_000, "number": 300_000, "all": 60_000}
_OPERATIONS = {"host": "all_gather", "number": "reduce_scatter", "all": "allreduce"}
_NOISE_NS, _LATE_SHARE = 1_500, 0.08


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a host's clock is ahead when the job begins, and by how much it gains."""

    ahead_ns: int
    drift_ppb: int

    def of(self, ns: int) -> int:
        """What it shows at a time of the job."""
        return _EPOCH_NS + ns + self.ahead_ns + ns * self.drift_ppb // 1_000_000_000


@dataclass(slots=True)
class SimulatedJob:
    """`faults`: rank → what is slow there. In each step a rank runs `kernels` in so many `rounds`."""

    hosts: int
    ranks_of_host: int
    steps: int = 10
    kernels: int = 8
    rounds: int = 4
    faults: Mapping[int, Fault] = field(default_factory=dict)
    seed: int = 1
    clocks: list[Clock] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        ahead, drift = (
            rng.integers(-5_000_000, 5_000_000, self.hosts),
            rng.integers(-10_000, 10_001, self.hosts),
        )
        self.clocks = [Clock(int(a), int(d)) for a, d in zip(ahead, drift, strict=True)]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.hosts * self.ranks_of_host

    def write(self, folder: Path) -> None:
        """All recordings, as FOLDER/HOST/RANK.jsonl."""
        files = []
        for rank in range(self.ranks):
            place = folder / self.host_of(rank)
            place.mkdir(parents=True, exist_ok=True)
            files.append(place / f"{rank}.jsonl")
            files[-1].write_text(self._header(rank))
        counts = [Counter[str]() for _ in files]
        for lines in self._steps():
            for rank, text in enumerate(lines):
                counts[rank]["gpu_kernel"] += text.count('"gpu_kernel"')
                counts[rank]["annotation"] += text.count('"annotation"')
                with files[rank].open("a") as out:
                    out.write(text)
        for file, count in zip(files, counts, strict=True):
            with file.open("a") as out:
                out.write(_line({"type": "footer", "counts": count, "losses": {}}))

    def host_of(self, rank: int) -> str:
        """The host of a rank."""
        return f"node{rank // self.ranks_of_host:03d}"

    def _header(self, rank: int) -> str:
        clock = self.clocks[rank // self.ranks_of_host]
        return _line(
            {
                "type": "header", "schema": "tracepipe/1", "host": self.host_of(rank), "clock": "realtime",
                "clocks": ["realtime"], "start": {"realtime_ns": clock.of(0)},
                "rank": rank, "world_size": self.ranks,
            }
        )  # fmt: skip

    def _steps(self) -> Iterator[list[str]]:
        """The lines of each rank in one step after the other."""
        rng = np.random.default_rng(self.seed + 1)
        now_ns, counts = np.full(self.ranks, 1_000_000), {}
        for step in range(self.steps):
            lines = [
                _Lines(self.clocks[rank // self.ranks_of_host], 4000 + rank) for rank in range(self.ranks)
            ]
            begun_ns = now_ns.copy()
            loading_ns = self._noisy(rng, _LOADING_NS)
            for rank, fault in self.faults.items():
                loading_ns[rank] += _SLOW_LOADING_NS if fault == "loader" else 0
            for rank in range(self.ranks):
                lines[rank].annotation("enumerate(DataLoader)#next", now_ns[rank], loading_ns[rank])
            now_ns = now_ns + loading_ns
            for _ in range(self.rounds):
                now_ns = self._compute(rng, now_ns, lines)
                for kind in ("host", "number"):
                    now_ns = self._collective(rng, now_ns, lines, kind, counts)
            now_ns = self._collective(rng, now_ns, lines, "all", counts)
            for rank in range(self.ranks):
                lines[rank].annotation(f"ProfilerStep#{step}", begun_ns[rank], now_ns[rank] - begun_ns[rank])
            yield [one.text() for one in lines]

    def _noisy(self, rng: Any, ns: float) -> Any:
        return np.rint(ns * rng.normal(1, 0.01, self.ranks).clip(0.9, 1.1)).astype(np.int64)

    def _compute(self, rng: Any, now_ns: Any, lines: list[_Lines]) -> Any:
        count = max(self.kernels // self.rounds, 1)
        for number in range(count):
            kernel_ns = self._noisy(rng, _COMPUTE_NS / self.rounds / count)
            for rank, fault in self.faults.items():
                kernel_ns[rank] = kernel_ns[rank] * 14 // 10 if fault == "gpu" else kernel_ns[rank]
            for rank in range(self.ranks):
                lines[rank].kernel(f"gemm_{number}", 7, now_ns[rank], kernel_ns[rank], {})
            now_ns = now_ns + kernel_ns
        return now_ns

    def _collective(
        self, rng: Any, now_ns: Any, lines: list[_Lines], kind: str, counts: dict[str, int]
    ) -> Any:
        """Each group waits for its last rank; the time at which each rank goes on."""
        ends_ns, ranks = now_ns.copy(), np.arange(self.ranks)
        groups = {
            "host": ranks // self.ranks_of_host, "number": ranks % self.ranks_of_host, "all": ranks * 0,
        }[kind]  # fmt: skip
        counts[kind] = counts.get(kind, 0) + 1
        for group in range(int(groups.max()) + 1):
            members = np.flatnonzero(groups == group)
            faults = {self.faults.get(rank) for rank in members.tolist()}
            is_crowded = "crowded link" in faults and counts[kind] % 3 > 0
            is_slow = kind != "all" and ("link" in faults or is_crowded)
            transfer_ns = _TRANSFERS_NS[kind] * (3 if is_slow else 1)
            last_ns = int(now_ns[members].max())
            ends_ns[members] = (
                last_ns + transfer_ns + np.abs(rng.normal(0, _NOISE_NS, len(members))).astype(int)
            )
            ends_ns[members[now_ns[members] == last_ns]] += int(transfer_ns * _LATE_SHARE)
            args = {
                "Collective name": _OPERATIONS[kind], "Process Group Name": kind, "Group size": len(members),
                "Process Group Ranks": f"[{members[0]}, …, {members[-1]}]", "Seq": counts[kind],
            }  # fmt: skip
            for rank in members.tolist():
                name = f"ncclDevKernel_{_OPERATIONS[kind]}_RING_LL"
                lines[rank].kernel(name, 20, now_ns[rank], ends_ns[rank] - now_ns[rank], args)
        return ends_ns


class _Lines:
    """The lines of one rank."""

    def __init__(self, clock: Clock, pid: int) -> None:
        self._clock, self._pid, self._lines = clock, pid, list[tuple[int, str]]()

    def kernel(self, name: str, stream: int, start_ns: int, dur_ns: int, args: dict[str, Any]) -> None:
        """A kernel on the rank's GPU."""
        on_gpu = {"type": "gpu_kernel", "gpu": 0, "stream": stream} | ({"args": args} if args else {})
        self._add(on_gpu, name, int(start_ns), int(dur_ns))

    def annotation(self, name: str, start_ns: int, dur_ns: int) -> None:
        """A range of the main thread."""
        self._add(
            {"type": "annotation", "pid": self._pid, "tid": self._pid}, name, int(start_ns), int(dur_ns)
        )

    def _add(self, record: dict[str, Any], name: str, start_ns: int, dur_ns: int) -> None:
        from_ns, to_ns = self._clock.of(start_ns), self._clock.of(start_ns + dur_ns)
        line = _line({"ts_ns": from_ns, **record, "name": name, "phase": "X", "dur_ns": to_ns - from_ns})
        self._lines.append((from_ns, line))

    def text(self) -> str:
        """All of them, by time."""
        return "".join(line for _, line in sorted(self._lines, key=lambda one: one[0]))


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n"
