"""Writes outputs that get their names only when they are complete, without replacing another file.

    .run.pftrace.x7 ──settle──▶ run.pftrace
    run.jsonl.part  ──settle──▶ run.jsonl    a recording: it is locked (flock) while it is written
                          └───▶ another name, if one of them was taken or removed meanwhile

A file stays open all the time, so its content can be found or read even if it was renamed or removed. No part
of a recording is lost when the capture dies or another program writes there. A .part that no process has
locked was left by a capture that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, TypeVar

from tracepipe import paths
from tracepipe.errors import OutputError
from tracepipe.options import STANDARD
from tracepipe.recording import remote
from tracepipe.recording.compression import compressing
from tracepipe.recording.files import archive_of, refuse_missing
from tracepipe.sudo import sudo_ids

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_COPY_BYTES = 1 << 20
_USE = "use it under that name, or rename it"
Made = TypeVar("Made")


def kind_of(path: Path, option: str = "-o") -> int:
    """The kind of a path by `stat.S_IFMT`; 0 for nothing. Raises OutputError if it cannot be read."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return stat.S_IFREG if path.is_symlink() else 0  # a broken link has the name too
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}", f"Name another place with {option}.") from e


def output_kind(path: str, *, force: bool, option: str = "-o") -> int:
    """The kind of an output that is given with `option`. Raises OutputError if it must not be written."""
    kind = kind_of(Path(path), option)
    if kind == stat.S_IFDIR:
        raise OutputError(f"{path} is a directory", f"Name a file in it with {option}.")
    if kind in (stat.S_IFBLK, stat.S_IFSOCK):
        raise OutputError(f"{path} is not a file", f"Name a file with {option}.")
    link = Path(path)
    # A link to a file that a process has open, such as /dev/stdout, must stay.
    if kind == stat.S_IFREG and link.is_symlink() and link.readlink().parent.match("/proc/*/fd"):
        raise OutputError(f"{path} is a file that is open", f"Give {option} - to write to standard output.")
    if kind == stat.S_IFREG and not force:
        raise OutputError(f"{path} exists", f"Overwrite it with --force, or name another with {option}.")
    return kind


def give_to_caller(fd: int) -> None:
    """Give a file that is made under sudo to the user who called sudo. Raises TracepipeError."""
    ids = sudo_ids()
    if ids is not None:
        with suppress(OSError):  # the file system has no owners, or does not trust root
            os.fchown(fd, ids.uid, ids.gid)


