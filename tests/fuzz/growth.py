"""Looks for work that grows faster than its input: one construct of a fixture is repeated n times, then 2n times.

    python -m tests.fuzz.growth                              # 60 seconds
    python -m tests.fuzz.growth --seconds 3600 --seed 7
    python -m tests.fuzz.growth --seed 7 --case 123          # one case again, with its figures

A case is a fixture of any format, a construct of it (a line, an element or member of JSON, a field of a protobuf
message, a row of a table), a way to grow it, a command and a core. n is doubled until the command takes long enough to
be measured, or the file is large. Twice the input may take 2.5 times the processor time, and the memory that
docs/tracks.md and docs/reports.md state. Every run is a process that is forked from this one, so nothing is loaded
anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import duckdb  # noqa: F401  # loaded here, not anew in each run
import zstandard  # noqa: F401

from tests.support.cores import cores_here
from tracepipe import cli
from tracepipe.converters.packets import varint
from tracepipe.native import PURE
from tracepipe.readers.wire_fields import BYTES, VARINT, WireError, tagged

FIXTURES = Path(__file__).parents[2] / "fixtures"
GROWTH_MAX = 2.5
_MEASURABLE_S = 0.4
_SIZE_MAX = 48 << 20
_COUNT_MAX = 1 << 19
_WIDE_BYTES = (3_000, 60_000, 900_000)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|[A-Za-z_]{3,}')
_DEEP = "\x01"  # stands for a value that is nested

WAY = os.environ.get("WAY", "").split() or None
COMMANDS = ("convert -f perfetto", "convert -f chrome", "convert -f tracepipe", "summary", "validate")
# What the docs state, in MB, and what was loaded before the fork without need.
_BOUND_MB = {"convert": 64, "validate": 64, "summary": 235}
_PURE_MB, _FORK_MB = 30, 4
_ITEM_KB, _LINE_TIMES, _NAME_BYTES = 1.6, 30, 16 << 10


@dataclass(frozen=True)
class Grown:
    """A way to grow a fixture. `write` makes the file with n of the construct; `wide` is the length of its text."""

    what: str
    write: Callable[[Path, int], None]
    wide: int = 0
    is_one: bool = False
    """Whether it is one construct that is n times as long or deep."""


# Text: lines and JSON ------------------------------------------------------------------------------------


def _varied(rng: Random, text: str) -> Callable[[int], str]:
    """The text with some of its numbers and words made different in each of its copies."""
    tokens = list(_TOKEN.finditer(text))
    share = rng.choice((0.0, 0.2, 0.6, 1.0))
    chosen = [one for one in tokens if rng.random() < (share if one[0][0] not in '"' else share / 3)]
    parts: list[str] = []
    end = 0
    for one in chosen:
        is_key = text[one.end() : one.end() + 1] == ":" or text[one.end() : one.end() + 2] == " :"
        if is_key and one[0].startswith('"'):
            continue
        parts += [text[end : one.start()], one[0]]
        end = one.end()
    rest = text[end:]
    signs = [rng.choice((1, 1, 1, 0, -1)) for _ in parts]

    def copy(at: int) -> str:
        made = list(parts)
        for place in range(1, len(made), 2):
            token = made[place]
            if token.startswith('"'):
                made[place] = f'{token[:-1]} {at}"'
            elif token[0].isalpha() or token[0] == "_":
                made[place] = f"{token}{at}"
            elif "." in token:
                made[place] = f"{float(token) + signs[place] * at:.3f}"
            else:
                made[place] = str(abs(int(token) + signs[place] * at))
        return "".join(made) + rest

    return copy


def _widened(rng: Random, text: str, size: int) -> str:
    """The text with one of its words this long."""
    words = [one for one in _TOKEN.finditer(text) if one[0][0] == '"' or one[0][0].isalpha()]
    if not words:
        return text + "x" * size
    one = rng.choice(words)
    inner = one[0].removesuffix('"')
    return text[: one.start()] + inner + "x" * size + one[0][len(inner) :] + text[one.end() :]


def _nested(rng: Random, text: str) -> tuple[str, str, str]:
    """The text around one of its numbers or strings, and what opens and closes a value there."""
    values = [one for one in _TOKEN.finditer(text) if text[one.end() : one.end() + 1] != ":"]
    one = rng.choice(values) if values else re.match("", text)
    assert one is not None
    opening, closing_ = rng.choice(
        (("[", "]"), ('{"a":', "}"), ("[1,", "]"), ('{"a":1,"b":[', "]}"), ("[", ""))
    )
    return text[: one.start()] + _DEEP + text[one.end() :], opening, closing_


def _of_texts(rng: Random, before: str, texts: list[str], after: str, glue: str) -> Grown:
    """Grow one of several texts that are joined by `glue`."""
    at = rng.randrange(len(texts))
    text = texts[at]
    head, tail = (
        before + "".join(one + glue for one in texts[:at]),
        "".join(glue + one for one in texts[at + 1 :]) + after,
    )
    way = rng.choice(WAY or ("repeat", "vary", "vary", "wide", "wide", "long", "nest", "blocks", "turns"))

    def writing(copies: Callable[[int], Iterator[str]]) -> Callable[[Path, int], None]:
        def write(path: Path, count: int) -> None:
            with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(head)
                for number, one in enumerate(copies(count)):
                    file.write(glue + one if number else one)
                file.write(tail)

        return write

    what, wide = f"{way} {text[:100]!r}", 0
    if way == "repeat":
        return Grown(what, writing(lambda count: (text for _ in range(count))))
    if way in ("vary", "wide"):
        wide = rng.choice(_WIDE_BYTES) if way == "wide" else 0
        copy = _varied(rng, _widened(rng, text, wide) if wide else text)
        return Grown(
            f"{what} {wide or ''} e.g. {copy(1)[:200]!r}",
            writing(lambda count: map(copy, range(count))),
            wide,
        )
    if way == "long":
        state = rng.getstate()

        def longer(count: int) -> Iterator[str]:
            again = Random()
            again.setstate(state)
            yield _widened(again, text, count * 16)

        return Grown(what, writing(longer), is_one=True)
    if way == "nest":
        held, opening, closing_ = _nested(rng, text)
        what = f"{what} {opening!r} in {held[:300]!r}"
        deep = lambda count: iter([held.replace(_DEEP, opening * count + "0" + closing_ * count)])  # noqa: E731
        return Grown(what, writing(deep), is_one=True)
    other = rng.choice(texts)
    one, two = _varied(rng, text), _varied(rng, other)
    what = f"{way} {one(1)[:200]!r} {two(1)[:200]!r}"
    if way == "blocks":
        return Grown(what, writing(lambda count: chain(map(one, range(count)), map(two, range(count)))))
    return Grown(
        what, writing(lambda count: (copy(number) for number in range(count) for copy in (one, two)))
    )


def _of_lines(rng: Random, data: bytes) -> Grown:
    lines = data.decode("utf-8", "surrogateescape").splitlines()[:400]
    first = rng.choice((0, 1))
    if len(lines) <= first:
        first = 0
    return _of_texts(rng, "".join(line + "\n" for line in lines[:first]), lines[first:], "\n", "\n")


def _of_json(rng: Random, data: bytes) -> Grown:
    """Grow an element of an array or a member of an object, anywhere."""
    document = json.loads(data)
    holder: Any = document
    path: list[Any] = []
    while True:
        inner = [
            (key, value)
            for key, value in (holder.items() if isinstance(holder, dict) else enumerate(holder))
            if isinstance(value, dict | list) and value
        ]
        events = [one for one in inner if one[0] == "traceEvents" and rng.random() < 0.7]
        if not inner or (path and rng.random() < 0.4):
            break
        key, holder = rng.choice(events or inner)
        path.append(key)
    short = holder[:300] if isinstance(holder, list) else holder
    texts = (
        [json.dumps(one) for one in short]
        if isinstance(short, list)
        else [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in short.items()]
    )
    place = "\x02"
    whole: Any = {"": document}
    around = whole
    for key in ["", *path][:-1]:
        around = around[key]
    around[["", *path][-1]] = place
    before, after = json.dumps(whole[""]).split(json.dumps(place))
    opening, closing_ = "[]" if isinstance(short, list) else "{}"
    made = _of_texts(rng, before + opening, texts, closing_ + after, ",")
    return Grown(f"at {'.'.join(map(str, path))[:80]}: {made.what}", made.write, made.wide, made.is_one)


# Protobuf ------------------------------------------------------------------------------------------------


def _field(tag: int, value: Any) -> bytes:
    if tag & 7 == VARINT:
        return varint(tag) + varint(value & (1 << 64) - 1)
    return varint(tag) + (varint(len(value)) if tag & 7 == BYTES else b"") + value


def _message(value: Any) -> list[tuple[int, Any]]:
    """The fields of a value that looks like a message."""
    if not isinstance(value, bytes) or not value:
        return []
    try:
        return list(tagged(value))
    except WireError:
        return []


def _copy_of_field(rng: Random, tag: int, value: Any, depth: int = 0) -> Callable[[int], bytes]:
    """A field with some of the numbers and texts in it made different in each copy."""
    inner = _message(value)
    if tag & 7 == BYTES and inner and not (value.isascii() and value.decode().isprintable()):
        parts = [_copy_of_field(rng, *one, depth + 1) for one in inner]
        return lambda at: _field(tag, b"".join(part(at) for part in parts))
    if rng.random() < 0.5:
        return lambda at: _field(tag, value)
    if tag & 7 == VARINT:
        return lambda at: _field(tag, value + at)
    if tag & 7 == BYTES:
        return lambda at: _field(tag, value + b"%d" % at)
    return lambda at: _field(tag, value)


def _of_protobuf(rng: Random, data: bytes) -> Grown:
    fields = list(tagged(data))
    head, tail = b"", b""
    wrap: Callable[[bytes], bytes] = lambda inner: inner  # noqa: E731
    while True:
        at = rng.randrange(len(fields))
        tag, value = fields[at]
        before = b"".join(_field(*one) for one in fields[:at])
        after = b"".join(_field(*one) for one in fields[at + 1 :])
        inner = _message(value) if tag & 7 == BYTES else []
        if not inner or rng.random() < 0.5:
            break
        wrap = _wrapped(wrap, before, tag, after)
        fields = inner
    way = rng.choice(WAY or ("repeat", "vary", "vary", "wide", "long", "nest", "blocks"))
    what, wide = (
        f"{way} field {tag >> 3} of type {tag & 7}, {value[:60] if isinstance(value, bytes) else value!r}",
        0,
    )
    copy: Callable[[int], bytes] = lambda at: _field(tag, value)  # noqa: E731
    if way in ("vary", "blocks"):
        copy = _copy_of_field(rng, tag, value)
    if way == "wide" and tag & 7 == BYTES:
        wide = rng.choice(_WIDE_BYTES)
        copy = lambda at: _field(tag, value + b"%d" % at + b"x" * wide)  # noqa: E731
    second = _copy_of_field(rng, *rng.choice(fields))

    def write(path: Path, count: int) -> None:
        if way == "long" and tag & 7 == BYTES:
            made = _field(tag, value + b"x" * count * 16)
        elif way == "nest" and tag & 7 == BYTES:
            # From the inside: each adds its tag and length in front.
            heads, size = [], len(value)
            for _ in range(count):
                heads.append(varint(tag) + varint(size))
                size += len(heads[-1])
            made = b"".join(reversed(heads)) + value
        else:
            made = b"".join(map(copy, range(count)))
            if way == "blocks":
                made += b"".join(map(second, range(count)))
        path.write_bytes(wrap(head + before + made + after + tail))

    return Grown(what, write, wide, way in ("long", "nest"))


def _wrapped(
    outer: Callable[[bytes], bytes], before: bytes, tag: int, after: bytes
) -> Callable[[bytes], bytes]:
    return lambda inner: outer(before + _field(tag, inner) + after)


# SQLite --------------------------------------------------------------------------------------------------


def _of_sqlite(rng: Random, data: bytes) -> Grown:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with closing(sqlite3.connect(file.name)) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            counts = {name: db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names}
            table = rng.choice([name for name, count in counts.items() if count])
            columns = db.execute(f'PRAGMA table_info("{table}")').fetchall()
            row = rng.choice(db.execute(f'SELECT * FROM "{table}"').fetchall())
    way = rng.choice(WAY or ("repeat", "vary", "vary", "wide", "long"))
    texts = [at for at, value in enumerate(row) if isinstance(value, str)]
    wide_at = rng.choice(texts) if texts and way in ("wide", "long") else None
    wide = rng.choice(_WIDE_BYTES) if wide_at is not None and way == "wide" else 0
    varied = {at for at in range(len(row)) if way != "repeat" and rng.random() < 0.5}
    keys = {one[0] for one in columns if one[5]}

    def value(at: int, number: int, count: int) -> Any:
        had = row[at]
        if at == wide_at:
            return f"{had} {number}" + "x" * (wide or count * 16)
        if at in keys and isinstance(had, int):
            return had + 1_000_000 + number
        if at in varied:
            return had + number if isinstance(had, int) else f"{had}{number}" if isinstance(had, str) else had
        return had

    def write(path: Path, count: int) -> None:
        path.write_bytes(data)
        marks = ", ".join("?" * len(row))
        times = 1 if way == "long" else count
        with closing(sqlite3.connect(path)) as db, db:
            rows = (tuple(value(at, number, count) for at in range(len(row))) for number in range(times))
            db.executemany(f'INSERT OR REPLACE INTO "{table}" VALUES ({marks})', rows)

    return Grown(
        f"{way} {wide or ''} row of {table}: {row!r}"[:300] + f" varying {sorted(varied)}, {wide_at}",
        write,
        wide,
        way == "long",
    )


# Cases ---------------------------------------------------------------------------------------------------

_WAYS: dict[str, Callable[[Random, bytes], Grown]] = {
    ".jsonl": _of_lines, ".txt": _of_lines, ".json": _of_json, ".pftrace": _of_protobuf, ".pb": _of_protobuf,
    ".sqlite": _of_sqlite, ".db": _of_sqlite,
}  # fmt: skip


@cache
def fixtures() -> list[Path]:
    """The inputs to start from, other formats than lines as often as these."""
    paths = [path for path in sorted(FIXTURES.glob("*/input.*")) if path.suffix in _WAYS]
    others = [path for path in paths if _WAYS[path.suffix] is not _of_lines]
    return paths + others * 2


@dataclass(frozen=True)
class Used:
    """What a run took: processor time in s, the peak of its memory in MB."""

    cpu_s: float
    peak_mb: float
    status: int


def ran(argv: list[str], core: str) -> Used:
    """Run a command in a process that is forked from this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (120, 121))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ |= {PURE: "1" if core == "pure" else "0", "TRACEPIPE_CACHE": "", "COLUMNS": "100"}
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(null, number)
        err = os.open(argv[-1] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(err, 2)
        sys.argv = ["tracepipe", *argv]
        code = 99
        try:
            cli.main()
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException as e:
            os.write(2, f"Traceback {e!r}".encode())
        finally:
            with open("/proc/self/status") as status:
                peak = status.read().split("VmHWM:")[1].split()[0]
            Path(argv[-1] + ".peak").write_text(peak)
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    peak_path = Path(argv[-1] + ".peak")
    peak_kb = int(peak_path.read_text()) if peak_path.exists() else used.ru_maxrss
    return Used(used.ru_utime + used.ru_stime, peak_kb / 1024, os.waitstatus_to_exitcode(status))


def _bound_mb(command: str, core: str, count: int, grown: Grown, size: int) -> float:
    """The memory that the docs allow."""
    name = command.split()[0]
    each_kb = _ITEM_KB + 2 * min(grown.wide, _NAME_BYTES) / 1024
    line_mb = _LINE_TIMES * min(grown.wide or size * grown.is_one, 1 << 20) / (1 << 20)
    return _BOUND_MB[name] + _FORK_MB + _PURE_MB * (core == "pure") + count * each_kb / 1024 + line_mb


def run_case(seed: int, case: int, folder: Path, *, tell: bool = False) -> str:
    """Run a case; what is wrong with it, or ""."""
    rng = Random(f"{seed} {case}")
    fixture = rng.choice(fixtures())
    grown = _WAYS[fixture.suffix](rng, fixture.read_bytes())
    command, core = rng.choice(COMMANDS), rng.choice(cores_here())
    path = folder / f"input{fixture.suffix}"
    out = ["-o", str(folder / "out"), "--force"] if command.startswith("convert") else []
    argv = [*command.split(), *out, str(path)]
    called = f"{fixture.parent.name}: {command}, {core}: {grown.what}"
    if tell:
        print(called)
    count, before = (4 if grown.wide > 100_000 else 64), 0.0
    while True:
        child = os.fork()  # the text is not a part of the memory of the runs
        if not child:
            grown.write(path, count)
            os._exit(0)
        os.waitpid(child, 0)
        size = path.stat().st_size
        used = ran(argv, core)
        bound_mb = _bound_mb(command, core, count, grown, size)
        if tell:
            print(
                f"  {count:>9,} {size:>12,} bytes {used.cpu_s:8.2f} s {used.peak_mb:7.0f} of {bound_mb:.0f} MB, {used.status}"
            )
        if used.status not in (0, 1):
            return f"{called}\n  exit status {used.status} at {count:,}: {Path(str(path) + '.err').read_text()[-800:]}"
        if used.peak_mb > bound_mb:
            return (
                f"{called}\n  {used.peak_mb:.0f} MB at {count:,} ({size:,} bytes); {bound_mb:.0f} are allowed"
            )
        if before >= _MEASURABLE_S and used.cpu_s > GROWTH_MAX * before:
            again = min(ran(argv, core).cpu_s for _ in range(2))
            if min(again, used.cpu_s) > GROWTH_MAX * before:
                return f"{called}\n  {before:.2f} s, then {min(again, used.cpu_s):.2f} s at {count:,} ({size:,} bytes)"
        if (before >= _MEASURABLE_S and used.cpu_s > 1) or size > _SIZE_MAX or count >= _COUNT_MAX:
            return ""
        # Less than can be measured says nothing of how it grows: the next step is larger.
        before = used.cpu_s
        count *= 2 if used.cpu_s >= _MEASURABLE_S or size > _SIZE_MAX // 4 else 4


def main() -> int:
    """Run the cases that are asked for; 1 where one of them found something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="one case")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--on", action="store_true", help="go on after a case that fails")
    asked = parser.parse_args()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end, case, failed = time.monotonic() + asked.seconds, asked.first, 0
    with tempfile.TemporaryDirectory() as folder:
        if asked.case is not None:
            found = run_case(asked.seed, asked.case, Path(folder), tell=True)
            print(found or "nothing found")
            return bool(found)
        while time.monotonic() < end:
            for one in Path(folder).iterdir():
                one.unlink()
            if found := run_case(asked.seed, case, Path(folder)):
                failed += 1
                print(
                    f"{found}\n  again: python -m tests.fuzz.growth --seed {asked.seed} --case {case}",
                    flush=True,
                )
                if not asked.on:
                    return 1
            case += asked.step
    print(f"growth: {failed} failing of {(case - asked.first) // asked.step:,} cases")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
