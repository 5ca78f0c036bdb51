"""Perfetto's own trace processor, run inside this process.

The WebAssembly is that of the UI that `find_ui` finds, which runs it in the browser. The client is the
perfetto package's `TraceProcessor`. Neither a network nor a native binary is needed.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from perfetto.common.exceptions import PerfettoException
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.backend import TraceProcessorBackend

from tracepipe.sql.emscripten import EmscriptenModule, WasmAborted
from tracepipe.ui.serve import find_ui

_refused: Any = PerfettoException
_REQUEST_BYTES = 32 << 20  # as in the UI's worker; longer requests are passed in pieces


class _InProcessBackend(TraceProcessorBackend):
    """TraceProcessorRpc over the module's two entry points: one for requests, one that calls back with
    replies.
    """

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
        """The replies to a request; `fields` are those of the message TraceProcessorRpc."""
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
            raise _refused(str(error)) from error
        replies = list(self.protos.TraceProcessorRpcStream.FromString(bytes(self._reply)).msg)
        for reply in replies:
            if reply.fatal_error or reply.HasField("invalid_request"):
                raise _refused(reply.fatal_error or f"{method} is not known to this engine")
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
            raise _refused(result.error)

    def compute_metric(self, metrics: list[str]) -> Any:
        return self._request("TPM_COMPUTE_METRIC", compute_metric_args={"metric_names": metrics})[
            0
        ].metric_result

    def trace_summary(self, specs: Any, metric_ids: Any = None, metadata_query_id: Any = None) -> Any:
        raise NotImplementedError("trace_summary: use SQL")

    def enable_metatrace(self) -> Any:
        raise NotImplementedError("metatrace: the engine runs in this process")

    def disable_and_read_metatrace(self) -> Any:
        raise NotImplementedError("metatrace: the engine runs in this process")

    def export(self, output_file: Any, export_format: str) -> Any:
        raise NotImplementedError("export: the engine has no files here")

    def close(self) -> None:
        self._module.close()


class WasmTraceProcessor(TraceProcessor):
    """A trace that Perfetto imports: an open file, or pieces of one, but no text, which could be a URI; None
    if `http.parse` gets it.

    Raises PerfettoException for a trace that the importer refuses, OutputError if this machine has no UI.
    """

    def __init__(self, trace: BinaryIO | Any = None) -> None:
        super().__init__(trace=trace)

    def _create_backend(self, remote: str | None, addr: str | None) -> TraceProcessorBackend:
        return _InProcessBackend(self.protos)
