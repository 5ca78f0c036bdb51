"""Objects at URLs, such as s3://bucket/runs/3.jsonl: the one file that uses fsspec, which is loaded for them.

    object ──fetched──▶ a temporary file, read like any other, and gone when it is closed
    a temporary file ──sending──▶ object, once it is complete

What the packages of the protocols raise is translated here. They take credentials from variables and files:
a URL that has a password, or may have one, is refused, as messages and datasets show URLs.
"""

from __future__ import annotations

import errno
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, cast

from tracepipe.errors import InputError, LibraryMissing, OutputError, TracepipeError
from tracepipe.printable import printable

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# HOST:PORT has no password, and neither has arn:…, which names an access point of S3.
_PASSWORD: Final = re.compile(r"(?!arn:)[^/?#]*:(?!\d*(?:[/?#]|$))|[^/?#]*:[^/?#]*@")
# What tells whether an object is still the same, where the protocol has it: the first of these.
_VERSIONS: Final = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
# Stores whose URLs begin with a bucket or container, which must be there before an object can be.
_WITH_BUCKETS: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# s3fs keeps this many pieces of 50 MB in memory, 10 if nothing is said.
_FRUGAL: Final[dict[str, object]] = {"max_concurrency": 1}
_CHECK: Final = "Check the URL, the credentials and the endpoint."


class Found(NamedTuple):
    """An object, or a folder of objects. Two versions that differ have other contents; "" is not known."""

    url: str
    size_bytes: int
    version: str
    is_folder: bool


def is_url(path: str) -> bool:
    """Whether a path is a URL, in the form SCHEME://…"""
    return _URL.match(path) is not None


def name_of(url: str) -> str:
    """The last part of a URL, as a file is called."""
    return PurePosixPath(url.partition("://")[2].partition("/")[2]).name


def check_url(url: str) -> None:
    """Raise TracepipeError for a URL that is not taken."""
    found = _URL.match(url)
    assert found is not None
    scheme, rest = found[1].lower(), url[found.end() :]
    if "::" in rest:
        raise TracepipeError(
            "URLs with two colons in a row are not taken: these join URLs.", "Rename the object."
        )
    if _PASSWORD.match(rest):
        raise TracepipeError(
            "URLs with a password are not taken, as messages show them.",
            "Leave it out, and give it as the protocol's package wants it: by variables or a file.",
        )
    if "?" in rest and scheme in ("http", "https"):
        raise TracepipeError(
            "URLs with a query are not taken, as messages would show a signature in it.",
            "Pipe the recording, where the command takes -: curl URL | tracepipe convert - -o run.pftrace.",
        )
    if scheme in ("file", "local"):
        raise TracepipeError(f"{url} is a path.", f"Write it without {found[0]}.")


def found(url: str) -> Found:
    """The object or folder at a URL. Raises InputError if there is none, TracepipeError, LibraryMissing."""
    fs, path = _opened(url)
    with _translated(url, _unreadable):
        return _found(url, fs.info(path))


def listed(url: str) -> list[Found]:
    """The objects below a folder, by URL. Raises InputError, TracepipeError, LibraryMissing."""
    fs, path = _opened(url)
    with _translated(url, _unreadable):
        names = fs.find(path, detail=True)
    # Some protocols list names without the host: what follows the folder is added to the URL as it was given.
    root, base = path.rstrip("/"), url.rstrip("/")
    return sorted(_found(base + name.removeprefix(root), info) for name, info in names.items())


@contextmanager
def fetched(url: str) -> Iterator[BinaryIO]:
    """A copy of an object in a nameless file. Raises InputError, TracepipeError, LibraryMissing."""
    fs, path = _opened(url)
    with tempfile.TemporaryFile(prefix="tracepipe-") as copy:
        with _translated(url, _unreadable):
            there = _found(url, fs.info(path))
            if there.is_folder:
                raise InputError(
                    "is a folder",
                    "Name an object in it, or gather the ranks of a job: tracepipe dataset build.",
                    path=url,
                )
            fs.get_file(path, f"/proc/self/fd/{copy.fileno()}", **_taken_by(fs, "get_file", _FRUGAL))
        copied_bytes = copy.seek(0, 2)
        if copied_bytes != there.size_bytes:
            raise InputError(
                f"has {there.size_bytes:,} bytes, of which {copied_bytes:,} came", "Try it again.", path=url
            )
        copy.seek(0)
        yield cast(BinaryIO, copy)


