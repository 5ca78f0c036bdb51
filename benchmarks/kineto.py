"""Compares converting a trace of PyTorch's profiler with parsing it, and with the core and without it.

    python benchmarks/kineto.py [MB]        default: 100

Each runs in a separate process. The figures are ratios of processor time with start, the best of three runs,
as absolute times differ between machines. Parsing is `orjson.loads` of the whole file, which draws nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convert import measured
from benchmarks.recordings import write_kineto

_KB_A_TIME = 184


def main() -> None:
    """Print the comparison."""
    size_mb = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "trace.json"), Path(folder, "out")
        write_kineto(source, size_mb * 1000 // _KB_A_TIME)
        whole_mb = source.stat().st_size / 1e6
        costs = {pure: measured("perfetto", source, target, pure=pure, runs=3) for pure in (False, True)}
        parse_s = measured("orjson_whole", source, target, pure=False, runs=3).seconds
    for pure, cost in costs.items():
        print(
            f"{'in Python alone' if pure else 'with the core'}: {whole_mb / cost.seconds:.0f} MB/s, "
            f"{cost.seconds / parse_s:.1f} times as long as parsing it, {cost.peak_mb:.0f} MB"
        )


if __name__ == "__main__":
    main()
