"""Makes databases with the tables of `nsys export --type sqlite`, schema 3.25.

    python -m tests.support.nsys_export FILE

Times count from a session's start. There are a process 300 with the threads 300 and 301, and a process 400,
whose first GPU is the machine's second; correlation numbers are the same in both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.sqlite_file import write_tables

BASE_NS = 35_000_000_000
UTC_NS = 1_779_630_014_975_716_426
MACHINE = 1 << 48


def pid(number: int) -> int:
    """A globalPid."""
    return MACHINE | number << 24


def tid(process: int, thread: int) -> int:
    """A globalTid."""
    return pid(process) | thread


VECTOR_ADD = "void vectorAdd<float>(float const*, float*, int)"
TEXTS = [
    "cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020", "cuMemsetD8Async", "cudaStreamSynchronize_v3020",
    "cudaGraphLaunch_v10000",
    VECTOR_ADD, "vectorAdd", "registered", "loader", "poll",
    "ioctl",
    "Lazy Function Loading", "{\"rank\":3}", "trainer", "cublasSgemm_v2",
]  # fmt: skip
ID = {text: at for at, text in enumerate(TEXTS, 100)}

Rows = list[dict[str, Any]]
P, T, T2, Q = pid(300), tid(300, 300), tid(300, 301), tid(400, 400)


def gpu(start: int, end: int | None, correlation: int, process: int = 300, **more: Any) -> dict[str, Any]:
    """A row of work on a GPU."""
    return {
        "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7,
        "correlationId": correlation, "globalPid": pid(process), **more,
    }  # fmt: skip


def kernel(start: int, end: int | None, correlation: int, process: int = 300, **more: Any) -> dict[str, Any]:
    """A row of a kernel."""
    sizes = dict(
        zip(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), (64, 2, 1, 192, 1, 1), strict=True)
    )
    return gpu(
        start, end, correlation, process, demangledName=ID[VECTOR_ADD], shortName=ID["vectorAdd"], **sizes,
        registersPerThread=32, staticSharedMemory=16, dynamicSharedMemory=1024, **more,
    )  # fmt: skip


def call(
    start: int, end: int, name: str, correlation: int, thread: int = T, result: int = 0
) -> dict[str, Any]:
    """A row of a call."""
    return {
        "start": start, "end": end, "eventClass": 0, "globalTid": thread, "correlationId": correlation,
        "nameId": ID[name], "returnValue": result,
    }  # fmt: skip


def nvtx(
    start: int, end: int | None, kind: int, text: str | None, thread: int = T, **more: Any
) -> dict[str, Any]:
    """A row of NVTX_EVENTS."""
    return {
        "start": start,
        "end": end,
        "eventType": kind,
        "text": text,
        "globalTid": thread,
        "domainId": 0,
        **more,
    }


def labels(*names: str) -> Rows:
    """Rows of an ENUM_ table."""
    return [{"id": at, "name": name.upper(), "label": name} for at, name in enumerate(names)]


def rows(columns: str, *values: tuple[Any, ...]) -> Rows:
    """Rows of a table with these columns."""
    return [dict(zip(columns.split(), row, strict=True)) for row in values]


def tables() -> dict[str, Rows]:
    """The rows of every table that is read, not in the order of time."""
    return about() | of_cuda() | of_host() | of_nvtx()


def about() -> dict[str, Rows]:
    """What the recording is of."""
    return {
        "StringIds": [{"id": at, "value": text} for text, at in ID.items()],
        "TARGET_INFO_SESSION_START_TIME": rows("utcEpochNs systemClockNs", (UTC_NS, BASE_NS)),
        "ANALYSIS_DETAILS": rows("duration", (1_000_000,)),
        "META_DATA_CAPTURE": rows(
            "name value",
            ("PROCESS_0:COMMAND", "./train"),
            ("PROCESS_0:ARGUMENT_0", "--steps=2"),
            ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph"),
        ),
        "META_DATA_EXPORT": rows("name value", ("EXPORT_PRODUCT_VERSION", "2026.2.1.210")),
        "TARGET_INFO_SYSTEM_ENV": rows("name value", ("Hostname", "box")),
        "TARGET_INFO_GPU": rows(
            "id name uuid smCount", (0, "NVIDIA H100", "00-1", 132), (1, "NVIDIA H100", "11-1", 132)
        ),
        "TARGET_INFO_CUDA_DEVICE": rows("gpuId cudaId pid", (0, 0, 300), (1, 0, 400)),
        "PROCESSES": rows("globalPid name", (P, "/usr/bin/train"), (pid(400), "train")),
        "ThreadNames": rows("nameId priority globalTid", (ID["vectorAdd"], 5, T2), (ID["loader"], 20, T2)),
        "TARGET_INFO_GPU_METRICS": rows("typeId metricId metricName", (0x10001, 3, "SMs Active [%]")),
        "GPU_METRICS": rows(
            "timestamp typeId metricId value", (17_000, 0x10001, 3, 4), (27_000, 0x10001, 3, 0.5)
        ),
        "NIC_METRICS": rows("timestamp value", (1, 2), (3, 4)),
        "ENUM_NSYS_EVENT_TYPE": rows("id label", (99, "NvtxNameCudaStream")),
        "ENUM_CUDA_MEM_KIND": labels("Pageable", "Pinned", "Device", "Array", "Managed"),
        "ENUM_CUPTI_SYNC_TYPE": labels("Unknown", "Event sync", "Stream wait sync", "Stream sync"),
        "ENUM_CUPTI_OVERHEAD_TYPE": labels(*"abcdefg", "Lazy function loading (CUDA)"),
        "ENUM_DIAGNOSTIC_SEVERITY_LEVEL": labels("Unknown", "Info", "Warning", "Error"),
        "ENUM_DIAGNOSTIC_SOURCE_TYPE": labels("Unknown source", "Injection"),
        "ENUM_DIAGNOSTIC_TIMESTAMP_SOURCE": labels("Unknown timestamp", "Target timestamp"),
    }


def of_cuda() -> dict[str, Rows]:
    """What CUPTI records. A kernel overlaps another; one ends before it starts, one outlasts the session."""
    launch = "cudaLaunchKernel_v7000"
    cuda = "CUPTI_ACTIVITY_KIND_"
    return {
        f"{cuda}RUNTIME": [
            call(10_000, 14_000, launch, 1),
            call(20_000, 24_000, "cudaMemcpyAsync_v3020", 2),
            call(30_000, 33_000, "cuMemsetD8Async", 3, T2),
            call(40_000, 90_000, "cudaStreamSynchronize_v3020", 4, result=700),
            call(11_000, 15_000, launch, 1, Q),
            call(91_000, 95_000, "cudaGraphLaunch_v10000", 6),
        ],
        f"{cuda}KERNEL": [
            kernel(50_000, 60_000, 1),
            kernel(55_000, 65_000, 9, graphNodeId=77, graphId=5),
            kernel(16_000, 26_000, 1, 400),
            kernel(70_000, 69_000, 0),
            kernel(71_000, 71_000 + 10_000_000, 0),
        ],
        f"{cuda}GRAPH_TRACE": [gpu(96_000, 97_000, 6, graphId=2, graphExecId=3)],
        f"{cuda}MEMCPY": [
            gpu(66_000, 67_000, 2, bytes=4096, copyKind=1, srcKind=1, dstKind=2),
            gpu(68_000, 68_500, 0, bytes=64, copyKind=12, srcKind=4, dstKind=0),
        ],
        f"{cuda}MEMSET": [gpu(67_000, 67_500, 3, bytes=256, value=255, memKind=2)],
        f"{cuda}SYNCHRONIZATION": [gpu(40_500, 89_000, 4, syncType=3, eventId=4294967295)],
        f"{cuda}CUDA_EVENT": rows(
            "timestamp deviceId contextId streamId correlationId globalPid eventId",
            (61_000, 0, 1, 7, 5, P, 8),
            (0, 0, 1, 7, 5, P, 9),
        ),
        f"{cuda}OVERHEAD": rows(
            "start end globalTid nameId overheadType", (10_500, 13_000, T, ID["Lazy Function Loading"], 7)
        ),
        "CUDA_GPU_MEMORY_USAGE_EVENTS": rows(
            "start globalPid deviceId address bytes memKind memoryOperationType",
            (5_000, P, 0, 4096, 1024, 2, 0),
            (99_000, P, 0, 4096, 1024, 2, 1),
        ),
    }


def of_host() -> dict[str, Rows]:
    """What the host's threads did."""
    return {
        "OSRT_API": rows(
            "start end globalTid nameId returnValue",
            (41_000, 42_000, T, ID["ioctl"], 0),
            (1_000, 80_000, T2, ID["poll"], 1),
        ),
        "CUBLAS_EVENTS": rows("start end globalTid nameId", (9_000, 16_000, T, ID["cublasSgemm_v2"])),
        "SCHED_EVENTS": rows(
            "start cpu isSchedIn globalTid", (2_000, 3, 1, T), (43_000, 3, 0, T), (88_000, 5, 1, T)
        ),
        "DIAGNOSTIC_EVENT": rows(
            "timestamp timestampType source severity text globalPid",
            (0, 1, 1, 1, "started", P),
            (90_000, 1, 1, 2, "a buffer was full", P),
        ),
    }


