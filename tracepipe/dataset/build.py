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
from tracepipe.dataset.places import Dataset, Rank, Source
from tracepipe.dataset.rank_tables import Written, write_rank
from tracepipe.dataset.shifts import renumber
from tracepipe.errors import InputError, OutputError, TracepipeError
from tracepipe.recording import remote
from tracepipe.recording.files import Progress, archives_kept, traces_of

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
    *(_ARCHIVES := (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst")),
)
"""How the names of files end that are taken for recordings, in a folder that is named as a whole."""
# Recordings that are read before it is their turn to be put in place, for each process: each has a folder.
_AHEAD: Final = 4
_DIED: Final = "the process that read it was killed: free some memory, or use fewer --jobs"


_process: Final = ExitStack()


def _keep_archives() -> None:
    """Have this process unpack an archive once for all of its traces that it reads."""
    _process.enter_context(archives_kept())


@dataclass(slots=True)
class Built:
    """What a build did. `left_out` are recordings that are not in the dataset, with the reasons."""

    aligned: Aligned
    ranks: int
    written: list[Written]
    unchanged: int
    left_out: dict[str, str]


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

    Each rank's tables come from its own store; then the clocks of all are put on one. `options` are those of
    `load_run`; `progress` is called with the bytes of the recordings that are done, and of all. Raises
    InputError for a path where nothing is, OutputError.
    """
    sources: dict[str, tuple[Source, str]] = {}
    for path in paths:
        found, root = _found_at(path, output)
        for source in found:
            sources.setdefault(source.path, (source, root))
    dataset = Dataset.made(output)
    dataset.clear()
    there = {one.rank: one for one in dataset.rank_rows()}
    known = {one.recording for one in there.values()}
    # An object without a version may be another one each time.
    wanted = [
        (source, root) for source, root in sources.values() if source not in known or source.version == ""
    ]
    adding = _Adding(dataset, there, options or {}, progress, sum(source.size_bytes for source, _ in wanted))
    unfinished = adding.add(wanted, min(jobs or len(os.sched_getaffinity(0)), len(wanted)))
    for one in unfinished:  # one of them broke the pool: alone, each answers for itself
        if adding.add([one], 1):
            adding.left_out[one[0].path] = _DIED
    renumber(dataset)
    aligned, ranks = write_alignment(dataset), len(dataset.ranks())
    return Built(aligned, ranks, adding.written, len(sources) - len(wanted), adding.left_out)


def _found_at(path: str, output: str) -> tuple[list[Source], str]:
    """The recordings at a path or URL, or below that folder, and the folder. Raises InputError."""
    if remote.is_url(path):
        there, root = remote.found(path), path.rstrip("/")
        if not there.is_folder:
            return [Source.of_object(there)], path.rpartition("/")[0]
        found = [
            Source.of_object(one)
            for one in remote.listed(path)
            if one.url.endswith(ENDINGS) and "/." not in f"/{one.url.removeprefix(root)}"
        ]
    else:
        is_folder = paths.is_folder(path)
        root = str((Path(path) if is_folder else Path(path).parent).absolute())
        files = sorted(_below(Path(path), Path(output))) if is_folder else [Path(path)]
        found = []
        for file in files:
            name = str(file.absolute())
            try:
                is_archive = not is_folder or name.endswith(_ARCHIVES)
                found += map(Source.of, traces_of(name) if is_archive else [name])
            except InputError:
                if not is_folder:
                    raise
                found.append(Source.of(name))  # why it is left out is said then
            except OSError as e:
                raise InputError(f"cannot be read: {e.strerror}", "Check the path.", path=str(file)) from e
    if not found:
        raise InputError(
            "holds no recordings",
            f"Name the files. Of a folder, only files that end with {', '.join(ENDINGS)} are read.",
            path=path,
        )
    return found, root


def may_be_recording(name: str) -> bool:
    """Whether a file of that name is read where a folder is named."""
    return name[0] != "." and name.endswith(ENDINGS)


def _below(folder: Path, output: Path) -> Iterator[Path]:
    """The files below a folder that are named as recordings are, but for what is hidden and the dataset."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not paths.is_same(Path(place, name), output)
        )
        for name in names:
            if may_be_recording(name):
                yield Path(place, name)


@dataclass(slots=True)
class _Adding:
    """Adds ranks to a dataset. `there` has those that are in it."""

    dataset: Dataset
    there: dict[int, Rank]
    options: dict[str, Any]
    progress: Progress | None
    total_bytes: int
    done_bytes: int = 0
    written: list[Written] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, wanted: list[tuple[Source, str]], jobs: int) -> list[tuple[Source, str]]:
        """Write ranks, `jobs` at a time. Return those that are left if a process has died."""
        waiting, done = deque(wanted), 0
        # In their order, so that of two recordings of one rank it is always the same one that stays.
        running: deque[tuple[Future[Written], Source, Path]] = deque()
        if not wanted:
            return []
        with ExitStack() as kept:
            # Threads of this process may hold locks, which a fork would never get back.
            pool = kept.enter_context(
                ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_keep_archives)
            )
            try:
                while waiting or running:
                    while waiting and len(running) < _AHEAD * jobs:
                        source, root = waiting.popleft()
                        folder = kept.enter_context(self.dataset.unfinished())
                        task = pool.submit(write_rank, source, root, folder, self.options)
                        running.append((task, source, folder))
                    task, source, folder = running.popleft()
                    if reason := self._put_in_place(task, source, folder):
                        self.left_out[source.path] = reason
                    done += 1
                    self.done_bytes += source.size_bytes
                    if self.progress is not None:
                        self.progress(self.done_bytes, self.total_bytes)
            except BrokenProcessPool:
                pass
        return wanted[done:]

    def _put_in_place(self, task: Future[Written], source: Source, folder: Path) -> str:
        """Put the tables of a rank in place, or return why there are none."""
        try:
            written = task.result()
        except (BrokenProcessPool, OutputError):
            raise
        except TracepipeError as e:
            text = e.message.removeprefix(f"{source.path}: ")
            return f"{text}. {e.hint}" if e.hint else text
        except (OSError, MemoryError) as e:
            return str(e) or type(e).__name__
        own, other = written.rank, self.there.get(written.rank.rank)
        if other is not None and (other.host, other.source) != (own.host, own.source):
            return f"is of rank {own.rank}, as is {other.source} of host {other.host}"
        self.there[own.rank] = own
        self.dataset.replace_rank(own.host, own.rank, folder)
        self.written.append(written)
        return ""
