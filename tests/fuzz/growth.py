"""Looks for work that grows faster than its input: one construct of a fixture, n times and then 2n times.

    python -m tests.fuzz.growth                              # 60 seconds
    python -m tests.fuzz.growth --seconds 3600 --seed 7
    python -m tests.fuzz.growth --seed 7 --case 123          # one case again, with its figures

A case is a fixture of any format, a construct of it (a line, an element or a member of JSON, a field of a
protobuf message, a row of a table), a way to grow it, a command and a core. n is doubled until the command
takes long enough to be measured, or the file is large. Twice the input may take 2.5 times the processor time,
and the memory that docs/tracks.md and docs/reports.md state. Every run is a process that is forked from this
one, so nothing is loaded anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from tests.golden.cases import FIXTURES
from tests.support.cores import cores_here
from tracepipe import cli
from tracepipe.converters.packets import varint
from tracepipe.native import PURE
from tracepipe.readers.wire_fields import BYTES, VARINT, WireError, tagged

GROWTH_MAX = 2.5
COMMANDS = (
    "convert -f perfetto", "convert -f chrome", "convert -f tracepipe", "validate", "summary", "gaps",
    "lines",
)  # fmt: skip
_MEASURABLE_S = 0.4
_SIZE_MAX, _COUNT_MAX = 48 << 20, 1 << 19
_CPU_MAX_S = 120
_TRACEBACK = 99  # the exit status of a run that raised
_WIDE = (3_000, 60_000, 900_000)
# What the docs state, in MB and KB, and what this process has loaded before the fork.
_BOUND_MB = {"convert": 64, "validate": 64}
_REPORT_MB = 235
_PURE_MB, _LONG_NAMES_MB, _FORK_MB = 30, 8, 4
_ITEM_KB, _LINE_TIMES, _NAME_BYTES = 3.2, 30, 16 << 10  # of one or two constructs


@dataclass(frozen=True)
class Grown:
    """A way to grow a fixture. `write` makes the file with n of the construct. `wide` is the length of a text
    in each; `is_one` is whether it is one construct that is n times as long, or as deep.
    """

    what: str
    write: Callable[[Path, int], None]
    wide: int = 0
    is_one: bool = False


# Text: lines and JSON ------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|[A-Za-z_]{3,}')
_WAYS_OF_TEXT = ("repeat", "vary", "vary", "wide", "wide", "long", "nest", "blocks", "turns")
_BRACKETS = (("[", "]"), ('{"a":', "}"), ("[1,", "]"), ('{"a":1,"b":[', "]}"), ("[", ""))


def _is_key(text: str, end: int) -> bool:
    return text[end : end + 2].lstrip().startswith(":")


def _copies(rng: Random, text: str) -> Callable[[int], str]:
    """The text with some of its numbers and words made different in each copy."""
    share = rng.choice((0.0, 0.2, 0.6, 1.0))
    parts, end = [], 0
    for token in _TOKEN.finditer(text):
        of_this = share / 3 if token[0][0] == '"' else share
        if rng.random() < of_this and not _is_key(text, token.end()):
            parts.append((text[end : token.start()], token[0], rng.choice((1, 1, 1, -1))))
            end = token.end()

    def copy(at: int) -> str:
        return "".join(before + _other(token, sign * at) for before, token, sign in parts) + text[end:]

    return copy


def _other(token: str, more: int) -> str:
    if token[0] == '"':
        return f'{token[:-1]} {more}"'
    if token[0].isalpha() or token[0] == "_":
        return f"{token}{abs(more)}"
    return f"{float(token) + more:.3f}" if "." in token else f"{abs(int(token) + more)}"


def _widened(rng: Random, text: str, size: int) -> str:
    """The text with one of its words this much longer."""
    words = [token for token in _TOKEN.finditer(text) if token[0][0] == '"' or token[0][0].isalpha()]
    at = rng.choice(words).end() if words else len(text)
    at -= text[at - 1 : at] == '"'
    return text[:at] + "x" * size + text[at:]


def _nested(rng: Random, text: str) -> Callable[[int], str]:
    """The text with one of its values inside of n brackets."""
    values = [token for token in _TOKEN.finditer(text) if not _is_key(text, token.end())]
    start, end = rng.choice(values).span() if values else (0, 0)
    opening, ending = rng.choice(_BRACKETS)
    return lambda count: f"{text[:start]}{opening * count}0{ending * count}{text[end:]}"


def _of_texts(rng: Random, before: str, texts: list[str], after: str, glue: str) -> Grown:
    """Grow one of several texts that are joined by `glue`."""
    at, way = rng.randrange(len(texts)), rng.choice(_WAYS_OF_TEXT)
    text, other = texts[at], rng.choice(texts)
    wide = rng.choice(_WIDE) if way == "wide" else 0
    one, two, deep = (
        _copies(rng, _widened(rng, text, wide) if wide else text),
        _copies(rng, other),
        _nested(rng, text),
    )
    seed = rng.random()

    def grown(count: int) -> Iterable[str]:
        match way:
            case "repeat":
                return (text for _ in range(count))
            case "long":
                return [_widened(Random(seed), text, count * 16)]
            case "nest":
                return [deep(count)]
            case "blocks":
                return chain(map(one, range(count)), map(two, range(count)))
            case "turns":
                return (copy(number) for number in range(count) for copy in (one, two))
        return map(one, range(count))

    def write(path: Path, count: int) -> None:
        with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(before)
            for number, part in enumerate(chain(texts[:at], grown(count), texts[at + 1 :])):
                file.write(glue + part if number else part)
            file.write(after)

    example = next(iter(grown(1)))
    return Grown(
        f"{way} {wide or ''} {example[:200]!r}, {other[:100]!r}", write, wide, way in ("long", "nest")
    )


def of_lines(rng: Random, data: bytes) -> Grown:
    """Grow a line."""
    lines = data.decode("utf-8", "surrogateescape").splitlines()[:400]
    first = min(rng.choice((0, 1)), len(lines) - 1)
    return _of_texts(rng, "".join(line + "\n" for line in lines[:first]), lines[first:], "\n", "\n")


def of_json(rng: Random, data: bytes) -> Grown:
    """Grow an element of an array or a member of an object, at any depth."""
    try:
        whole: Any = {"": json.loads(data)}
    except ValueError:
        return of_lines(rng, data)
    around, key = whole, ""
    while True:
        holder = around[key]
        items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
        inner = [at for at, value in items if isinstance(value, dict | list) and value]
        events = [at for at in inner if at == "traceEvents" and rng.random() < 0.7]
        if not inner or (around is not whole and rng.random() < 0.4):
            break
        around, key = holder, rng.choice(events or inner)
    is_object = isinstance(holder, dict)
    texts = [(f"{json.dumps(at)}: " if is_object else "") + json.dumps(value) for at, value in items[:300]]
    around[key] = mark = "\x02"
    before, after = json.dumps(whole[""]).split(json.dumps(mark))
    opening, ending = "{}" if is_object else "[]"
    grown = _of_texts(rng, before + opening, texts, ending + after, ",")
    return replace(grown, what=f"in {key!r}: {grown.what}")


# Protobuf ------------------------------------------------------------------------------------------------


def _field(tag: int, value: Any) -> bytes:
    if tag & 7 == VARINT:
        return varint(tag) + varint(value & (1 << 64) - 1)
    return varint(tag) + (varint(len(value)) if tag & 7 == BYTES else b"") + value


def _message(tag: int, value: Any) -> list[tuple[int, Any]]:
    """The fields of a value that looks like a message."""
    if tag & 7 != BYTES or (value.isascii() and value.decode().isprintable()):
        return []
    try:
        return list(tagged(value))
    except WireError:
        return []


def _copies_of_field(rng: Random, tag: int, value: Any) -> Callable[[int], bytes]:
    """A field with some of the numbers and texts in it made different in each copy."""
    if inner := _message(tag, value):
        parts = [_copies_of_field(rng, *one) for one in inner]
        return lambda at: _field(tag, b"".join(part(at) for part in parts))
    if rng.random() < 0.5 and tag & 7 == VARINT:
        return lambda at: _field(tag, value + at)
    if rng.random() < 0.5 and tag & 7 == BYTES:
        return lambda at: _field(tag, value + b"%d" % at)
    return lambda at: _field(tag, value)


def of_protobuf(rng: Random, data: bytes) -> Grown:
    """Grow a field of a message, at any depth."""
    fields, around = list(tagged(data)), []
    while True:
        at = rng.randrange(len(fields))
        tag, value = fields[at]
        around.append(
            (
                tag,
                b"".join(_field(*one) for one in fields[:at]),
                b"".join(_field(*one) for one in fields[at + 1 :]),
            )
        )
        inner = _message(tag, value)
        if not inner or rng.random() < 0.5:
            break
        fields = inner
    is_bytes = tag & 7 == BYTES
    way = rng.choice(
        ("repeat", "vary", "vary", "wide", "long", "nest", "blocks")
        if is_bytes
        else ("repeat", "vary", "blocks")
    )
    wide = rng.choice(_WIDE) if way == "wide" else 0
    one, two = _copies_of_field(rng, tag, value), _copies_of_field(rng, *rng.choice(fields))

    def grown(count: int) -> bytes:
        match way:
            case "repeat":
                return _field(tag, value) * count
            case "wide":
                return b"".join(_field(tag, value + b"%d" % number + b"x" * wide) for number in range(count))
            case "long":
                return _field(tag, value + b"x" * count * 16)
            case "nest":
                heads, size = [], len(value)
                for _ in range(count):  # from the inside
                    heads.append(varint(tag) + varint(size))
                    size += len(heads[-1])
                return b"".join(reversed(heads)) + value
        made = b"".join(map(one, range(count)))
        return made + b"".join(map(two, range(count))) if way == "blocks" else made

    def write(path: Path, count: int) -> None:
        made = grown(count)
        for depth, (_, before, after) in enumerate(reversed(around)):
            made = before + made + after
            if depth + 1 < len(around):
                made = _field(around[-2 - depth][0], made)
        path.write_bytes(made)

    fields_of = "/".join(str(one[0] >> 3) for one in around)
    return Grown(f"{way} {wide or ''} field {fields_of}: {value!r:.60}", write, wide, way in ("long", "nest"))


# SQLite --------------------------------------------------------------------------------------------------


def of_sqlite(rng: Random, data: bytes) -> Grown:
    """Grow a row of a table."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with closing(sqlite3.connect(file.name)) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows_of = {name: db.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}
            table = rng.choice([name for name, rows in rows_of.items() if rows])
            keys = {at for at, *_, key in db.execute(f'PRAGMA table_info("{table}")') if key}
    row, way = rng.choice(rows_of[table]), rng.choice(("repeat", "vary", "vary", "wide", "long"))
    texts = [at for at, value in enumerate(row) if isinstance(value, str)]
    long_at = rng.choice(texts) if texts and way in ("wide", "long") else None
    wide = rng.choice(_WIDE) if long_at is not None and way == "wide" else 0
    varied = {at for at in range(len(row)) if way != "repeat" and rng.random() < 0.5}

    def value(at: int, number: int, count: int) -> Any:
        had = row[at]
        if at == long_at:
            return f"{had} {number}" + "x" * (wide or count * 16)
        if at in keys and isinstance(had, int):
            return had + 1_000_000 + number
        return (
            (had + number if isinstance(had, int) else f"{had}{number}")
            if at in varied and had is not None
            else had
        )

    def write(path: Path, count: int) -> None:
        path.write_bytes(data)
        rows = range(1 if way == "long" else count)
        with closing(sqlite3.connect(path)) as db, db:
            db.executemany(
                f'INSERT OR REPLACE INTO "{table}" VALUES ({", ".join("?" * len(row))})',
                ([value(at, number, count) for at in range(len(row))] for number in rows),
            )

    return Grown(
        f"{way} {wide or ''} row of {table}: {row!r:.200}, {sorted(varied)}", write, wide, way == "long"
    )


