"""Measures how long each tool of `tracepipe mcp` takes to answer about a recording.

    python benchmarks/agents.py [RECORDING | EVENTS]        default: 10000000 generated events, about 1 GB

The official client asks over standard input and output. `cold`: an empty cache. `first`: a new server, the
tables of the recording in the cache. `next`: the same question, after all others. Each has the seconds that
passed, and the processor seconds of the server.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.recordings import write_mixed  # noqa: E402

_DUCKDB = "select name, count(*), sum(dur_ns) from kernels group by name order by 3 desc"
_PERFETTO = "select name, count(*), sum(dur) from slice group by name order by 3 desc limit 20"


def questions(run: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A question for each tool, and each dialect of SQL."""
    of_run = (
        "summary", "steps", "gaps", "lines", "layers", "annotations", "memory", "timeline", "warps", "stalls",
        "whatif", "ranks", "schema", "picture",
    )  # fmt: skip
    return {
        "recordings": ("recordings", {}),
        **{name: (name, {"run": run}) for name in of_run},
        "diff": ("diff", {"a": [run], "b": [run]}),
        "sql": ("sql", {"run": run, "sql": _DUCKDB}),
        "sql of Perfetto": ("sql", {"run": run, "sql": _PERFETTO}),
    }


async def asked(folder: Path, cache: str, wanted: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """The seconds that one server takes for each question in turn; "!" marks an error."""
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "tracepipe", "mcp", str(folder)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRACEPIPE_CACHE": cache},
    )
    found = {}
    async with Client(stdio_client(command)) as client:
        for name, (tool, arguments) in wanted.items():
            start, before = time.perf_counter(), _processor_s()
            reply = await client.call_tool(tool, arguments, read_timeout_seconds=600)
            spent = f"{time.perf_counter() - start:.2f}/{_processor_s() - before:.2f}"
            found[name] = f"{spent}{'!' if reply.is_error else ''}"
            print(f"  {name} {found[name]}", file=sys.stderr)
    return found


def _processor_s() -> float:
    """The processor seconds of the children of this process so far."""
    used = 0
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


def measure(source: Path) -> None:
    """Print the seconds of each question about a recording."""
    size_bytes = source.stat().st_size
    print(f"{source.name}: {size_bytes / 1e9:.2f} GB, {os.cpu_count()} processors")
    all_of_them = questions(source.name)
    with tempfile.TemporaryDirectory() as cache:
        cold = anyio.run(asked, source.parent, cache, {"summary": all_of_them["summary"]})
        again = {f"{name} again": one for name, one in all_of_them.items()}
        found = anyio.run(asked, source.parent, cache, all_of_them | again)
    print(f"  {'tool':<16} {'cold':>12} {'first':>12} {'next':>12}")
    for name in all_of_them:
        print(f"  {name:<16} {cold.get(name, ''):>12} {found[name]:>12} {found[f'{name} again']:>12}")


def main() -> None:
    """Measure one recording."""
    given = sys.argv[1] if len(sys.argv) > 1 else "10000000"
    if not given.isdigit():
        measure(Path(given).resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "run.jsonl")
        write_mixed(source, int(given))
        measure(source)


if __name__ == "__main__":
    main()
