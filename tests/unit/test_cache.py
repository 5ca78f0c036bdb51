"""The cache of recordings' tables: what is kept, for whom, and what is removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.recordings import HEADER, span
from tracepipe.errors import InputError
from tracepipe.store import build as store_build
from tracepipe.store import cache
from tracepipe.store.run import load_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which keeps small recordings too."""
    monkeypatch.setenv("TRACEPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_LEAST_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the recordings that were read."""
    read: list[str] = []
    build = store_build.build

    def counted(folder: Path, path: str, *given: Any) -> None:
        read.append(path)
        build(folder, path, *given)

    monkeypatch.setattr(store_build, "build", counted)
    return read


def write(path: Path, *names: str) -> str:
    records = (HEADER, *(span(1_000 + at * 10, 1_005 + at * 10, name) for at, name in enumerate(names)))
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return str(path)


def names(path: str, **how: Any) -> list[str]:
    return [name for (name,) in load_run(path, **how).calls.select("name").fetchall()]


def test_a_recording_is_read_once(tmp_path: Path, folder: Path, builds: list[str]) -> None:
    path = write(tmp_path / "run.jsonl", "f", "g")
    assert names(path) == names(path) == ["f", "g"]
    assert builds == [path]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [one.is_dir() for one in folder.iterdir()] == [True]
    assert sorted(tmp_path.iterdir()) == [folder, tmp_path / "run.jsonl"]


def test_another_time_size_or_way_of_reading_is_another_recording(
    tmp_path: Path, folder: Path, builds: list[str]
) -> None:
    path = write(tmp_path / "run.jsonl", "f")
    names(path)
    os.utime(path, ns=(1, 1))
    names(path)
    write(tmp_path / "run.jsonl", "f", "g")
    assert names(path) == ["f", "g"]
    names(path, assumed={"tsc": 5})
    assert len(builds) == 4
    with Path(path).open("ab") as out:
        out.write(b"{\n")
    assert load_run(path).facts.skipped == 1
    with pytest.raises(InputError):
        load_run(path, strict=True)


def test_what_is_not_kept(
    tmp_path: Path, folder: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "run.jsonl", "f")
    monkeypatch.setattr(cache, "_LEAST_BYTES", 1 << 20)
    names(path)
    assert not folder.exists() or not list(folder.iterdir())
    monkeypatch.setattr(cache, "_LEAST_BYTES", 1)
    monkeypatch.setenv("TRACEPIPE_CACHE", "")
    names(path)
    assert not folder.exists() or not list(folder.iterdir())
    assert len(builds) == 2


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_a_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, folder: Path, builds: list[str], mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    path = write(tmp_path / "run.jsonl", "f")
    assert names(path) == names(path) == ["f"]
    assert builds == [path, path]
    assert list(folder.iterdir()) == []


def test_tables_that_cannot_be_read_are_made_again(tmp_path: Path, folder: Path, builds: list[str]) -> None:
    path = write(tmp_path / "run.jsonl", "f")
    names(path)
    (kept,) = folder.iterdir()
    (kept / "store.duckdb").write_bytes(b"cut off")
    assert names(path) == ["f"]
    assert builds == [path, path]


def test_the_tables_used_longest_ago_go_first(
    tmp_path: Path, folder: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{at}.jsonl", "f") for at in range(3)]
    names(paths[0])
    (first,) = folder.iterdir()
    size_bytes = sum(one.stat().st_size for one in first.iterdir())
    monkeypatch.setattr(cache, "LIMIT_BYTES", 2 * size_bytes + size_bytes // 2)
    os.utime(first, (1, 1))
    names(paths[1])
    (second,) = set(folder.iterdir()) - {first}
    os.utime(second, (2, 2))
    names(paths[0])  # is used again
    names(paths[2])
    assert len(builds) == 3
    assert first.exists() and not second.exists()


def test_a_failed_reading_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\x00nothing of ours\n")
    with pytest.raises(Exception, match=r"run\.jsonl"):
        load_run(str(path))
    assert list(folder.iterdir()) == []
