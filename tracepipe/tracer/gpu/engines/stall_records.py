"""The byte layout of the records of stall reasons, which `native/stall_records.h` describes."""

from __future__ import annotations

import struct
from typing import Final

KIND_STALL_REASON: Final = 49
KIND_STALLS: Final = 50
KIND_STALL_PCS: Final = 51
KIND_STALL_LOSS: Final = 52
LAYER: Final = "gpu_stall"
"""The layer of their losses."""
LAYERS: Final = dict.fromkeys((KIND_STALLS, KIND_STALL_LOSS), LAYER)
WHOLE: Final = frozenset({KIND_STALLS, KIND_STALL_PCS, KIND_STALL_LOSS})
"""Kinds that become lines, and need only names."""

REASON: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<QQII")
STALL: Final = struct.Struct("<QII")
STALL_PC: Final = struct.Struct("<QQQQII")
LOSS: Final = struct.Struct("<QQQ")
