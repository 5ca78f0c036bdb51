"""ZIP and TAR archives of traces as inputs."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import zstandard

import tracepipe
from tracepipe.api.convert import account_lines
from tracepipe.errors import InputError, OutputError
from tracepipe.recording.archives import Archive


def trace(name: str, ts: int = 10) -> bytes:
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 5}
    return json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 10**18, "traceEvents": [event]}).encode()


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


FORMS = {
    "all.zip": zipped,
    "stored.zip": lambda files: zipped(files, zipfile.ZIP_STORED),
    "all.tar": tarred,
    "all.tar.gz": lambda files: gzip.compress(tarred(files)),
    "all.tar.zst": lambda files: zstandard.compress(tarred(files)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_only_trace_of_an_archive_is_read_by_every_command(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    path.write_bytes(FORMS[form]({"./run.json.gz": gzip.compress(trace("work")), ".DS_Store": b"x"}))
    shown = tmp_path / "shown.txt"
    tracepipe.convert(path, shown, "text")
    assert " 5000  work" in shown.read_text()
    assert tracepipe.load(path).facts.counts == {"annotation": 1}
    assert tracepipe.load(f"{path}/run.json.gz").facts.counts == {"annotation": 1}


def test_an_archive_at_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tracepipe", "summary", "-", "--all"]
    done = subprocess.run(command, input=zipped({"run.json": trace("work")}), capture_output=True, check=True)
    assert b"1 annotation" in done.stdout


@pytest.mark.parametrize("form", FORMS)
def test_the_traces_of_an_archive_become_one_timeline(form: str, tmp_path: Path) -> None:
    path, shown = tmp_path / form, tmp_path / "shown.txt"
    path.write_bytes(FORMS[form]({"a/run.json": trace("first"), "b/run.json": trace("second", 20)}))
    account = tracepipe.convert(path, shown, "text")
    assert account.counts == {"annotation": 2}
    assert "0 +     5000  first" in shown.read_text()
    assert "10000 +     5000  second" in shown.read_text()
    with pytest.raises(InputError, match=r"has 2 traces") as caught:
        tracepipe.load(path)
    assert f"{path}/a/run.json, {path}/b/run.json" in (caught.value.hint or "")
    tracepipe.convert(f"{path}/b/run.json", shown, "text", force=True)
    assert "first" not in shown.read_text()
    with pytest.raises(InputError, match=r"has no c/run\.json"):
        tracepipe.load(f"{path}/c/run.json")


def test_an_archive_of_several_traces_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "all.tar.gz", list[str]()
    path.write_bytes(FORMS["all.tar.gz"]({f"{rank}/run.json": trace("work", rank) for rank in range(5)}))

    class Counted(Archive):
        def __init__(self, file: BinaryIO, path: str) -> None:
            read.append(path)
            super().__init__(file, path)

    monkeypatch.setattr("tracepipe.recording.archives.Archive", Counted)
    for to in ("text", "archive"):
        tracepipe.convert(path, tmp_path / to, to)
    assert read == [str(path)] * 2


def test_an_archive_that_convert_wrote_is_read_again(tmp_path: Path) -> None:
    for name, ts in (("first", 10), ("second", 20)):
        (tmp_path / f"{name}.json").write_bytes(trace(name, ts))
    archive, shown = tmp_path / "all.zip", tmp_path / "shown.txt"
    tracepipe.convert([tmp_path / "first.json", tmp_path / "second.json"], archive, "archive")
    with pytest.raises(OutputError, match="is the recording itself"):
        tracepipe.convert(f"{archive}/first.pftrace", archive, "archive", force=True)
    account = tracepipe.convert(archive, shown, "text")
    assert "10000 +     5000  second" in shown.read_text()
    assert any(f"trace of {archive}" in line for line in account_lines(account))


def encrypted(files: dict[str, bytes]) -> bytes:
    """An archive whose files say that they need a password: bit 0 of the flags, in both headers."""
    data = bytearray(zipped(files))
    for signature, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(signature) + at] |= 1
    return bytes(data)


def sparse(info: tarfile.TarInfo) -> None:
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 12}


def shared(headers: list[tuple[str, bytes]]) -> bytes:
    """An archive with a file, and headers of the given types before it."""
    parts = []
    for kind, content in headers:
        info = tarfile.TarInfo("header")
        info.type, info.size = kind.encode(), len(content)
        parts += [info.tobuf(), content + bytes(-len(content) % 512)]
    return b"".join(parts) + tarred(ONE)


ONE = {"run.json": trace("work")}
# Where the directory begins, as the end of a ZIP has it.
ENDS = zipped(ONE)[-6:-2]
DAMAGED = {
    "a directory that is large": (zipped({f"{at}": b"" for at in range(30_000)}), "is too long"),
    "a name that is large": (tarred({"x" * 2_000_000: b""}), "is too long"),
    "many names for one file": (shared([("L", b"x" * 9_000)] * 9), "is too long"),
    "names for one file, without end": (shared([("L", b"x")] * 9_000), "is too long|recursion"),
    "names that are large": (tarred({f"{at}".rjust(50_000, "x"): b"" for at in range(22)}), "too long"),
    "much that stands for all files": (
        shared([("g", b"".join(b"%d %d=\n" % (len(b"%d" % at) + 4, at) for at in range(10, 1_100)))]),
        "stands for all",
    ),
    "no number": (tarred(ONE, lambda info: info.pax_headers.update({"GNU.sparse.size": "x"})), "invalid"),
    "a file before its begin": (zipped(ONE).replace(ENDS, b"\xff\xff\xff\0"), "begins before"),
    "many files": (tarred({f"{at}": b"" for at in range(10_001)}), "more than 10,000 files"),
    "no file": (zipped({}), "without a trace"),
    "holes": (tarred({"run.json": b"1\n0\n512\n".ljust(512, b"\0")}, sparse), "has holes"),
    "a method that is rare": (zipped(ONE, zipfile.ZIP_BZIP2), "method 12"),
    "a password": (encrypted(ONE), "is encrypted"),
    "a zip that was cut": (zipped(ONE)[:-30], "not a zip file"),
    "a tar that was cut": (tarred(ONE)[:1024], "cut off"),
    "a tar that was cut and compressed": (gzip.compress(tarred(ONE))[:-20], "cut off in the middle"),
    "a tar that was cut in a file": (tarred({"run.json": trace("w" * 4000)})[:2048], "unexpected end"),
    "bytes that changed": (zipped(ONE, zipfile.ZIP_STORED).replace(b"work", b"walk"), "CRC"),
    "two files of a name": (tarred({"run.json": b"{}", "./run.json": b"{}"}), "two files"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_an_archive_that_cannot_be_read_is_an_error(kind: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[kind]
    path = tmp_path / "all.archive"
    path.write_bytes(content)
    for run in (tracepipe.load, lambda path: tracepipe.convert(path, tmp_path / "out.json", "chrome")):
        with pytest.raises(InputError, match=reason) as caught:
            run(path)
        assert str(path) in str(caught.value)
    assert not (tmp_path / "out.json").exists()


def test_files_of_a_zip_have_the_names_that_a_path_can_have() -> None:
    archive = Archive(io.BytesIO(zipped({"/a//b.json": b"", "./c.json": b""})), "all.zip")
    assert list(archive.traces) == ["a/b.json", "c.json"]
