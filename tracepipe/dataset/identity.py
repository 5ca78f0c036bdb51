"""Which rank of which host a recording is of: as it says itself, else by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from tracepipe.errors import InputError
from tracepipe.event.model import Header
from tracepipe.launchers import IN_EACH_RANK, RANK_MAX, launcher_in

UNKNOWN_HOST: Final = "unknown"
# After all that names a format or a compression: rank_3.pt.trace.json.gz is rank_3.
_ENDINGS: Final = re.compile(r"(\.(pt|trace|jsonl?|ndjson|gz|zst|sqlite|db|pftrace|perfetto-trace|pb))+$")
_NAMED: Final = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_AT_THE_END: Final = re.compile(r"(?:^|[-_.])(\d+)$")
# Letters of a host's name, of which each may take nine bytes in the name of a folder (Linux: 255).
_HOST_MAX: Final = 25


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank. `clock` names the clock that its times are on, which ranks of one host may share."""

    host: str
    rank: int
    world_size: int | None
    clock: str


def identity_of(header: Header, trace_clock: str, path: str, root: str) -> Identity:
    """The identity of the recording at `path`, found below `root`. Raises InputError if its rank is not
    known.

    If the recording does not name the host, the folder is taken for it, as in `HOST/RANK.jsonl`.
    """
    rank = header.rank
    if rank is None and (launcher := launcher_in(header.command)):
        # A number in its name is that of a host, or of an attempt.
        raise InputError(
            f"has all ranks that {launcher} started, and does not state which is which",
            IN_EACH_RANK,
            path=path,
        )
    if rank is None:
        stem = _ENDINGS.sub("", PurePath(path).name)
        named = _NAMED.search(stem) or _AT_THE_END.search(stem)
        rank = int(named[1]) if named and int(named[1]) <= RANK_MAX else None
    if rank is None:
        hint = "Name it after its rank: 3.jsonl, rank3.json, HOST-3.jsonl."
        raise InputError("does not say which rank it is of", hint, path=path)
    parent = PurePath(path).parent
    folder = "" if parent == PurePath(root) else parent.name
    host = (header.host or folder or UNKNOWN_HOST)[:_HOST_MAX]
    # Nothing says that two recordings of unknown hosts were made on one, nor of two boots.
    of_host = host if host != UNKNOWN_HOST else f"{host}, rank {rank}"
    counts_from_boot = f" since boot {header.boot}" if header.boot and trace_clock != "realtime" else ""
    return Identity(host, rank, header.world_size, f"{of_host}: {trace_clock}{counts_from_boot}")
