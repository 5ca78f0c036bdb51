"""Makes rocpd databases, as rocprofv3 writes them: `python -m tests.support.rocpd_database FILE`.

Two processes of one machine, 500 and 501, with a GPU each. Times stand in the rows themselves, as in
ROCm 7.0, or in a table of their own, which later versions have with the tracks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.nsys_export import Rows, rows
from tests.support.sqlite_file import write_tables

ENDING = "_0000_7"
BASE_NS = 63_855_000_000_000
TEXTS = {
    1: "HIP_RUNTIME_API_EXT", 2: "hipLaunchKernel", 3: "hipMemcpyAsync", 4: "MARKER_CORE_RANGE_API",
    5: "roctxThreadRangeA", 6: "MEMORY_COPY_HOST_TO_DEVICE", 7: "KERNEL_DISPATCH", 8: "HSA_CORE_API",
    9: "hsa_queue_create", 10: "roctxMarkA", 11: "MEMORY_ALLOCATION_ALLOCATE", 12: "MEMORY_ALLOCATION_FREE",
    13: "hipDeviceSynchronize", 14: "a sample", 15: "SAMPLES",
}  # fmt: skip
KERNEL = "void vector_add<float>(float const*, float*, int)"


def about() -> dict[str, Rows]:
    """What the recording is of."""
    return {
        "string": [{"id": at, "string": text} for at, text in TEXTS.items()],
        "metadata": [{"id": 1, "tag": "schema_version", "value": "3"}],
        "info_node": rows("id hostname", (1, "mi350")),
        "info_process": rows(
            "id pid command name", (1, 500, "./train --steps 2", None), (2, 501, "./train", "rank1")
        ),
        "info_thread": rows(
            "id pid tid name", (10, 1, 500, None), (11, 1, 510, "loader"), (12, 2, 501, None)
        ),
        "info_agent": rows(
            "id type type_index product_name name",
            (1, "CPU", 0, "EPYC", "cpu"),
            (2, "GPU", 0, "AMD Instinct MI350X", "gfx950"),
            (3, "GPU", 1, "AMD Instinct MI350X", "gfx950"),
        ),
        "info_kernel_symbol": rows(
            "id kernel_name display_name", (8, "_Z10vector_add.kd", KERNEL), (9, "plain.kd", None)
        ),
        "info_pmc": rows("id name", (1, "SQ_WAVES")),
        "event": rows(
            "id category_id stack_id correlation_id extdata",
            (1, 1, 7, 0, "{}"), (2, 7, 7, 0, "{}"), (3, 1, 8, 0, "{}"), (4, 7, 8, 0, "{}"),
            (5, 4, 9, 0, '{"message":"step"}'), (6, 4, 10, 0, '{"message":"forward"}'),
            (7, 8, 11, 0, "{}"), (8, 4, 12, 0, '{"message":"here"}'),
            (9, 1, 7, 0, "{}"), (10, 7, 7, 0, "{}"), (11, 1, 13, 0, "{}"), (12, 15, 14, 0, "{}"),
            (13, 11, 15, 0, "{}"), (14, 4, 16, 0, '{"message":"crosses"}'),
        ),
        "arg": rows(
            "id event_id position type name value",
            (1, 1, 1, "dim3", "numBlocks", "64"), (2, 1, 0, "void*", "function", "0x7f"),
        ),
        "pmc_event": rows("id event_id pmc_id value", (1, 2, 1, 4096.0)),
    }  # fmt: skip


def spans() -> dict[str, Rows]:
    """What has a time, out of order."""
    on = "id pid tid agent_id queue_id stream_id start end event_id"
    sizes = "kernel_id dispatch_id group_segment_size private_segment_size workgroup_size_x workgroup_size_y"
    sizes += " workgroup_size_z grid_size_x grid_size_y grid_size_z"
    return {
        "region": rows(
            f"{on} name_id",
            (3, 1, 10, None, None, None, 9_000, 90_000, 5, 5),
            (1, 1, 10, None, None, None, 10_000, 14_000, 1, 2),
            (2, 1, 10, None, None, None, 20_000, 24_000, 3, 3),
            (4, 1, 10, None, None, None, 9_500, 30_000, 6, 5),
            (5, 1, 11, None, None, None, 1_000, 5_000, 7, 9),
            (6, 1, 10, None, None, None, 31_000, 31_000, 8, 10),
            (7, 2, 12, None, None, None, 11_000, 15_000, 9, 2),
            (8, 1, 10, None, None, None, 40_000, 89_000, 11, 13),
            (9, 1, 10, None, None, None, 80_000, 95_000, 14, 5),
        ),
        "kernel_dispatch": rows(
            f"{on} {sizes}",
            (1, 1, 10, 2, 1, 3, 50_000, 60_000, 2, 8, 1, 64, 0, 256, 1, 1, 16_640, 2, 1),
            (2, 2, 12, 3, 1, 3, 16_000, 26_000, 10, 9, 1, 0, 16, 64, 1, 1, 64, 1, 1),
            (3, 1, 10, 2, 1, 3, 55_000, 54_000, None, 9, 2, 0, 0, 64, 1, 1, 64, 1, 1),
        ),
        "memory_copy": rows(
            f"{on} name_id size dst_agent_id src_agent_id",
            (1, 1, 10, None, None, 3, 66_000, 67_000, 4, 6, 4096, 2, 1),
        ),
        "memory_allocate": rows(
            f"{on} type level name_id address size",
            (1, 1, 10, 2, None, None, 5_000, 6_000, 13, "ALLOC", "REAL", 11, 4096, 1024),
            (2, 1, 10, 2, None, None, 97_000, 98_000, None, "FREE", "REAL", 12, 4096, 0),
        ),
        "sample": rows("id pid tid timestamp event_id name_id", (1, 1, 10, 45_000, 12, 14)),
    }  # fmt: skip


def inline() -> dict[str, Rows]:
    """All tables, with times in the rows."""
    moved = {
        kind: [
            row | {name: BASE_NS + row[name] for name in ("start", "end", "timestamp") if name in row}
            for row in some
        ]
        for kind, some in spans().items()
    }
    return about() | moved


def apart() -> dict[str, Rows]:
    """All tables, with times and tracks in tables of their own."""
    content = inline()
    times: Rows = []
    tracks: Rows = []
    of = ("pid", "tid", "agent_id", "queue_id", "stream_id")
    for kind in spans():
        some = []
        for row in content[kind]:
            left = {
                name: value for name, value in row.items() if name not in (*of, "start", "end", "timestamp")
            }
            for name in ("start", "end", "timestamp"):
                if name in row:
                    times.append({"id": len(times) + 1, "value": row[name]})
                    left[f"{name}_id"] = len(times)
            tracks.append({"id": len(tracks) + 1} | {name: row.get(name) for name in of})
            some.append(left | {"track_id": len(tracks)})
        content[kind] = some
    return content | {"timestamp": times, "track": tracks}


def make(path: Path | str, content: dict[str, Rows], ending: str = ENDING) -> Path:
    """A database with these tables, their names ending in `ending`, and views without it."""
    statements = [f'CREATE VIEW "rocpd_{kind}" AS SELECT * FROM "rocpd_{kind}{ending}"' for kind in content]
    if "arg" in content:
        statements.append(f'CREATE INDEX arg_event ON "rocpd_arg{ending}" (event_id)')
    return write_tables(path, {f"rocpd_{kind}{ending}": some for kind, some in content.items()}, statements)


if __name__ == "__main__":
    make(sys.argv[1], inline())
