"""All records of `tracepipe/1` by their types."""

from __future__ import annotations

from typing import Final

from tracepipe.event.model import (
    LAYERS,
    ClockRecord,
    Event,
    Footer,
    Header,
    LossRecord,
    NameRecord,
    StackRecord,
    ThreadExit,
    WarpBatch,
    WindowRecord,
)
from tracepipe.event.samples import InstructionStallRecord, StallRecord

RECORDS: Final[dict[str, type]] = {
    "header": Header,
    "clock": ClockRecord,
    "loss": LossRecord,
    "window": WindowRecord,
    "stack": StackRecord,
    "name": NameRecord,
    "gpu_warp": WarpBatch,
    "gpu_thread_exit": ThreadExit,
    "gpu_stall": StallRecord,
    "gpu_stall_pc": InstructionStallRecord,
    "footer": Footer,
    **{name: Event for name in LAYERS if name != "gpu_warp"},
}
