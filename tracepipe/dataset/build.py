"""Builds a dataset: each recording becomes the tables of its rank, several at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from tracepipe import paths
from tracepipe.dataset.clocks_table import Aligned, write_alignment
from tracepipe.dataset.places import RANKS, Dataset, read_rows
from tracepipe.dataset.rank_tables import Source, Written, write_rank
from tracepipe.dataset.shifts import renumber
from tracepipe.errors import InputError, OutputError, TracepipeError
from tracepipe.recording import remote
from tracepipe.recording.reading import Progress

ENDINGS: Final = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".gz",
    ".zst",
    ".sqlite",
    ".db",
    ".pftrace",
    ".perfetto-trace",
    ".pb",
)
"""How the names of files end that are taken for recordings, in a folder that is named as a whole."""
# Recordings that are read before it is their turn to be put in place, for each process: each has a folder.
_AHEAD: Final = 4
_DIED: Final = "the process that read it was killed: free some memory, or use fewer --jobs"


@dataclass(slots=True)
class Built:
    """What a build did. `left_out` are recordings that are not in the dataset, with the reasons."""

    written: list[Written] = field(default_factory=list)
    unchanged: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    aligned: Aligned | None = None
    ranks: int = 0


def build(
    paths: Iterable[str],
    output: str,
    *,
    jobs: int | None = None,
    options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Built:
    """Add the recordings at some paths and URLs, or below folders, to the dataset `output`, which is made if
    it is not there. A rank that is there is replaced where its recording is another one.

    `options` are those of `load_run`; `progress` is called with the bytes of the recordings that are done,
    and of all. Raises InputError for a path where nothing is, OutputError.
    """
    sources = list(_sources(paths, output))
    dataset, built = Dataset.made(output), Built()
    dataset.clear()
    known = _known(dataset)
    there = {source for _, source in known.values()}
    # An object without a version may be another one each time.
    wanted = [(source, root) for source, root in sources if source not in there or source.version == ""]
    built.unchanged = len(sources) - len(wanted)
    of_rank = {rank: (host, source.path) for rank, (host, source) in known.items()}
    _Build(dataset, built, options, progress, of_rank).run(wanted, jobs or len(os.sched_getaffinity(0)))
    renumber(dataset)
    built.aligned, built.ranks = write_alignment(dataset), len(dataset.ranks())
    return built


def _sources(paths: Iterable[str], output: str) -> Iterator[tuple[Source, str]]:
    """The recordings, each with the folder that it was found below. Raises InputError."""
    found: dict[str, tuple[Source, str]] = {}
    for path in paths:
        for source, root in (_objects if remote.is_url(path) else _files)(path, output):
            found.setdefault(source.path, (source, root))
    yield from found.values()


def _files(path: str, output: str) -> Iterator[tuple[Source, str]]:
    """The recordings at a path, each with its folder."""
    files, root = [Path(path)], Path(path).parent
    if paths.is_folder(path):
        files, root = sorted(_below(Path(path), Path(output))), Path(path)
        if not files:
            raise _holds_none(path)
    for file in files:
        try:
            yield Source.of(str(file.absolute())), str(root.absolute())
        except OSError as e:
            raise InputError(f"cannot be read: {e.strerror}", "Check the path.", path=str(file)) from e


def _objects(url: str, _: str) -> Iterator[tuple[Source, str]]:
    """The recordings at a URL, each with its folder."""
    there = remote.found(url)
    if not there.is_folder:
        yield Source.of_object(there), url.rpartition("/")[0]
        return
    base = url.rstrip("/")
    objects = [one for one in remote.listed(url) if _is_recording(one.url.removeprefix(base))]
    if not objects:
        raise _holds_none(url)
    for one in objects:
        yield Source.of_object(one), base


def _is_recording(place: str) -> bool:
    """Whether what lies there below a folder is named as recordings are, and nothing of it is hidden."""
    parts = place.split("/")
    return place.endswith(ENDINGS) and not any(part.startswith(".") for part in parts)


def _holds_none(path: str) -> InputError:
    return InputError(
        "holds no recordings",
        f"Name the files. Of a folder, only files that end with {', '.join(ENDINGS)} are read.",
        path=path,
    )


def _below(folder: Path, output: Path) -> Iterator[Path]:
    """The files below a folder that are named as recordings are, but for what is hidden and the dataset."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not paths.is_same(Path(place, name), output)
        )
        for name in names:
            if name[0] != "." and name.endswith(ENDINGS):
                yield Path(place, name)


