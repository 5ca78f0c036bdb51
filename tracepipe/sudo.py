"""Who called sudo: whose files are made, and as whom a command runs."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from tracepipe.errors import TracepipeError

AS_ROOT = "sudo sets it; to run it as root: env -u SUDO_UID -u SUDO_GID tracepipe …"
_NOBODY = 2**32 - 1  # -1 as an id is "leave it as it is" to the kernel, and nobody's


@dataclass(frozen=True, slots=True)
class Ids:
    """A user's number and that of the group."""

    uid: int
    gid: int


def sudo_ids() -> Ids | None:
    """The user who called sudo; None if this is not root, or root called it. Raises TracepipeError for
    variables that are not ids: it does not guess what root would do instead.
    """
    if os.geteuid() != 0 or not os.environ.get("SUDO_UID"):
        return None
    uid = _number("SUDO_UID")
    gid = _number("SUDO_GID") if os.environ.get("SUDO_GID") else _group_of(uid)
    return Ids(uid, gid) if uid else None


def sudo_user() -> pwd.struct_passwd | None:
    """That user in the user database; None too where the number is no user's. Raises TracepipeError."""
    ids = sudo_ids()
    try:
        return pwd.getpwuid(ids.uid) if ids else None
    except KeyError:
        return None


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return os.getegid()


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < _NOBODY):
        raise TracepipeError(
            f"{name} is {text!r}, which is not the number of a user or group.",
            AS_ROOT,
        )
    return int(text)
