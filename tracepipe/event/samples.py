"""Records of samples in `tracepipe/1`: what warps waited for."""

from __future__ import annotations

from typing import Annotated, TypedDict

from tracepipe.event.model import (
    COLUMN_LIMIT,
    COUNT_LIMIT,
    ID_LIMIT,
    INDEX_LIMIT,
    TIME_LIMIT_NS,
    Column,
    Doc,
)


class _SamplesRequired(TypedDict):
    ts_ns: Annotated[int, Doc("start of the stretch, on `clock`", minimum=0, maximum=TIME_LIMIT_NS)]
    functions: Annotated[list[str], Doc("names of functions, which function counts from 0")]
    reasons: Annotated[list[str], Doc("names of stall reasons, which reason counts from 0")]
    function: Annotated[Column, Doc("place of its name in functions", minimum=0, maximum=INDEX_LIMIT)]
    reason: Annotated[Column, Doc("place of its name in reasons", minimum=0, maximum=INDEX_LIMIT)]
    samples: Annotated[Column, Doc("how many samples", minimum=0, maximum=COUNT_LIMIT)]


class _Samples(_SamplesRequired, total=False):
    dur_ns: Annotated[int, Doc("length of the stretch", minimum=0, maximum=TIME_LIMIT_NS)]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]
    gpu: Annotated[int, Doc("GPU index", minimum=0)]
    pid: Annotated[int, Doc("process whose kernels were sampled", minimum=0, maximum=ID_LIMIT)]
    period_cycles: Annotated[int, Doc("cycles of an SM between two samples", minimum=1, maximum=COUNT_LIMIT)]


class StallRecord(_Samples):
    """Samples of what warps waited for, of one process on one GPU in a stretch of time. `function`, `reason`
    and `samples` have a value for each pair that was sampled. Empty columns state that nothing is sampled
    from `ts_ns` on.
    """

    type: Annotated[str, Doc("record type", enum=("gpu_stall",))]


class _InstructionSamples(_Samples, total=False):
    modules: Annotated[list[str], Doc("of each function, the CRC of its module's machine code")]
    lines: Annotated[list[str], Doc("lines of the source as FILE:LINE, which line counts from 1")]
    line: Annotated[Column, Doc("place in lines, from 1; 0: it is not known", minimum=0, maximum=INDEX_LIMIT)]


class InstructionStallRecord(_InstructionSamples):
    """Samples of a stretch by instruction: the same samples as in `gpu_stall`.

    `function`, `reason`, `samples` and `offset` have a value for each; so has `line` where lines of the
    source are known.
    """

    type: Annotated[str, Doc("record type", enum=("gpu_stall_pc",))]
    offset: Annotated[
        Column, Doc("of the instruction in its function, bytes", minimum=0, maximum=COLUMN_LIMIT)
    ]