def of_nvtx() -> dict[str, Rows]:
    """What the program says of itself. One range of a thread crosses others, and one never ends."""
    return {
        "NVTX_EVENTS": [
            nvtx(500, None, 75, "data", domainId=2),
            nvtx(600, None, 33, "batches", domainId=2, category=4),
            nvtx(8_000, 98_000, 59, "step"),
            nvtx(9_000, 39_000, 59, "forward", color=0xFF76B900),
            nvtx(39_000, 39_500, 59, None, textId=ID["registered"], domainId=2, category=4),
            nvtx(30_000, 99_000, 59, "crosses"),
            nvtx(45_000, 45_000, 59, "empty"),
            nvtx(46_000, None, 34, "mark", uint64Value=-1),
            nvtx(47_000, None, 34, "said", jsonTextId=ID['{"rank":3}']),
            nvtx(10_000, 70_000, 60, "first", endGlobalTid=T2),
            nvtx(12_000, 60_000, 60, "second", doubleValue=0.5),
            nvtx(62_000, 69_000, 60, "third"),
            nvtx(97_500, None, 59, "never ends"),
            nvtx(3_000, None, 39, "trainer"),
            nvtx(3_500, None, 99, "a stream"),
        ]
    }


def make(path: Path | str, content: dict[str, Rows]) -> Path:
    """A database with these tables."""
    return write_tables(path, content)


if __name__ == "__main__":
    make(sys.argv[1], tables())