# Cases ---------------------------------------------------------------------------------------------------

_FORMS: dict[str, Callable[[Random, bytes], Grown]] = {
    ".jsonl": of_lines, ".txt": of_lines, ".json": of_json, ".pftrace": of_protobuf, ".pb": of_protobuf,
    ".sqlite": of_sqlite, ".db": of_sqlite,
}  # fmt: skip


@cache
def fixtures() -> list[Path]:
    """The inputs to start from, other formats than lines as often as these."""
    paths = [path for path in sorted(FIXTURES.glob("*/input.*")) if path.suffix in _FORMS]
    return paths + [path for path in paths if _FORMS[path.suffix] is not of_lines] * 2


@dataclass(frozen=True)
class Used:
    """What a run took: processor time in s, the peak of its memory in MB, and its exit status."""

    cpu_s: float
    peak_mb: float
    status: int


def _forked(work: Callable[[], int]) -> tuple[int, float]:
    """The exit status and the processor time of a process that is forked from this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_MAX_S, _CPU_MAX_S + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _TRACEBACK
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def ran(argv: list[str], core: str, folder: Path) -> Used:
    """Run a command. What it says is in the file `said`."""
    peak = folder / "peak"
    peak.write_text("0")

    def work() -> int:
        os.environ |= {PURE: "1" if core == "pure" else "0", "TRACEPIPE_CACHE": "", "COLUMNS": "100"}
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        sys.argv = ["tracepipe", *argv]
        try:
            cli.main()
        except SystemExit as e:
            return int(e.code or 0)
        finally:
            peak.write_text(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
        return 0

    status, cpu_s = _forked(work)
    return Used(cpu_s, int(peak.read_text()) / 1024, status)


def _bound_mb(command: str, core: str, count: int, grown: Grown, size: int) -> float:
    """The memory that the docs allow."""
    bound_mb = _BOUND_MB.get(command.split()[0], _REPORT_MB)
    is_report = bound_mb == _REPORT_MB
    line_mb = _LINE_TIMES * min(size if grown.is_one else grown.wide, 1 << 20) / (1 << 20)
    each_kb = _ITEM_KB + 2 * min(grown.wide, _NAME_BYTES) / 1024 if is_report else _ITEM_KB
    more_mb = _LONG_NAMES_MB + _FORK_MB + _PURE_MB * (core == "pure") + line_mb
    return bound_mb + more_mb + (0 if grown.is_one else count * each_kb / 1024)


def run_case(seed: int, case: int, folder: Path, *, tell: bool = False) -> str:
    """Run a case; what is wrong with it, or ""."""
    rng = Random(f"{seed} {case}")
    fixture = rng.choice(fixtures())
    grown = _FORMS[fixture.suffix](rng, fixture.read_bytes())
    command, core = rng.choice(COMMANDS), rng.choice(cores_here())
    path = folder / f"input{fixture.suffix}"
    out = ["-o", str(folder / "out"), "--force"] if command.startswith("convert") else []
    called = f"{fixture.parent.name}: {command}, {core}: {grown.what}"
    if tell:
        print(called)

    def run(count: int) -> tuple[int, Used]:
        def write() -> int:  # its text is not a part of the memory of the runs
            grown.write(path, count)
            return 0

        assert _forked(write)[0] == 0, called
        return path.stat().st_size, ran([*command.split(), *out, str(path)], core, folder)

    count, before_s = 4 if grown.wide > _WIDE[1] else 64, 0.0
    while True:
        size, used = run(count)
        bound_mb, at = _bound_mb(command, core, count, grown, size), f"at {count:,} ({size:,} bytes)"
        if tell:
            memory = f"{used.peak_mb:.0f} of {bound_mb:.0f} MB"
            print(f"  {at}: {used.cpu_s:.2f} s, {memory}, exit status {used.status}")
        if used.status not in (0, 1):
            said = (folder / "said").read_text(errors="replace")[-800:]
            return f"{called}\n  {at}: exit status {used.status}: {said}"
        if used.peak_mb > bound_mb:
            return f"{called}\n  {at}: {used.peak_mb:.0f} MB, {bound_mb:.0f} are allowed"
        if before_s >= _MEASURABLE_S and used.cpu_s > GROWTH_MAX * before_s:
            # The machine may do other work: the least of some runs counts.
            half_s, whole_s = (min(run(of)[1].cpu_s for _ in range(3)) for of in (count // 2, count))
            if whole_s > GROWTH_MAX * half_s:
                return f"{called}\n  {at}: {whole_s:.2f} s, and half of it {half_s:.2f} s"
        if (before_s >= _MEASURABLE_S and used.cpu_s > 1) or size > _SIZE_MAX or count >= _COUNT_MAX:
            return ""
        is_measured = used.cpu_s >= _MEASURABLE_S
        before_s = used.cpu_s if is_measured else 0.0
        count *= 2 if is_measured or size > _SIZE_MAX // 4 else 4


def main() -> int:
    """Run the cases that are asked for; 1 where one of them found something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="one case, with its figures")
    parser.add_argument("--on", action="store_true", help="go on after a case that fails")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.case is not None:
            found = run_case(asked.seed, asked.case, folder, tell=True)
            print(found or "nothing found")
            return bool(found)
        end, case, failed = time.monotonic() + asked.seconds, 0, 0
        while time.monotonic() < end and (asked.on or not failed):
            if found := run_case(asked.seed, case, folder):
                failed += 1
                again = f"python -m tests.fuzz.growth --seed {asked.seed} --case {case}"
                print(f"{found}\n  again: {again}", file=sys.stderr, flush=True)
            case += 1
    print(f"growth: {failed} failing cases" if failed else f"growth: nothing found in {case:,} cases")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