def give_folder_to_caller(folder: Path) -> None:
    """Give a folder that was made to the user who called sudo. Raises OSError, TracepipeError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        give_to_caller(fd)
    finally:
        os.close(fd)


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
            raise _taken(target, made) from None
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


def free_of(target: Path) -> Iterator[Path]:
    """Names similar to `target`: run-2.jsonl.zst, run-3.jsonl.zst, …"""
    packed = target.suffix if target.suffix in (".gz", ".zst") else ""
    plain = Path(target.name.removesuffix(packed))
    return (target.with_name(f"{plain.stem}-{number}{plain.suffix}{packed}") for number in count(2))


def _taken(target: Path, made: Path) -> OutputError:
    """The error for a name that was taken while `made` was written, which gets a similar one."""
    place = moved_aside(made, target)
    return OutputError(f"{target} was made by another program meanwhile; this output is {place}", _USE)


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
    """Write the content of an open file to a new file with a name similar to `target`."""
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


_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


def default_output(path: str, suffix: str) -> str:
    """The path for the output of `path`: next to it, or in this folder for a URL, with `suffix`."""
    if path == STANDARD:
        return STANDARD
    out = Path(remote.name_of(path) if remote.is_url(path) else path)
    if out.suffix in (".gz", ".zst"):
        out = out.with_suffix("")
    if out.suffix in (".jsonl", ".json", ".txt", ".ndjson"):
        out = out.with_suffix("")
    if Path(f"{out}{suffix}") == Path(path):  # run.json becomes run.trace.json, never itself
        suffix = f".trace{suffix}"
    return f"{out}{suffix}"


def trace_names(paths: Sequence[str]) -> list[str]:
    """The names of the traces of recordings in an archive: like those of the recordings, all different, in
    characters that every reader supports. Perfetto ignores names that begin with a dot.
    """
    names: list[str] = []
    for path in paths:
        plain = _UNUSUAL.sub("_", Path(default_output(path, ".pftrace")).name).lstrip("._-")
        first = Path(plain if path != STANDARD else "stdin.pftrace")
        names.append(next(name for one in chain([first], free_of(first)) if (name := str(one)) not in names))
    return names


@contextmanager
def replacing(
    path: str, *, force: bool, sources: Sequence[str] = (), on_terminal: bool = False
) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete, or a copy at a URL. Raises OutputError if the name
    exists already.

    The file must not be one of `sources`, from which it is made. `on_terminal` is for output that people can
    read.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "Name a file with -o.")
        if sys.stdout.isatty() and not on_terminal:
            raise OutputError("the output is not for a terminal", "Name a file with -o, or pipe the output.")
        with writing("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    if remote.is_url(path):
        if path in sources:
            raise OutputError(f"{path} is the recording itself", "Name another file with -o.")
        with remote.sending(path, force=force) as out, writing(path):
            yield out
        return
    target = Path(path)
    kind = output_kind(path, force=force)
    made_of = [archive_of(source) or source for source in sources if source != STANDARD]
    if kind == stat.S_IFREG and any(paths.is_same(target, source) for source in made_of):
        raise OutputError(f"{path} is the recording itself", "Name another file with -o.")
    if kind not in (0, stat.S_IFREG):  # /dev/null, a pipe: nothing to replace
        with writing(path), target.open("wb") as out:
            yield out
        return
    refuse_missing(sources)
    fd, name = _made_beside(target, tempfile.mkstemp)
    made = Path(name)
    try:
        try:
            with writing(path), os.fdopen(fd, "wb", closefd=False) as out:
                os.fchmod(fd, 0o666 & ~_umask())
                give_to_caller(fd)
                yield out
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        settle(fd, made, target, force=force)
    finally:
        os.close(fd)


@contextmanager
def named_at_once(path: str, *, force: bool, option: str) -> Iterator[int]:
    """The descriptor of a new file, given with `option`, that others write and read while it is open. Raises
    OutputError.

    If an exception ends the context and the file is empty, it is removed.
    """
    _refuse_url(path, option)
    target = Path(path)
    kind = output_kind(path, force=force, option=option)
    is_new = kind in (0, stat.S_IFREG)
    try:
        if kind == stat.S_IFREG:
            target.unlink()
        # Root may write into another user's folder: links are not followed, and existing files are not
        # opened.
        new = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW if is_new else 0
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC | new, 0o666)
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}", f"Name another file with {option}.") from e
    try:
        if is_new:
            give_to_caller(fd)
        yield fd
    except BaseException:
        if is_new and is_file(target, fd) and not os.fstat(fd).st_size:
            target.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


@contextmanager
def replacing_folder(path: str, *, force: bool) -> Iterator[Path]:
    """Fill a folder that gets its name when it is complete. Raises OutputError if the name exists already.

    With `force`, a folder that has only files with the same names is replaced. One that has anything else
    stays.
    """
    _refuse_url(path, "-o")
    target = Path(path).resolve()
    if path == STANDARD:
        raise OutputError("a folder cannot go to standard output", "Name it with -o.")
    if kind_of(target) and (not force or not paths.is_folder(target)):
        is_folder = paths.is_folder(target)
        hint = f"{'Overwrite it with --force, or name' if is_folder else 'Name'} another with -o."
        raise OutputError(f"{path} exists", hint)
    made = Path(_made_beside(target, tempfile.mkdtemp))
    try:
        made.chmod(0o777 & ~_umask())
        with writing(path):
            yield made
        _give_name(made, target, force=force)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _made_beside(target: Path, make: Callable[..., Made]) -> Made:
    """What `make` makes of tempfile, next to `target`. Raises OutputError."""
    try:
        return make(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        hint = "Name another place with -o."
        raise OutputError(f"cannot write to {target.parent}: {e.strerror}", hint) from e


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _refuse_url(path: str, option: str) -> None:
    """Raise OutputError for a URL: the output is used while it is made, or is several files."""
    if remote.is_url(path):
        raise OutputError(
            f"{path} is a URL, to which this output cannot go",
            f"Name a place on a file system with {option}, and copy it.",
        )


def _give_name(made: Path, target: Path, *, force: bool) -> None:
    """Rename a complete folder to its name. With `force`, it replaces an older one."""
    if not force or not paths.is_there(target):
        try:
            rename_new(made, target)
        except FileExistsError:
            raise _taken(target, made) from None
        return
    others = sorted({one.name for one in target.iterdir()} - {one.name for one in made.iterdir()})
    if others:
        raise OutputError(
            f"{target} holds other files: {', '.join(others[:3])}", "Name another folder with -o."
        )
    older = made.with_name(f"{made.name}.old")
    target.replace(older)
    try:
        made.replace(target)
    except OSError:
        older.replace(target)
        raise
    shutil.rmtree(older)


def made_folder(folder: Path) -> Path:
    """Make a folder and its parents where they do not exist, and return it. Raises OutputError."""
    for part in (*reversed(folder.parents), folder):
        try:
            part.mkdir()
            give_folder_to_caller(part)
        except FileExistsError:
            continue  # if it is not a folder, writing into it will report that
        except OSError as e:
            raise OutputError(f"cannot make the folder {part}: {e.strerror}", "Name another with -o.") from e
    return folder


def free_name(stem: str, suffix: str, folder: Path = Path()) -> str:
    """`stem` with `suffix` in a folder, with a number if that name is taken or is being recorded."""
    first = folder / f"{stem}{suffix}"
    return str(next(name for name in chain([first], free_of(first)) if not is_taken(name)))


_ATTEMPTS = 20  # tries, where another capture makes and removes the same name again and again

Notify = Callable[[str], None]


@contextmanager
def written_recording(path: str, *, force: bool, notify: Notify = lambda _: None) -> Iterator[BinaryIO]:
    """Write a recording, as `path` + ".part" until it ends. What was written stays in every case.

    `flush` ends a part of it. Raises OutputError if such a file exists already, if a capture is writing it,
    and, at the end, if the recording has a name other than `path`. `force` replaces only the file `path`; a
    file that a killed capture left is renamed, and `notify` is called with its new name.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "Name a file with -o.")
        sys.stdout.flush()
        out = compressing(getattr(sys.stdout.buffer, "raw", sys.stdout.buffer), "", is_ours=False)
        yield out
        out.flush()
        return
    target = Path(path)
    kind = output_kind(path, force=force)
    if kind in (stat.S_IFCHR, stat.S_IFIFO):  # /dev/null, a pipe: it must stay, above all as root
        with writing(path):
            device = compressing(target.open("wb", buffering=0), path, is_ours=False)
        with _closed(path, device):
            yield device
        return
    part = Path(f"{path}.part")
    # A signal whose handler raises would leave the file if it came before the block that removes it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        fd = _begun(part, target, force=force, notify=notify)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        give_to_caller(fd)
        with _closed(path, compressing(os.fdopen(fd, "r+b", buffering=0, closefd=False), path)) as out:
            yield out
    except BaseException:
        try:
            _end(fd, part, target, force=force)
        except OutputError as error:  # an earlier error is raised first
            notify(f"{error.message}")
        raise
    else:
        _end(fd, part, target, force=force)
    finally:
        os.close(fd)