def is_taken(url: str) -> bool:
    """Whether an object is at a URL. Raises OutputError, also where its bucket is missing or it is a folder;
    TracepipeError, LibraryMissing.
    """
    fs, path = _opened(url)
    with _translated(url, _unwritable):
        try:
            there = _found(url, fs.info(path))
        except FileNotFoundError:
            if url.partition("://")[0].lower() in _WITH_BUCKETS:
                _check_bucket(fs, path.partition("/")[0], url)
            return False
    if there.is_folder:
        raise OutputError(f"{url} is a folder", "Name an object in it with -o.")
    return True


def _check_bucket(fs: Any, bucket: str, url: str) -> None:
    try:
        fs.info(bucket)
    except FileNotFoundError:
        raise OutputError(f"{url} cannot be written: there is no bucket {bucket}", _CHECK) from None
    except OSError:
        return  # who may write an object need not be allowed to look at the bucket


@contextmanager
def sending(url: str, *, force: bool) -> Iterator[BinaryIO]:
    """A temporary file that is copied to a URL when it is complete. Raises as `send` does."""
    if is_taken(url) and not force:
        raise taken(url)
    with tempfile.TemporaryFile(prefix="tracepipe-") as made:
        yield cast(BinaryIO, made)
        made.flush()
        send(f"/proc/self/fd/{made.fileno()}", url, force=force)


def send(file: str, url: str, *, force: bool) -> None:
    """Copy a complete file to a URL. Without `force`, nothing is replaced there. Raises OutputError,
    TracepipeError, LibraryMissing.
    """
    if not force and is_taken(url):
        raise taken(url)
    fs, path = _opened(url)
    with _translated(url, _unwritable):
        # Many protocols can refuse an object that came meanwhile.
        options = _FRUGAL if force else _FRUGAL | {"mode": "create"}
        fs.put_file(file, path, **_taken_by(fs, "put_file", options))


def _taken_by(fs: Any, method: str, options: dict[str, object]) -> dict[str, object]:
    """The options that a method of a protocol accepts."""
    own = inspect.signature(getattr(fs, f"_{method}", getattr(fs, method))).parameters
    return {name: value for name, value in options.items() if name in own}


def taken(url: str) -> OutputError:
    """The error for a URL where an object is."""
    return OutputError(f"{url} exists", "Overwrite it with --force, or name another with -o.")


def _found(url: str, info: Any) -> Found:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Found(url, int(info.get("size") or 0), version, info.get("type") == "directory")


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, without what it knew before, and the path in it. Raises TracepipeError,
    LibraryMissing.
    """
    check_url(url)
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError as e:
        raise LibraryMissing(
            f"URLs need fsspec, which cannot be imported: {e}", "pip install 'tracepipe[remote]'"
        ) from e
    known = known_implementations.get(scheme, {})
    try:
        with _translated(url, _unreadable):
            fs, path = cast("tuple[Any, str]", url_to_fs(url))
            fs.invalidate_cache()
            return fs, path
    except ImportError as e:
        package = known.get("class", "").partition(".")[0]
        hint = f"pip install {package}" if package != "fsspec" else "Install what it names."
        raise LibraryMissing(f"{scheme}:// cannot be used: {e}", hint) from e


@contextmanager
def _translated(url: str, failed: Callable[[str, Exception], TracepipeError]) -> Iterator[None]:
    """Turn what a protocol's package raises, most of it no OSError, into one of our errors."""
    try:
        yield
    except (TracepipeError, ImportError):
        raise
    except FileExistsError as e:
        raise taken(url) from e
    except Exception as e:
        raise failed(url, e) from e


def not_copied(error: OSError, path: str) -> InputError:
    """The error for an input of which no temporary copy can be made."""
    hint = f"Free some space in {tempfile.gettempdir()}, to which it is copied, or set TMPDIR."
    return InputError(f"cannot be copied: {error.strerror}", hint, path=path)


def _unreadable(url: str, error: Exception) -> TracepipeError:
    if isinstance(error, OSError) and error.errno in _FULL:
        return not_copied(error, url)
    return InputError(f"cannot be read: {_why(error)}", _CHECK, path=url)


def _unwritable(url: str, error: Exception) -> TracepipeError:
    return OutputError(f"{url} cannot be written: {_why(error)}", _CHECK)


def _why(error: Exception) -> str:
    """One line about an error."""
    if isinstance(error, FileNotFoundError):
        if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
            return "nothing is there"
        error = cast(Exception, error.__cause__)  # of HTTP, that no server answers
    first = str(error).strip().partition("\n")[0]
    return printable(first.rstrip(".")) or type(error).__name__
