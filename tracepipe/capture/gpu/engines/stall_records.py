"""The records of stall reasons, byte by byte: see `native/stall_records.h`, which draws them."""

from __future__ import annotations

import struct
from typing import Final

KIND_STALL_REASON: Final = 49
KIND_STALLS: Final = 50
KIND_STALL_PCS: Final = 51
KIND_STALL_LOSS: Final = 52
LAYER: Final = "gpu_stall"
"""What they are lost as."""
LAYERS: Final = dict.fromkeys((KIND_STALLS, KIND_STALL_LOSS), LAYER)
WHOLE: Final = frozenset({KIND_STALLS, KIND_STALL_PCS, KIND_STALL_LOSS})
"""Kinds that become lines, and need names alone."""

REASON: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<QQII")
STALL: Final = struct.Struct("<QII")
STALL_PC: Final = struct.Struct("<QQQQII")
LOSS: Final = struct.Struct("<QQQ")
