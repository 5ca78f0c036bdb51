"""Where the parts of a dataset lie, and how they come there: whole, or not at all."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote

from tracepipe import __version__, paths
from tracepipe.errors import InputError, OutputError
from tracepipe.printable import json_text
from tracepipe.recording import remote
from tracepipe.recording.files import archive_of
from tracepipe.recording.outputs import made_folder, writing
from tracepipe.store.tables import connect

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

FORMAT: Final = "tracepipe-dataset/6"
"""What `dataset.json` says the folder is; it changes when a column changes its meaning."""
RANKS: Final = "ranks"
"""The layer with a row for each rank: a rank without it is not there."""
_ABOUT: Final = "dataset.json"
_COPY: Final = "Build it in a folder, which can be copied to a store and back: aws s3 sync FOLDER URL."
_PART: Final = "part-0.parquet"
# Readers of datasets pass over folders that begin with a dot.
_UNFINISHED: Final = ".unfinished-"
_MEMORY_MB: Final = 1_000
_RANK_FOLDER: Final = re.compile(r"host=(.*)/rank=(\d+)")


def rank_folder(host: str, rank: int) -> str:
    """The folders of a rank inside that of a layer, as Hive names them."""
    return f"host={quote(host, safe=' ')}/rank={rank}"


def files_of(layer: Path) -> str:
    """The SQL of DuckDB for the rows of all ranks in the folder of a layer."""
    # Letters of patterns stand for themselves, and names of hosts may look like numbers.
    folder = re.sub(r"[*?[]", r"[\g<0>]", str(layer)).replace("'", "''")
    types = "{'host': varchar, 'rank': bigint}"
    return f"read_parquet('{folder}/host=*/rank=*/*.parquet', hive_partitioning = true, hive_types = {types})"


@contextmanager
def asking(path: Path) -> Iterator[DuckDBPyConnection]:
    """A connection of DuckDB whose view `part` has the rows of one file. Raises OSError, and InputError of a
    file that is damaged.
    """
    import duckdb

    with path.open("rb") as file, _database().cursor() as connection:
        # A path may have any letters, also those of patterns; a descriptor has none.
        part = f"read_parquet('/dev/fd/{file.fileno()}', hive_partitioning = false)"
        try:
            connection.execute(f"create temp view part as select * from {part}")
            yield connection
        except duckdb.Error as e:
            reason = str(e).partition("\n")[0]
            raise InputError(f"cannot be read: {reason}", "Build the dataset again.", path=str(path)) from e


@cache
def _database() -> DuckDBPyConnection:
    """A database for all files: to make one takes longer than to read a file."""
    database: DuckDBPyConnection = connect(":memory:", Path(tempfile.gettempdir()), memory_mb=_MEMORY_MB)
    # The next file may have the same descriptor.
    database.execute("set enable_external_file_cache = false")
    return database


def read_rows(path: Path, columns: str = "*") -> list[dict[str, Any]]:
    """The rows of one file. Raises OSError."""
    with asking(path) as connection:
        found = connection.execute(f"select {columns} from part")
        names = [name for name, *_ in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


class Source(NamedTuple):
    """A recording at a path or URL: when it has other values, it was recorded again. A file has the time of
    its last change, and an object its version, "" where its store gives it none. A database is one with the
    files that SQLite has next to it while it writes: all their bytes, and the last change of any.
    """

    path: str
    size_bytes: int
    mtime_ns: int | None
    version: str | None = None

    @classmethod
    def of(cls, path: str) -> Source:
        """The recording at a path or URL. Raises OSError, TracepipeError."""
        if remote.is_url(path):
            return cls.of_object(remote.found(path))
        *_, sizes, times = zip(*filter(None, paths.identity(archive_of(path) or path)), strict=True)
        return cls(path, sum(sizes), max(times))

    @classmethod
    def of_object(cls, found: remote.Found) -> Source:
        """The recording that is an object."""
        return cls(found.url, found.size_bytes, None, found.version)


class Rank(NamedTuple):
    """A row of the layer `ranks`: which rank of which host a recording is of, and what it has."""

    host: str
    rank: int
    world_size: int | None
    clock: str
    source: str
    source_format: str
    source_bytes: int
    source_mtime_ns: int | None
    source_version: str | None
    start_ns: int
    end_ns: int
    realtime_offset_ns: int | None
    last_at_ns: int | None
    last_realtime_offset_ns: int | None
    gpus: int
    kernels: int
    collectives: int
    lost: int
    skipped_lines: int
    notes: list[str]
    has_calls: bool = False
    far_ahead: bool = False
    unknown: str = "{}"
    sm_clock_mhz: float | None = None

    @property
    def recording(self) -> Source:
        """The recording that it was made of."""
        return Source(self.source, self.source_bytes, self.source_mtime_ns, self.source_version)


class Dataset:
    """The folder of a dataset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def is_at(cls, path: str) -> bool:
        """Whether a dataset is at a path, of any version."""
        return paths.is_file(Path(path) / _ABOUT)

    @classmethod
    def opened(cls, path: str) -> Dataset:
        """The dataset at a path. Raises InputError."""
        if remote.is_url(path):
            raise InputError("is a URL, and a dataset is read from a file system", _COPY, path=path)
        folder = Path(path)
        try:
            about = json.loads((folder / _ABOUT).read_bytes())
        except (OSError, ValueError) as e:
            reason = "is not a dataset" if isinstance(e, (FileNotFoundError, NotADirectoryError)) else str(e)
            raise InputError(reason, "Make one with tracepipe dataset build.", path=path) from e
        found = about.get("format") if isinstance(about, dict) else None
        if found != FORMAT:
            raise InputError(
                f"has the format {found!r}, and {FORMAT} is read here",
                "Delete the folder, and build it again.",
                path=path,
            )
        return cls(folder)

    @classmethod
    def made(cls, path: str) -> Dataset:
        """The dataset at a path, which is made if nothing is there. Raises InputError, OutputError."""
        if remote.is_url(path):
            raise OutputError(f"{path} is a URL, and a dataset is built on a file system", _COPY)
        folder = Path(path)
        if paths.is_there(folder / _ABOUT):
            return cls.opened(path)
        if paths.is_folder(folder) and any(folder.iterdir()):
            raise OutputError(f"{path} holds other files", "Name another folder with -o.")
        made_folder(folder)
        dataset = cls(folder)
        about = {"format": FORMAT, "tool": {"name": "tracepipe", "version": __version__}}
        with writing(path), dataset.part_at(_ABOUT) as part:
            part.write_text(json_text(about, indent=True))
        return dataset

    def layers(self) -> list[str]:
        """The layers that there are."""
        found = (one.name.partition("=")[2] for one in self.folder.glob("layer=*"))
        return sorted(found)

    def layer(self, name: str) -> Path:
        """The folder of a layer."""
        return self.folder / f"layer={name}"

    def ranks(self) -> list[tuple[str, int]]:
        """The host and number of each rank that is there, by number."""
        found = []
        for file in self.layer(RANKS).glob(f"host=*/rank=*/{_PART}"):
            place = _RANK_FOLDER.search(file.parent.as_posix())
            if place is not None:
                found.append((unquote(place[1].rpartition("/")[2]), int(place[2])))
        return sorted(found, key=lambda one: (one[1], one[0]))

    def rank_rows(self) -> list[Rank]:
        """The row of each rank that is there, by number. Raises InputError of a damaged file."""
        rows = ((*one, read_rows(self.part(RANKS, *one))[0]) for one in self.ranks())
        return [Rank(host, rank, **row) for host, rank, row in rows]

    def part(self, layer: str, host: str, rank: int) -> Path:
        """The file of a rank in a layer."""
        return self.layer(layer) / rank_folder(host, rank) / _PART

    @contextmanager
    def part_at(self, place: str) -> Iterator[Path]:
        """A path to write a file to, which then gets its place in the dataset in one step."""
        target = self.folder / place
        made_folder(target.parent)
        with self.unfinished() as folder:
            made = folder / target.name
            yield made
            made.replace(target)

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A folder for what is not whole yet, which readers of the dataset pass over."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.folder))
        except OSError as e:
            raise OutputError(
                f"Cannot write to {self.folder}: {e.strerror}.", "Name another folder with -o."
            ) from e
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove what a build left that was killed."""
        for folder in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def replace_rank(self, host: str, rank: int, made: Path) -> None:
        """Put the files `made/LAYER.parquet` of a rank in their places, those of an older build away.

        The row in `ranks` goes first and comes last: a build that ends in between leaves no rank that is half
        old and half new.
        """
        for layer in sorted(self.layers(), key=lambda name: name != RANKS):
            self.part(layer, host, rank).unlink(missing_ok=True)
            folder = self.part(layer, host, rank).parent
            for empty in (folder, folder.parent):
                if paths.is_folder(empty) and not any(empty.iterdir()):
                    empty.rmdir()
        for file in sorted(made.glob("*.parquet"), key=lambda file: (file.stem == RANKS, file.stem)):
            target = self.part(file.stem, host, rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