def _known(dataset: Dataset) -> dict[int, tuple[str, Source]]:
    """The ranks that are there, each with its host and recording."""
    names = "source, source_bytes, source_mtime_ns, source_version"
    found = {}
    for host, rank in dataset.ranks():
        (row,) = read_rows(dataset.part(RANKS, host, rank), names)
        found[rank] = host, Source(*row.values())
    return found


@dataclass(slots=True)
class _Build:
    """One run over the recordings that are new."""

    dataset: Dataset
    built: Built
    options: dict[str, Any] | None
    progress: Progress | None
    _of_rank: dict[int, tuple[str, str]]
    """Rank → its host, and the recording that it is from."""
    _done_bytes: int = 0
    _total_bytes: int = 0

    def run(self, wanted: list[tuple[Source, str]], jobs: int) -> None:
        """Write all ranks. A process that dies takes no other rank with it."""
        if not wanted:
            return
        self._total_bytes = sum(source.size_bytes for source, _ in wanted)
        unfinished = self._together(wanted, min(jobs, len(wanted)))
        for one in unfinished:  # one of them broke the pool: alone, each answers for itself
            if self._together([one], 1):
                self.built.left_out[one[0].path] = _DIED

    def _together(self, wanted: list[tuple[Source, str]], jobs: int) -> list[tuple[Source, str]]:
        """Write ranks, `jobs` at a time. Return those that are left if a process has died."""
        left = {source.path: (source, root) for source, root in wanted}
        with ExitStack() as kept:
            # Threads of this process may hold locks, which a fork would never get back.
            pool = kept.enter_context(ProcessPoolExecutor(jobs, mp_context=get_context("spawn")))
            # In their order, so that of two recordings of one rank it is always the same one that stays.
            running: deque[tuple[Future[Written], Source, Path]] = deque()
            waiting = deque(wanted)
            try:
                while waiting or running:
                    while waiting and len(running) < _AHEAD * jobs:
                        source, root = waiting.popleft()
                        folder = kept.enter_context(self.dataset.unfinished())
                        task = pool.submit(write_rank, source, root, folder, self.options)
                        running.append((task, source, folder))
                    task, source, folder = running.popleft()
                    self._take(task, source, folder)
                    del left[source.path]
            except BrokenProcessPool:
                return list(left.values())
        return []

    def _take(self, task: Future[Written], source: Source, folder: Path) -> None:
        """Put the tables of a rank in place, or note why there are none."""
        try:
            written = task.result()
        except BrokenProcessPool:
            raise
        except OutputError:
            raise
        except TracepipeError as e:
            text = e.message.removeprefix(f"{source.path}: ")
            self.built.left_out[source.path] = f"{text}. {e.hint}" if e.hint else text
        except (OSError, MemoryError) as e:
            self.built.left_out[source.path] = str(e) or type(e).__name__
        else:
            rank, host = written.identity.rank, written.identity.host
            other = self._of_rank.get(rank)
            if other is not None and other != (host, source.path):
                self.built.left_out[source.path] = f"is of rank {rank}, as is {other[1]} of host {other[0]}"
            else:
                self._of_rank[rank] = host, source.path
                self.dataset.replace_rank(host, rank, folder)
                self.built.written.append(written)
        self._done_bytes += source.size_bytes
        if self.progress is not None:
            self.progress(self._done_bytes, self._total_bytes)
