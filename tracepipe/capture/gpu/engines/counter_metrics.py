"""Which counters of a GPU's hardware are sampled, by the metrics of CUPTI that give them.

What a GPU has differs from one architecture to the next, and so does what it can count in one pass. So each
counter has metrics in the order of preference, and the sampler takes the first that goes with those of the
counters before it: what matters most comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.capture.records.counter_names import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of CUPTI's, and the one that says the most that it can be: "" where that is none."""

    name: str
    peak: str = ""

    @property
    def argument(self) -> str:
        """As the sampler takes it."""
        return f"{self.name}={self.peak}" if self.peak else self.name


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter as the file has it: a metric's value divided by `scale` is in `unit`. `greatest` is the most
    that it can be; None where the GPU says that, or nobody.
    """

    name: str
    unit: str
    metrics: tuple[Metric, ...]
    scale: float = 1.0
    greatest: float | None = None

    @property
    def argument(self) -> str:
        """The choice of metrics as the sampler takes it."""
        return ",".join(metric.argument for metric in self.metrics)


def _percent(name: str, *counted: str) -> Counter:
    """A share of what the hardware can do in all of the time, busy or not."""
    metrics = tuple(Metric(f"{one}.pct_of_peak_sustained_elapsed") for one in counted)
    return Counter(name, "%", metrics, greatest=100.0)


def _rate(name: str, unit: str, scale: float, counted: str) -> Counter:
    peak = f"{counted}.sum.peak_sustained_elapsed.per_second"
    return Counter(name, unit, (Metric(f"{counted}.sum.per_second", peak),), scale)


def _clock(name: str, counted: str) -> Counter:
    return Counter(name, "MHz", (Metric(f"{counted}.avg.per_second"),), 1e6)


def _a_cycle(name: str, *counted: str) -> Counter:
    metrics = tuple(Metric(f"{one}.avg.per_cycle_elapsed", f"{one}.avg.peak_sustained") for one in counted)
    return Counter(name, "warp instructions", metrics)


COUNTERS: Final = (
    _percent(SM_ACTIVE, "sm__cycles_active.avg"),
    _percent(
        TENSOR_ACTIVE, "sm__pipe_tensor_cycles_active_realtime.avg", "sm__pipe_tensor_cycles_active.avg"
    ),
    _rate(DRAM_READ, "GB/s", 1e9, "dram__bytes_read"),
    _rate(DRAM_WRITE, "GB/s", 1e9, "dram__bytes_write"),
    _percent(DRAM_READ_SHARE, "dram__bytes_read.sum", "dram__read_throughput.avg"),
    _percent(DRAM_WRITE_SHARE, "dram__bytes_write.sum", "dram__write_throughput.avg"),
    _clock(SM_CLOCK, "sm__cycles_elapsed"),
    _percent("SM warps active %", "sm__warps_active.avg", "sm__warps_active_realtime.avg"),
    _a_cycle("SM instructions per cycle", "sm__inst_executed_realtime", "sm__inst_executed"),
    _percent("GR active %", "gr__cycles_active.avg"),
    _rate("L2 sectors G/s", "G/s", 1e9, "lts__t_sectors"),
    _rate("PCIe read GB/s", "GB/s", 1e9, "pcie__read_bytes"),
    _rate("PCIe write GB/s", "GB/s", 1e9, "pcie__write_bytes"),
    _clock("system clock MHz", "sys__cycles_elapsed"),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A counter that is sampled of a GPU: by which metric, and the most that it can be, if that is known."""

    counter: Counter
    metric: str
    greatest: float | None


def listed(gpu: int, interval_ns: int, sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """The counters of a GPU as a header has them."""
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
