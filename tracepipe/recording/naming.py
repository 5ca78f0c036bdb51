"""Gives a complete file its name, without replacing another file, and with checks before and after.

    made: run.jsonl.part ──settle──▶ target: run.jsonl
                             └─▶ another name, if one of them was taken or removed meanwhile

The file stays open all the time, so its content can be found or read even if it was renamed or removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from tracepipe.errors import OutputError
from tracepipe.sudo import sudo_ids

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_COPY_BYTES = 1 << 20
_USE = "use it under that name, or rename it"


def kind_of(path: Path, option: str = "-o") -> int:
    """The kind of what is there, as `stat.S_IFMT` has it; 0 for nothing. Raises OutputError if that cannot be
    read.
    """
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return stat.S_IFREG if path.is_symlink() else 0  # a broken link has the name too
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}", f"Name another place with {option}.") from e


def output_kind(path: str, *, force: bool, option: str = "-o") -> int:
    """As `kind_of`, for an output that is given with `option`. Raises OutputError if it must not be
    written.
    """
    kind = kind_of(Path(path), option)
    if kind == stat.S_IFDIR:
        raise OutputError(f"{path} is a directory", f"Name a file in it with {option}.")
    if kind in (stat.S_IFBLK, stat.S_IFSOCK):
        raise OutputError(f"{path} is not a file", f"Name a file with {option}.")
    if kind == stat.S_IFREG and _is_stream(Path(path)):
        raise OutputError(f"{path} is a file that is open", f"Give {option} - to write to standard output.")
    if kind == stat.S_IFREG and not force:
        raise OutputError(f"{path} exists", f"Overwrite it with --force, or name another with {option}.")
    return kind


def _is_stream(path: Path) -> bool:
    """Whether it is a link to a file that a process has open, such as /dev/stdout. Such a link must stay."""
    return path.is_symlink() and path.readlink().parent.match("/proc/*/fd")


def give_to_caller(fd: int) -> None:
    """Give a file that is made under sudo to the user who called sudo. Raises TracepipeError."""
    ids = sudo_ids()
    if ids is not None:
        with suppress(OSError):  # the file system has no owners, or does not trust root
            os.fchown(fd, ids.uid, ids.gid)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a system error of writing into an OutputError. A closed pipe needs no message."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        # An error with a file name is about another file.
        if e.errno is None or e.filename not in (None, what):
            raise
        raise OutputError(f"cannot write {what}: {e.strerror}", "Free some space, or use -o.") from e


def is_file(path: Path, fd: int) -> bool:
    """Whether the open file has this name."""
    try:
        named, opened = path.lstat(), os.fstat(fd)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def is_taken(path: Path) -> bool:
    """Whether a file has the name, or a recording that will get it."""
    return os.path.lexists(path) or os.path.lexists(f"{path}.part")


def rename_new(made: Path, target: Path) -> None:
    """Rename a file or folder. Raises FileExistsError where anything has the new name, and OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(made), os.fsencode(target)
    if hasattr(libc, "renameat2"):  # since glibc 2.28
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
            return
        if ctypes.get_errno() == errno.EEXIST:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    # NFS and some FUSE file systems do not have this flag, but they have links.
    try:
        os.link(made, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a folder, or a file system without links: check the name first
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        made.rename(target)
    else:
        made.unlink()


def settle(fd: int, made: Path, target: Path, *, force: bool) -> None:
    """Rename the open file `fd`, which was made as `made`, to `target`. `force` replaces a file of that name.

    Raises OutputError if it has another name in the end, which the message states, or none.
    """
    what = f"{made} was removed or replaced while it was written"
    if is_file(made, fd):
        try:
            if force:
                made.replace(target)
            else:
                rename_new(made, target)
        except FileExistsError:
            raise taken(target, moved_aside(made, target)) from None
        except OSError as e:
            what = f"{made} cannot be renamed to {target}: {e.strerror}"
        else:
            if is_file(target, fd):
                return
    try:
        place = _kept_elsewhere(fd, made, target)
    except OSError as e:
        raise OutputError(
            f"{what}, and its content cannot be saved: {e.strerror}", "Free some space before the next one."
        ) from e
    raise OutputError(f"{what}; its content is in {place}", _USE)


def taken(target: Path, place: Path) -> OutputError:
    """The error for a name that was taken while `place` was written."""
    return OutputError(f"{target} was made by another program meanwhile; this output is {place}", _USE)


def free_of(target: Path) -> Iterator[Path]:
    """Names similar to `target`: run-2.jsonl.zst, run-3.jsonl.zst, …"""
    packed = target.suffix if target.suffix in (".gz", ".zst") else ""
    plain = Path(target.name.removesuffix(packed))
    return (target.with_name(f"{plain.stem}-{number}{plain.suffix}{packed}") for number in count(2))


def moved_aside(made: Path, target: Path) -> Path:
    """Rename to the first free name similar to `target` and return that. Raises OSError."""
    for name in free_of(target):
        with suppress(FileExistsError):
            rename_new(made, name)
            return name
    raise AssertionError


def _kept_elsewhere(fd: int, made: Path, target: Path) -> Path:
    """The path of the open file, or of a copy of it. Raises OSError."""
    place = Path(f"/proc/self/fd/{fd}").readlink()
    if is_file(place, fd):
        # Its folder was moved, or the name was taken. A file that somebody renamed keeps its name.
        if place.name != made.name:
            return place
        with suppress(OSError):
            return moved_aside(place, place.with_name(target.name))
        return place
    failure: OSError | None = None
    folders: list[Callable[[], Path]] = [  # none of these need exist
        lambda: target.parent,
        Path.cwd,
        lambda: Path(tempfile.gettempdir()),
    ]
    for folder in folders:
        try:
            return _copy(fd, folder() / target.name)
        except OSError as e:
            failure = failure or e
    assert failure is not None
    raise failure


def _copy(fd: int, target: Path) -> Path:
    """Write the content of an open file, which may be deleted, to a new file with a name similar to
    `target`.
    """
    for name in free_of(target):
        with suppress(FileExistsError):
            copy = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
            break
    try:
        at = 0
        while piece := os.pread(fd, _COPY_BYTES, at):
            at += os.write(copy, piece)
        give_to_caller(copy)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    finally:
        os.close(copy)
    return name
