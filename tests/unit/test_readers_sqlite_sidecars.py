"""Databases whose writer was killed or still writes: what was committed is read, and nothing else."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.batches import read_all
from tests.support.nsys_export import ID, kernel, make
from tracepipe.errors import InputError
from tracepipe.readers import sqlite_tables
from tracepipe.recording.reading import open_recording

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
KILLED = "its exporter was killed or still runs: SQLite recovered a copy, which has what was committed"
# Writes until it is killed. The arguments are the database, and what is written before it waits.
WRITER = """
import sqlite3, sys
con = sqlite3.connect(sys.argv[1], isolation_level=None)
for sql in sys.argv[2:]:
    con.execute(sql).fetchall()
print("written", flush=True)
sys.stdin.read()
"""
OTHER_TIMES = f"update {KERNELS} set start = start + 5000, end = end + 9000"
# Pages that do not fit the cache are written before the transaction ends.
FILL = (
    "insert into filling with recursive n(x) as (select 1 union all select x + 1 from n where x < 2000) "
    "select randomblob(2000) from n"
)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """An export with ten kernels."""
    texts = [{"id": at, "value": text} for text, at in ID.items()]
    every = [kernel(at * 100, at * 100 + 10, at) for at in range(10)]
    return make(tmp_path / "run.sqlite", {"StringIds": texts, KERNELS: every})


@contextmanager
def written(path: Path, *statements: str) -> Iterator[Callable[[], None]]:
    """A process that has run some statements, and waits. The value kills it."""
    command = [sys.executable, "-c", WRITER, str(path), *statements]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"

        def kill() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()

        try:
            yield kill
        finally:
            kill()


def read(path: Path) -> tuple[list[int], list[str]]:
    """The times of the kernels since the first, and the problems."""
    with open_recording(str(path)) as opened:
        records, problems = read_all(opened.recording)
    times = [record["ts_ns"] for record in records if record["type"] == "gpu_kernel"]
    return [ts_ns - times[0] for ts_ns in times], [problem.message for problem in problems]


@pytest.mark.parametrize("is_killed", [True, False])
def test_transactions_in_a_log_are_read(database: Path, is_killed: bool) -> None:
    one = f"insert into {KERNELS} select * from {KERNELS}"
    statements = ("pragma journal_mode = wal", "pragma wal_autocheckpoint = 0", one)
    with written(database, *statements, "begin", OTHER_TIMES) as kill:
        if is_killed:
            kill()
        times, problems = read(database)
    assert times == [at * 100 for at in range(10) for _ in range(2)]
    assert KILLED in problems


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_transaction_that_never_ended_is_not_read(database: Path, is_killed: bool) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("create table filling (data)")
    statements = ("pragma cache_size = 1", "begin", OTHER_TIMES, FILL)
    with written(database, *statements) as kill:
        if is_killed:
            kill()
        alone = database.with_name("alone.sqlite")
        alone.write_bytes(database.read_bytes())
        times, problems = read(database)
    assert times == [at * 100 for at in range(10)]
    assert KILLED in problems
    with closing(sqlite3.connect(f"file:{alone}?immutable=1", uri=True)) as connection:
        (first_ns,) = connection.execute(f"select min(start) from {KERNELS}").fetchone()
    assert first_ns == 5000  # what the database says without its journal


def test_a_closed_database_is_read_as_it_is(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{database}-journal").write_bytes(bytes(512))  # journal_mode = persist
    Path(f"{database}-wal").touch()
    monkeypatch.setattr(sqlite_tables, "_copied", None)
    assert KILLED not in read(database)[1]


def of_several(path: Path) -> None:
    path.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(512) + b"/etc/passwd" + sqlite_tables._MAGIC)


@pytest.mark.parametrize(
    ("make_it", "reason"),
    [
        (of_several, "run.sqlite-journal is of several databases"),
        (lambda path: path.symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
        (os.mkfifo, "not a file"),
        (Path.mkdir, "not a file"),
    ],
)
def test_a_sidecar_that_may_be_another_file_is_refused(
    database: Path, make_it: Callable[[Path], None], reason: str
) -> None:
    make_it(Path(f"{database}-journal"))
    with pytest.raises(InputError, match="cannot be recovered") as raised:
        read(database)
    assert reason in str(raised.value)


def test_a_database_that_changes_is_refused(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{database}-wal").write_bytes(b"log")
    copied = sqlite_tables._copied

    def grows(*given: object) -> object:
        with database.open("ab") as file:
            file.write(bytes(512))
        return copied(*given)

    monkeypatch.setattr(sqlite_tables, "_copied", grows)
    with pytest.raises(InputError, match="changes while it is read"):
        read(database)


def test_no_copy_stays(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy goes when the process ends, whose folder for such files is `folder`."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    with written(database, "pragma journal_mode = wal", f"delete from {KERNELS} where start > 300") as kill:
        kill()
        code = (
            f"import sys; sys.argv = ['tracepipe', 'validate', {str(database)!r}]; "
            "from tracepipe.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            check=False,
        )
    assert KILLED.encode() in done.stdout + done.stderr
    assert [*folder.iterdir()] == []
