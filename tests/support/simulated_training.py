"""Programs of ranks that train, for `simulated_machine`: steps with a forward and a backward pass, gradients
that are reduced meanwhile on a stream of their own, and an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.support.simulated_machine import Do, Machines

Fault = Literal["", "host", "processor", "GPU", "data loading", "link"]
"""What SLOW is slow at: with `host` in one place of its program, with `processor` everywhere."""
Extra = Literal["", "host", "GPU", "sync", "small", "stream"]
SLOW = 1
"""The rank with the fault, or the extra part."""


@dataclass(frozen=True, slots=True)
class Training:
    """All ranks do the same, give or take the jitter, besides SLOW. Four ranks may reduce in pairs: with
    their neighbour, and with the other rank of their place.
    """

    ranks: int = 2
    steps: int = 10
    host_bound: bool = False
    slower: float = 1.5
    jitter: float = 0.02
    fault: Fault = ""
    extra: Extra = ""
    seed: int = 1
    synchronizes: bool = True
    in_pairs: bool = False

    def run(self) -> Machines:
        """What comes of it."""
        return Machines([self._program(rank) for rank in range(self.ranks)], self.slower)

    def _groups(self, rank: int) -> list[tuple[str, tuple[int, ...]]]:
        if not self.in_pairs:
            return [("allreduce", tuple(range(self.ranks)))]
        first, other = rank - rank % 2, (rank + 2) % 4
        return [("reduce_scatter", (first, first + 1)), ("all_gather", (min(rank, other), max(rank, other)))]

    def _program(self, rank: int) -> Iterator[Do]:
        source, slow = Random(f"{self.seed} {rank}"), self.fault if rank == SLOW else ""
        host_ns, kernel_ns = (60_000, 30_000) if self.host_bound else (12_000, 150_000)

        def host(ns: float) -> Do:
            factor = max(source.gauss(1, self.jitter), 0.3) * (1.4 if slow == "processor" else 1)
            return Do("host", ns * factor)

        def kernels(name: str, count: int) -> Iterator[Do]:
            for at in range(count):
                yield host(host_ns)
                factor = max(source.gauss(1, self.jitter), 0.3) * (1.4 if slow == "GPU" else 1)
                yield Do("kernel", kernel_ns * factor, f"{name}_{at % 3}")

        for step in range(self.steps):
            yield Do("begin", name=f"step {step}")
            yield Do("begin", name="data loading")
            yield host(2_300_000 if slow == "data loading" else 300_000)
            yield Do("end")
            yield from kernels("forward", 8)
            if slow == "host":
                yield host(3_000_000)
            if self.extra and rank == min(SLOW, self.ranks - 1):
                yield from self._extra()
            for _ in range(2):
                yield from kernels("backward", 4)
                yield Do("record", event=5)
                yield Do("wait", stream=20, event=5)
                for name, group in self._groups(rank) if self.ranks > 1 else ():
                    is_slow = self.fault == "link" and SLOW in group
                    yield Do("collective", 360_000 if is_slow else 120_000, name, 20, group=group)
            yield Do("record", stream=20, event=6)
            yield Do("wait", event=6)
            yield from kernels("optimizer", 3)
            if self.synchronizes:
                yield Do("sync", stream=0)
            yield Do("end")
            yield host(8_000)

    def _extra(self) -> Iterator[Do]:
        yield Do("begin", name="extra")
        if self.extra == "host":
            yield Do("host", 1_500_000)
        elif self.extra == "sync":
            yield Do("sync", stream=0)
        elif self.extra == "stream":
            yield from (Do("record", event=8), Do("wait", stream=9, event=8))
            yield from (Do("kernel", 100_000, "side", 9) for _ in range(4))
            yield from (Do("record", stream=9, event=9), Do("wait", event=9))
        else:
            for _ in range(10 if self.extra == "GPU" else 60):
                yield Do("host", 2_000)
                yield Do("kernel", 100_000 if self.extra == "GPU" else 2_000, "extra")
        yield Do("end")
