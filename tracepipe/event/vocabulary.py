"""Names in events that mean something to more than one room."""

from __future__ import annotations

from typing import Final

RUNNING: Final = "running"
"""The slice of the scheduler's own layer: a thread has a processor."""
MEMORY_IN_USE: Final = "gpu_mem"
"""The event of the `memory` layer that says with `total_bytes` what is in use on a GPU, by whomever."""
ADDRESS_KEYS: Final = ("address", "ptr", "dptr", "devPtr")
"""Keys of the address in the arguments of a `memory` event, as the sources of recordings call it."""
SIZE_KEYS: Final = ("size_bytes", "size")
"""Keys of what a `memory` or `transfer` event is about, bytes, likewise."""
