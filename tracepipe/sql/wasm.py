"""Perfetto's own trace processor, run inside this process.

The WebAssembly is that of the UI that `find_ui` finds, which runs it in the browser. Emscripten built it for
a browser; its host functions are here in Python: clocks, the environment, standard output and error, and a
growing heap. There is no file system: every file call returns an error, as in the UI's worker. The client is
the perfetto package's `TraceProcessor`. Neither a network nor a native binary is needed.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import wasmtime
from perfetto.common.exceptions import PerfettoException
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.backend import TraceProcessorBackend

from tracepipe.errors import QueryError
from tracepipe.sql.processor import Bounds
from tracepipe.ui.serve import find_ui

_PAGE_BYTES = 64 << 10
_LIMIT_BYTES = (4 << 30) - _PAGE_BYTES  # 32-bit addresses; the last page is Emscripten's own limit
# Emscripten's libc numbers errors as WASI does, not as Linux does.
_EBADF, _ENOSYS, _ESPIPE = 8, 52, 70
_STDERR = 2
_NEVER = 1 << 62
"""A deadline in epochs of wasmtime."""
_NOTHING_TO_DO = ("environ_get", "fd_close", "fd_sync")


class WasmAborted(Exception):
    """The module ended itself: a check failed, memory ran out, or a host function is missing."""


@functools.cache
def _compiled(wasm: Path) -> tuple[wasmtime.Engine, wasmtime.Module]:
    """The module, compiled once per process; wasmtime caches the code in ~/.cache/wasmtime for the next
    one.
    """
    config = wasmtime.Config()
    # wasmtime's default of 512 KiB is too small for SQLite's parser with long queries. With 2 MiB, the size
    # of its asynchronous stacks, or more, it refuses to start.
    config.max_wasm_stack = 1 << 20
    config.epoch_interruption = True  # so that a call can be ended
    with contextlib.suppress(wasmtime.WasmtimeError):  # without a writable home, each process compiles
        config.cache = True
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module.from_file(engine, str(wasm))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


class EmscriptenModule:
    """One instance of the module at `wasm`, its constructors run. What it prints is kept in `printed`."""

    def __init__(self, wasm: Path) -> None:
        engine, module = _compiled(wasm)
        self.printed: list[str] = []
        self._engine, self._store = engine, wasmtime.Store(engine)
        self._store.set_epoch_deadline(_NEVER)
        linker = wasmtime.Linker(engine)
        for wanted in module.imports:
            name = wanted.name or ""
            kind: Any = wanted.type
            linker.define_func(wanted.module, name, kind, self._host_function(name))
        exports: Any = linker.instantiate(self._store, module).exports(self._store)
        self._exports = exports
        self._memory: wasmtime.Memory = self._exports["memory"]
        self.call("emscripten_stack_init")
        self.call("__wasm_call_ctors")

    def call(self, function: str, *args: int) -> int:
        """Call an exported function and return its result. After WasmAborted the instance cannot be used."""
        try:
            result = self._exports[function](self._store, *args)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            raise WasmAborted(f"{''.join(self.printed)[-4000:]}{error}") from error
        return (result or 0) & 0xFFFFFFFF

    @contextlib.contextmanager
    def ending_after(self, seconds: float) -> Iterator[None]:
        """Calls that take longer raise WasmAborted."""
        self._store.set_epoch_deadline(1)
        timer = Timer(seconds, self._engine.increment_epoch)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._store.set_epoch_deadline(_NEVER)

    def main(self, program: str) -> int:
        """Runs C's main with argv = [program]; returns its exit status."""
        name = program.encode() + b"\0"
        # Stack: char *argv[] = {&name, NULL}, then the name itself; allocations are multiples of 16 bytes.
        argv = self.call("_emscripten_stack_alloc", 16 + (len(name) + 15 & ~15))
        self.write(argv, struct.pack("<II8x", argv + 16, 0) + name)
        return self.call("__main_argc_argv", 1, _signed(argv))

    def function_pointer(self, function: Callable[[int, int], None]) -> int:
        """A C `void (*)(uint32_t, uint32_t)` that calls `function`: an index in the function table."""
        i32 = wasmtime.ValType.i32()
        wrapped = wasmtime.Func(self._store, wasmtime.FuncType([i32, i32], []), function)
        return int(self._exports["__indirect_function_table"].grow(self._store, 1, wrapped))

    def close(self) -> None:
        """Frees the instance's memory; a second call does nothing."""
        self._store.close()

    def read(self, address: int, size_bytes: int) -> bytes:
        """`size_bytes` of the module's memory; `address` may be signed, as wasmtime passes i32."""
        start = address & 0xFFFFFFFF
        return bytes(self._memory.read(self._store, start, start + size_bytes))

    def write(self, address: int, data: bytes) -> None:
        """Puts `data` in the module's memory at `address`."""
        self._memory.write(self._store, data, address & 0xFFFFFFFF)

    def _text(self, address: int) -> str:
        return self.read(address, 4096).split(b"\0", 1)[0].decode("utf-8", "replace")

    def _put_u32(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<I", value))

    def _host_function(self, name: str) -> Callable[..., Any]:
        known: Callable[..., Any] | None = getattr(self, "_host_" + name.lstrip("_"), None)
        if known:
            return known
        if name.startswith("__syscall_"):
            return lambda *_args: -_ENOSYS
        if name.lstrip("_") in _NOTHING_TO_DO:
            return lambda *_args: 0

        def missing(*args: int) -> None:
            raise WasmAborted(f"host function {name}{args} is not provided")

        return missing

    # Host functions, found by name. wasmtime passes and expects i32 and i64 as signed integers.

    def _host_emscripten_get_now(self) -> float:
        return time.perf_counter() * 1e3

    def _host_emscripten_date_now(self) -> float:
        return time.time() * 1e3

    def _host_clock_time_get(self, clock: int, _precision: int, out: int) -> int:
        realtime = clock == 0
        self.write(out, struct.pack("<Q", time.time_ns() if realtime else time.monotonic_ns()))
        return 0

    def _host_tzset_js(self, *results: int) -> None:
        for address in results:  # offset, daylight, both names
            self._put_u32(address, 0)

    def _host_environ_sizes_get(self, count: int, size: int) -> int:
        self._put_u32(count, 0)
        self._put_u32(size, 0)
        return 0

    def _host_emscripten_get_heap_max(self) -> int:
        return _signed(_LIMIT_BYTES)

    def _host_emscripten_resize_heap(self, wanted: int) -> int:
        """1 if the memory now has `wanted` bytes. Grows by a fifth at least, as Emscripten's host does."""
        wanted &= 0xFFFFFFFF
        have_bytes = self._memory.data_len(self._store)
        goal_bytes = min(max(wanted, have_bytes * 6 // 5), _LIMIT_BYTES)
        try:
            self._memory.grow(self._store, -(-(goal_bytes - have_bytes) // _PAGE_BYTES))
        except wasmtime.WasmtimeError:
            return 0
        return int(wanted <= _LIMIT_BYTES)

    def _host_fd_write(self, fd: int, vectors: int, count: int, written: int) -> int:
        if fd > _STDERR:
            return _EBADF
        spans = struct.iter_unpack("<II", self.read(vectors, 8 * count))
        data = b"".join(self.read(address, size) for address, size in spans)
        self.printed.append(data.decode("utf-8", "replace"))
        self._put_u32(written, len(data))
        return 0

    def _host_fd_read(self, _fd: int, _vectors: int, _count: int, read: int) -> int:
        self._put_u32(read, 0)  # standard input is at its end
        return 0

    def _host_fd_seek(self, _fd: int, _offset: int, _whence: int, _out: int) -> int:
        return _ESPIPE

    def _host_fd_fdstat_get(self, _fd: int, out: int) -> int:
        # struct __wasi_fdstat_t { u8 filetype; u16 flags; u64 rights[2]; }: a regular file, so not a tty
        self.write(out, struct.pack("<B23x", 4))
        return 0

    def _host_emscripten_err(self, text: int) -> None:
        self.printed.append(self._text(text) + "\n")

    def _host_abort_js(self) -> None:
        raise WasmAborted("abort()")

    def _host_assert_fail(self, condition: int, file: int, line: int, _function: int) -> None:
        raise WasmAborted(f"{self._text(file)}:{line}: assertion failed: {self._text(condition)}")


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
        self._reply, self._reply_bytes = bytearray(), 0
        self._bounds: Bounds | None = None
        self.is_aborted = False
        """Whether nothing more can be asked."""
        on_reply = self._module.function_pointer(self._replied)
        self._request_at = self._module.call("trace_processor_rpc_init", on_reply, _REQUEST_BYTES)

    def _replied(self, address: int, size: int) -> None:
        self._reply_bytes += size
        if self._bounds is None or self._reply_bytes <= self._bounds.reply_bytes:
            self._reply.extend(self._module.read(address, size))

    @contextlib.contextmanager
    def bounded(self, bounds: Bounds) -> Iterator[None]:
        """Questions are ended where they take too long. Raises QueryError then, and for a large reply."""
        self._bounds = bounds
        start_s = time.monotonic()
        try:
            with self._module.ending_after(bounds.seconds):
                yield
        except QueryError:
            if self.is_aborted and time.monotonic() - start_s >= bounds.seconds:
                raise bounds.too_slow() from None
            raise
        finally:
            self._bounds = None

    def restored(self) -> bool:
        """Remove all that questions have made. Returns whether that was possible."""
        with contextlib.suppress(PerfettoException):
            if not self.is_aborted:
                self._request("TPM_RESTORE_INITIAL_TABLES")
        return not self.is_aborted

    def _request(self, method: str, **fields: Any) -> list[Any]:
        """The replies to a request; `fields` are those of the message TraceProcessorRpc."""
        kind = self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method)
        stream = self.protos.TraceProcessorRpcStream(msg=[{"request": kind, **fields}])
        request = stream.SerializeToString()
        self._reply.clear()
        self._reply_bytes = 0
        try:
            for start in range(0, len(request), _REQUEST_BYTES):
                piece = request[start : start + _REQUEST_BYTES]
                self._module.write(self._request_at, piece)
                self._module.call("trace_processor_on_rpc_request", len(piece))
        except WasmAborted as error:
            self.is_aborted = True
            raise _refused(str(error)) from error
        if len(self._reply) < self._reply_bytes:
            raise QueryError(f"The answer has {self._reply_bytes} bytes.", "Ask for less: use LIMIT.")
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

    def _is_not_here(self, *_args: Any, **_named: Any) -> Any:
        raise NotImplementedError("only SQL is run in this process")

    compute_metric = trace_summary = enable_metatrace = disable_and_read_metatrace = export = _is_not_here

    def close(self) -> None:
        self._module.close()


class WasmTraceProcessor(TraceProcessor):
    """A trace that Perfetto imports: an open file, or pieces of one, but no text, which could be a URI; None
    if `http.parse` gets it.

    Raises PerfettoException for a trace that the importer refuses, OutputError if this machine has no UI.
    """

    def _create_backend(self, remote: str | None, addr: str | None) -> TraceProcessorBackend:
        return _InProcessBackend(self.protos)
