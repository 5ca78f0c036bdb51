"""The hardware counters of a GPU that are sampled, and the CUPTI metrics for them.

Architectures differ in their metrics, and in what they can count in one pass. So each counter has metrics in
order of preference, and the sampler takes the first that can be combined with the metrics chosen before it.
The most important counters come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.event.counters import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)

MEMORY_PEAK: Final = "memory"
"""The bytes per second that the GPU's memory can carry by its clock and width. CUPTI's own metric for it gave
no usable value while the GPU was idle (H200, CUPTI 13.0)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A CUPTI metric, and the metric of its greatest possible value, or MEMORY_PEAK; "" if there is none."""

    name: str
    peak: str = ""

    @property
    def argument(self) -> str:
        """The metric as an argument of the sampler."""
        return f"{self.name}={self.peak}" if self.peak else self.name


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter as the file has it: a metric's value divided by `scale` is in `unit`. `greatest` is its
    greatest possible value; None if only the GPU knows it, or if it is not known.
    """

    name: str
    unit: str
    metrics: tuple[Metric, ...]
    scale: float = 1.0
    greatest: float | None = None

    @property
    def argument(self) -> str:
        """The choice of metrics as an argument of the sampler."""
        return ",".join(metric.argument for metric in self.metrics)


def _percent(name: str, *counted: str) -> Counter:
    """A share of the hardware's peak over all of the time, busy or idle."""
    metrics = tuple(Metric(f"{one}.pct_of_peak_sustained_elapsed") for one in counted)
    return Counter(name, "%", metrics, greatest=100.0)


def _rate(name: str, unit: str, counted: str, peak: str = "") -> Counter:
    return Counter(name, unit, (Metric(f"{counted}.sum.per_second", peak),), 1e9)


def _clock(name: str, counted: str) -> Counter:
    return Counter(name, "MHz", (Metric(f"{counted}.avg.per_second"),), 1e6)


def _a_cycle(name: str, *counted: str) -> Counter:
    metrics = tuple(Metric(f"{one}.avg.per_cycle_elapsed", f"{one}.avg.peak_sustained") for one in counted)
    return Counter(name, "warp instructions", metrics)


COUNTERS: Final = (
    _percent(SM_ACTIVE, "sm__cycles_active.avg"),
    # On an H200, one of 30 samples of `…_realtime`, which fits beside more metrics, was a multiple of 100%.
    _percent(
        TENSOR_ACTIVE, "sm__pipe_tensor_cycles_active.avg", "sm__pipe_tensor_cycles_active_realtime.avg"
    ),
    _rate(DRAM_READ, "GB/s", "dram__bytes_read", MEMORY_PEAK),
    _rate(DRAM_WRITE, "GB/s", "dram__bytes_write", MEMORY_PEAK),
    _percent(DRAM_READ_SHARE, "dram__bytes_read.sum", "dram__read_throughput.avg"),
    _percent(DRAM_WRITE_SHARE, "dram__bytes_write.sum", "dram__write_throughput.avg"),
    _clock(SM_CLOCK, "sm__cycles_elapsed"),
    _percent("SM warps active %", "sm__warps_active_realtime.avg", "sm__warps_active.avg"),
    _a_cycle("SM instructions per cycle", "sm__inst_executed", "sm__inst_executed_realtime"),
    _percent("GR active %", "gr__cycles_active.avg"),
    _rate("L2 sectors G/s", "G/s", "lts__t_sectors"),
    _rate("PCIe read GB/s", "GB/s", "pcie__read_bytes"),
    _rate("PCIe write GB/s", "GB/s", "pcie__write_bytes"),
    _clock("system clock MHz", "sys__cycles_elapsed"),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled counter of a GPU, its metric, and its greatest possible value if that is known."""

    counter: Counter
    metric: str
    greatest: float | None


def listed(gpu: int, interval_ns: int, sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """The counters of a GPU in the form of a header."""
    return [
        {
            "gpu": gpu,
            "name": one.counter.name,
            "unit": one.counter.unit,
            "metric": one.metric,
            "interval_ns": interval_ns,
            **({} if one.greatest is None else {"max": round(one.greatest, 3)}),
        }
        for one in sampled
    ]
