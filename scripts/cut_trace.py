"""Cuts a part out of a Chrome trace (JSON), event by event as they stand there: for fixtures.

    python scripts/cut_trace.py TRACE.json[.gz] --skip 100 --take 40 > input.json

Of each category `--skip` events are left out and `--take` kept; of names (M) those of processes
that are left; of the members around the events the short ones, and of `deviceProperties` the first GPU's.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections import Counter
from pathlib import Path

import orjson

from tracepipe.readers.json_elements import JsonElements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--take", type=int, default=40)
    asked = parser.parse_args()
    opened = gzip.open if asked.trace.suffix == ".gz" else open
    met: Counter[str] = Counter()
    kept: list[bytes] = []
    names: list[tuple[object, bytes]] = []
    pids: set[object] = set()
    with opened(asked.trace, "rb") as stream:
        elements = JsonElements(stream)
        elements.begin()
        for batch in elements.batches():
            for text in batch.texts:
                event = orjson.loads(text)
                if event.get("ph") == "M":
                    names.append((event.get("pid"), text))
                    continue
                kind = f"{event.get('ph')} {event.get('cat')}"
                met[kind] += 1
                if asked.skip < met[kind] <= asked.skip + asked.take:
                    kept.append(text)
                    pids.add(event.get("pid"))
    members = elements.members
    if "deviceProperties" in members:
        members["deviceProperties"] = members["deviceProperties"][:1]
    kept += [text for pid, text in names if pid in pids]
    out = [b"{"]
    out += [orjson.dumps(key) + b": " + orjson.dumps(value) + b"," for key, value in members.items()]
    out += [b'"traceEvents": [', b",\n".join(kept), b"]}"]
    sys.stdout.buffer.write(b"\n".join(out) + b"\n")


if __name__ == "__main__":
    main()
