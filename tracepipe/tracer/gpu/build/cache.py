"""Keeps builds in a cache folder, and checks that no untrusted user could have written one.

    a user        $XDG_CACHE_HOME/tracepipe/NAME-DIGEST.so     compiled there, linked; a program has no .so
    root          /var/cache/tracepipe/0/NAME-DIGEST.so        compiled there, linked
    under sudo    /var/cache/tracepipe/UID/scratch-…/made      compiled by the caller, who owns the folder
                  /var/cache/tracepipe/UID/NAME-DIGEST.so      copied by root, and root's from then on

A build is loaded into the command's process. So the file and every folder on its path must belong to users
whom the command trusts anyway: root, and the user that it runs as. Each is opened by its name in the folder
before it, and the opened file is checked, so nothing can be exchanged in between.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Owner

ROOT_CACHE: Final = Path("/var/cache/tracepipe")
_BUILD_BYTES_MAX: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# For what is checked and not read: a home folder's parent need not be readable.
_PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Compile = Callable[[Path], object]
"""Makes the file with that name, as the owner."""


def cache_folder(user: Owner) -> Path:
    """The folder of the builds for a user. Root uses one in which only root can write."""
    if os.geteuid() == 0:
        return ROOT_CACHE / str(user.uid)
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if named.startswith("/") else user.home / ".cache"
    return base / "tracepipe"


class Cache:
    """The cached builds for one user."""

    def __init__(self, user: Owner) -> None:
        self._user = user
        self.folder = cache_folder(user)
        # The caller of sudo is not trusted with root's folders.
        self._trusted = {0, os.geteuid()}

    def find(self, name: str) -> Path | None:
        """A build in the cache. Raises CaptureUnavailable if other users could have written it."""
        try:
            if not (self.folder / name).exists():
                return None
        except PermissionError:  # this user may not read the folder
            return None
        check_safe(self.folder / name, self._trusted)
        return self.folder / name

    def make(self, name: str, compile_into: Compile) -> Path:
        """Make a build and keep it. Raises CaptureUnavailable."""
        try:
            _make_folder(self.folder)
        except OSError as error:
            raise CaptureUnavailable(
                f"{self.folder} cannot be made: {error.strerror}.", "Check that this user may write there."
            ) from None
        check_safe(self.folder, self._trusted)
        unfinished = self.folder / f".{secrets.token_hex(8)}-{name}"
        try:
            if self._user.uid == os.geteuid():
                compile_into(unfinished)
            else:
                self._take_from_scratch(unfinished, compile_into)
            # If another capture was faster, its file stays: its probes are in that file, and not in this one.
            with suppress(FileExistsError):
                os.link(unfinished, self.folder / name)
        except OSError as error:
            raise CaptureUnavailable(
                f"{self.folder / name} cannot be written: {error.strerror}.",
                "Check that the disk has free space.",
            ) from None
        finally:
            with suppress(OSError):
                unfinished.unlink()
        check_safe(self.folder / name, self._trusted)
        return self.folder / name

    def _take_from_scratch(self, path: Path, compile_into: Compile) -> None:
        """Let the user compile in a separate folder, and copy the result, which is untrusted."""
        with ExitStack() as undo:
            scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=self.folder))
            undo.callback(shutil.rmtree, scratch, ignore_errors=True)
            os.chown(scratch, self._user.uid, self._user.gid)
            compile_into(scratch / "made")
            folder = os.open(scratch, _FOLDER)
            undo.callback(os.close, folder)
            made = os.open("made", _FILE, dir_fd=folder)
            undo.callback(os.close, made)
            status = os.fstat(made)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _BUILD_BYTES_MAX:
                raise CaptureUnavailable(
                    f"{scratch / 'made'} is not a file that a compiler makes.", "Try again without sudo."
                )
            # At most as many bytes as a build can have, into a new file.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            left = _BUILD_BYTES_MAX
            with os.fdopen(os.open(path, flags, 0o755), "wb") as file:
                while left > 0 and (piece := os.read(made, _PIECE_BYTES)):
                    file.write(piece)
                    left -= len(piece)


def check_safe(path: Path, trusted: set[int]) -> None:
    """Raise CaptureUnavailable if untrusted users could have written it, or can replace it."""
    real = Path(os.path.realpath(path))
    opened = os.open("/", _PLACE)
    try:
        place, status = Path("/"), os.fstat(opened)
        _check(status, place, trusted, in_sticky=False)
        for place in (*reversed(real.parents[:-1]), real):
            inner = os.open(place.name, _PLACE, dir_fd=opened)
            os.close(opened)
            opened, before, status = inner, status, os.fstat(inner)
            if stat.S_ISLNK(status.st_mode):  # it was not a link when the path was resolved
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            _check(status, place, trusted, in_sticky=_is_writable(before))
    except OSError as error:
        raise CaptureUnavailable(
            f"{place} cannot be used: {error.strerror}.", f"rm -r {path.parent}"
        ) from None
    finally:
        os.close(opened)


def _check(status: os.stat_result, place: Path, trusted: set[int], *, in_sticky: bool) -> None:
    is_folder = stat.S_ISDIR(status.st_mode)
    # In a sticky folder such as /tmp, others can add names but not replace ours. So our folder there is safe.
    # A file is not: somebody can have linked another file of ours to that name.
    is_good = is_folder or (stat.S_ISREG(status.st_mode) and not in_sticky)
    writable = _is_writable(status) and not (is_folder and status.st_mode & stat.S_ISVTX)
    if status.st_uid not in trusted or writable or not is_good:
        raise CaptureUnavailable(
            f"{place} can be written by other users, and code from it would run in the command.",
            f"Run chmod go-w {place} or, if it is not yours, rm -r {place}",
        )


def _is_writable(status: os.stat_result) -> bool:
    """Whether a user other than the owner and root can write it. Root's group counts as root."""
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != 0))


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents, writable only by this user, whatever the umask is."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
