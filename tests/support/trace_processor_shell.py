"""A stand-in for trace_processor_shell: its options, and as much of its HTTP as the client of the perfetto
package asks for, before the same engine as WebAssembly. It ends when it is asked for the path $ENDS_AT.
"""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

from tracepipe.sql.wasm import WasmTraceProcessor

PROTOS: Any = ProtoFactory(PlatformDelegate())
PROCESSOR: Any = WasmTraceProcessor()


class Handler(BaseHTTPRequestHandler):
    """One connection of the client."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """/status and /notify_eof."""
        if self.path == "/notify_eof":
            PROCESSOR.http.notify_eof()
        self._answer(PROTOS.StatusResult().SerializeToString())

    def do_POST(self) -> None:
        """/parse and /query."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == os.environ.get("ENDS_AT"):
            os._exit(1)
        if self.path == "/parse":
            self._answer(PROCESSOR.http.parse(body).SerializeToString())
        else:
            query = PROTOS.QueryArgs.FromString(body).sql_query
            self._answer(PROCESSOR.http.execute_query(query).SerializeToString())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--http-port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
