"""Perfetto's own trace processor, run inside the test's process.

The WebAssembly is the one that the UI runs in the browser, from the UI that `find_ui` finds; the client is
the perfetto package's `TraceProcessor`. Neither a network nor a native binary is needed.

    with RealTraceProcessor(path) as tp:
        assert tp.rows("select name, dur from slice") == [...]
        assert tp.problems() == []
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfetto.trace_processor import TraceProcessor, TraceProcessorException
from perfetto.trace_processor.backend import TraceProcessorBackend

from tests.support.emscripten import EmscriptenModule, WasmAborted
from tracepipe.ui.serve import find_ui

# The UI's badge counts the severities error and data_loss only. Interned data that is missing, track events
# that make no sense and skipped packets are statistics of severity info, and just as wrong.
PROBLEMS_SQL = """
select name, idx, severity, source, value, description from stats
where value > 0 and (
  severity in ('error', 'data_loss') or name glob '*error*'
  or name in ('tokenizer_skipped_packets', 'flow_step_without_start', 'flow_end_without_start'))
order by name, idx"""

_REQUEST_BYTES = 32 << 20  # what the UI's worker sets aside; longer requests are handed over in pieces


class _InProcessBackend(TraceProcessorBackend):
    """TraceProcessorRpc over the module's two entry points: one takes requests, one calls back replies."""

    def __init__(self, protos: Any) -> None:
        super().__init__(protos)
        self._module = EmscriptenModule(find_ui().version / "trace_processor.wasm")
        self._module.main("trace_processor")
        self._reply = bytearray()
        on_reply = self._module.function_pointer(
            lambda address, size: self._reply.extend(self._module.read(address, size))
        )
        self._request_at = self._module.call("trace_processor_rpc_init", on_reply, _REQUEST_BYTES)

    def _request(self, method: str, **fields: Any) -> list[Any]:
        """The replies to one request; `fields` are those of the message TraceProcessorRpc."""
        kind = self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method)
        stream = self.protos.TraceProcessorRpcStream(msg=[{"request": kind, **fields}])
        request = stream.SerializeToString()
        self._reply.clear()
        try:
            for start in range(0, len(request), _REQUEST_BYTES):
                piece = request[start : start + _REQUEST_BYTES]
                self._module.write(self._request_at, piece)
                self._module.call("trace_processor_on_rpc_request", len(piece))
        except WasmAborted as error:
            raise TraceProcessorException(str(error)) from error
        replies = list(self.protos.TraceProcessorRpcStream.FromString(bytes(self._reply)).msg)
        for reply in replies:
            if reply.fatal_error or reply.HasField("invalid_request"):
                raise TraceProcessorException(reply.fatal_error or f"{method} is not known to this engine")
        return replies

    def execute_query(self, query: str) -> Any:
        result = self.protos.QueryResult()
        for reply in self._request("TPM_QUERY_STREAMING", query_args={"sql_query": query}):
            result.MergeFrom(reply.query_result)
        return result

    def parse(self, chunk: bytes) -> Any:
        return self._request("TPM_APPEND_TRACE_DATA", append_trace_data=bytes(chunk))[0].append_result

    def notify_eof(self) -> None:
        result = self._request("TPM_FINALIZE_TRACE_DATA")[0].finalize_data_result
        if result.error:
            raise TraceProcessorException(result.error)

    def compute_metric(self, metrics: list[str]) -> Any:
        return self._request("TPM_COMPUTE_METRIC", compute_metric_args={"metric_names": metrics})[
            0
        ].metric_result

    def trace_summary(self, specs: Any, metric_ids: Any = None, metadata_query_id: Any = None) -> Any:
        raise NotImplementedError("trace_summary: ask in SQL")

    def enable_metatrace(self) -> Any:
        raise NotImplementedError("metatrace: the engine runs in this process")

    def disable_and_read_metatrace(self) -> Any:
        raise NotImplementedError("metatrace: the engine runs in this process")

    def export(self, output_file: Any, export_format: str) -> Any:
        raise NotImplementedError("export: the engine has no files here")

    def close(self) -> None:
        self._module.close()


class RealTraceProcessor(TraceProcessor):
    """A trace as Perfetto imports it: a path, or the bytes of the file.

    Raises TraceProcessorException for a trace that the importer refuses. What the importer swallows is in
    `problems()`; a truncated file and a surplus end of a slice are not, so compare counts as well.
    """

    def __init__(self, trace: Path | str | bytes) -> None:
        # The package takes text for a URI unless a file of that name is there: an open file is unambiguous.
        if isinstance(trace, bytes):
            super().__init__(trace=iter([trace]))
            return
        with open(trace, "rb") as file:
            super().__init__(trace=file)

    def _create_backend(self, remote: str | None, addr: str | None) -> TraceProcessorBackend:
        return _InProcessBackend(self.protos)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """The result of `sql`, one dict of column → value a row."""
        return [dict(vars(row)) for row in self.query(sql)]

    def problems(self) -> list[dict[str, Any]]:
        """What went wrong in the import, one row of the table `stats` each; empty if nothing did."""
        return self.rows(PROBLEMS_SQL)