@contextmanager
def _closed(path: str, out: BinaryIO) -> Iterator[BinaryIO]:
    """The file, which is closed at the end. Closing writes the rest, and may find the disk full."""
    try:
        yield out
    finally:
        with writing(path):
            out.close()


def _end(fd: int, part: Path, target: Path, *, force: bool) -> None:
    """Give a recording its name. One that never began is removed, and a file of that name stays."""
    if os.fstat(fd).st_size:
        settle(fd, part, target, force=force)
    elif is_file(part, fd):
        part.unlink(missing_ok=True)


def _begun(part: Path, target: Path, *, force: bool, notify: Notify) -> int:
    """Open a new file that no other capture writes to or takes for one that was left. Raises OutputError."""
    for _ in range(_ATTEMPTS):
        try:
            # Root may write into another user's folder: links are not followed, and existing files are not
            # opened.
            fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _clear(part, target, force=force, notify=notify)
            continue
        except OSError as e:
            raise OutputError(f"cannot write {part}: {e.strerror}", "Name another place with -o.") from e
        # Before it was locked, another capture may have taken the file for one that was left.
        if _is_locked_by_us(fd) and is_file(part, fd):
            return fd
        os.close(fd)
    raise OutputError(f"{part} is made and removed again and again", "Name another file with -o.")


def _is_locked_by_us(fd: int) -> bool:
    """Lock an open file. Return False where another process has. Without locks, none has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _clear(part: Path, target: Path, *, force: bool, notify: Notify) -> None:
    """Free the name of a file that a killed capture left. An empty file is removed, records never are.

    Raises OutputError if the file is in use, or if it has records and `force` is not set, with which it is
    renamed.
    """
    try:
        # It is opened for writing, as NFS locks no other files. Nothing is written.
        fd = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "Remove it, or name another file with -o.") from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(f"{part} exists and is not a file", "Remove it, or name another file with -o.")
        if not _is_locked_by_us(fd):
            raise OutputError(f"{target} is being recorded by another capture", "Name another file with -o.")
        if not is_file(part, fd):  # its capture has given it its name meanwhile
            return
        if not status.st_size:
            part.unlink()
        elif force:
            place = moved_aside(part, target)
            notify(f"{part}, which a killed capture left, is {place} now")
        else:
            raise OutputError(
                f"{part} exists: a killed capture left it",
                "Read it as it is and rename or remove it, or name another file with -o.",
            )
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "Remove it, or name another file with -o.") from e
    finally:
        os.close(fd)
