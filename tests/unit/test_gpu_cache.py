"""Whose builds are used, and as which user they are made: root, or the user that the command runs as."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.test_gpu_toolchain import ME, chain, nvcc, part, put
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build import cache as caches
from tracepipe.tracer.gpu.build.cache import Cache, cache_folder, check_safe
from tracepipe.tracer.gpu.build.driver import Owner, owner
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, find_parts
from tracepipe.tracer.target import _command_user

OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
US = {0, os.geteuid()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    monkeypatch.setattr(caches, "ROOT_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)  # what is made is closed to others all the same
    yield Cache(ME)
    os.umask(before)


def compiled(text: str = "made") -> Callable[[Path], None]:
    return lambda path: put(path, text).chmod(0o644)


# What is taken


def test_a_build_is_found_again(cache: Cache) -> None:
    assert cache.find("x.so") is None
    path = cache.make("x.so", compiled())
    assert cache.find("x.so") == path == cache.folder / "x.so"
    assert path.read_text() == "made"
    assert list(cache.folder.iterdir()) == [path]
    assert all(not folder.stat().st_mode & 0o022 for folder in (cache.folder, cache.folder.parent))


def test_the_first_of_two_simultaneous_builds_is_kept(cache: Cache) -> None:
    """A capture has probes in the file that it made, which its command opens after this."""

    def late(path: Path) -> None:
        compiled()(path)
        cache.make("x.so", compiled("first"))

    path = cache.make("x.so", late)
    assert path.read_text() == "first"
    assert list(cache.folder.iterdir()) == [path]


def test_a_build_that_others_can_write_is_not_used(cache: Cache) -> None:
    path = cache.make("x.so", compiled())
    for place in (path, cache.folder, cache.folder.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        with pytest.raises(CaptureUnavailable, match="can be written by other users"):
            cache.find("x.so")
        if place != path:
            with pytest.raises(CaptureUnavailable, match="can be written by other users"):
                cache.make("y.so", compiled())
        place.chmod(mode)
    assert cache.find("x.so") == path


@as_root
def test_roots_group_may_write_to_a_build(tmp_path: Path) -> None:
    file = put(tmp_path / "x.so")
    file.chmod(0o664)
    check_safe(file, {0})
    os.chown(file, 0, OTHER)
    with pytest.raises(CaptureUnavailable, match="can be written by other users"):
        check_safe(file, {0})


@as_root
def test_a_build_of_another_user_is_not_used(cache: Cache) -> None:
    path = cache.make("x.so", compiled())
    for place in (path, cache.folder, cache.folder.parent):
        os.chown(place, OTHER, OTHER)
        with pytest.raises(CaptureUnavailable, match="can be written by other users"):
            cache.find("x.so")
        os.chown(place, 0, 0)
    assert cache.find("x.so") == path


def test_a_folder_that_is_reached_by_a_link_is_checked_where_it_is(tmp_path: Path) -> None:
    real = tmp_path / "open/deep"
    put(real / "x.so")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "cache").symlink_to(real)
    with pytest.raises(CaptureUnavailable, match=f"{tmp_path}/open can be written by other users"):
        check_safe(tmp_path / "cache/x.so", US)
    (tmp_path / "open").chmod(0o755)
    check_safe(tmp_path / "cache/x.so", US)


def test_our_folder_in_a_sticky_one_is_trusted_and_a_file_there_is_not(tmp_path: Path) -> None:
    """In /tmp anybody may give a file of ours another name."""
    ours = put(tmp_path / "sticky/ours/x.so")
    bare = put(tmp_path / "sticky/x.so")
    (tmp_path / "sticky").chmod(0o1777)
    check_safe(ours, US)
    with pytest.raises(CaptureUnavailable, match="can be written by other users"):
        check_safe(bare, US)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_only_a_file_is_a_build(tmp_path: Path, kind: int) -> None:
    os.mknod(tmp_path / "x.so", kind | 0o644)
    with pytest.raises(CaptureUnavailable):
        check_safe(tmp_path / "x.so", US)


def test_a_link_that_comes_in_between_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was a folder when the path was resolved, and leads elsewhere when it is opened."""
    put(tmp_path / "elsewhere/x.so")
    put(tmp_path / "cache/x.so")
    resolve = os.path.realpath

    def resolve_and_lose(path: Path) -> str:
        real = resolve(path)
        (tmp_path / "cache").rename(tmp_path / "gone")
        (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
        return real

    monkeypatch.setattr(os.path, "realpath", resolve_and_lose)
    with pytest.raises(CaptureUnavailable, match=f"{tmp_path}/cache cannot be used"):
        check_safe(tmp_path / "cache/x.so", US)


@as_root
def test_a_folder_that_may_only_be_passed_through_is_passed_through(tmp_path: Path, caller: Owner) -> None:
    build = put(tmp_path / "home/user/x.so")
    for place in (build, build.parent):
        os.chown(place, caller.uid, caller.gid)
    build.parent.parent.chmod(0o711)
    if (child := os.fork()) == 0:
        os.setuid(caller.uid)
        try:
            check_safe(build, {0, caller.uid})
        except CaptureUnavailable:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_compiler_that_fails_leaves_nothing(cache: Cache) -> None:
    def fails(path: Path) -> None:
        put(path, "half")
        raise CaptureUnavailable("It could not be built.", "Try it.")

    with pytest.raises(CaptureUnavailable, match="could not be built"):
        cache.make("x.so", fails)
    assert list(cache.folder.iterdir()) == []


# As root, and under sudo


@as_root
def test_root_takes_builds_from_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(Owner(1000, 1000, tmp_path)) == Path("/var/cache/tracepipe/1000")
    assert cache_folder(ME) == Path("/var/cache/tracepipe/0")


def test_a_user_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    user = Owner(1000, 1000, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(user) == Path("/elsewhere/tracepipe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(user) == tmp_path / ".cache/tracepipe"


def test_builds_are_for_the_user_as_which_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    assert owner() == Owner(nobody.pw_uid, nobody.pw_gid, Path(nobody.pw_dir))
    assert _command_user() == nobody
    monkeypatch.delenv("SUDO_UID")
    assert owner().uid == 0
    assert _command_user() is None


@pytest.fixture
def caller(tmp_path: Path) -> Owner:
    """Who called sudo, and may read what the tests make."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and "pytest" in str(folder):
            folder.chmod(0o755)  # pytest's folders are for root alone
    user = pwd.getpwnam("nobody")
    return Owner(user.pw_uid, user.pw_gid, Path(user.pw_dir))


@as_root
def test_under_sudo_the_caller_compiles_and_root_keeps(cache: Cache, caller: Owner, tmp_path: Path) -> None:
    says = put(tmp_path / "tools/nvcc", '#!/bin/sh\nid -u >"$(eval echo \\${$#})"\n', runs=True)
    tools = [Compiler(says, (13, 0), "nvcc 13.0")]
    made = chain(user=caller, nvcc=tools, gxx=tools, sanitizer=[part((13, 0))])
    source = put(tmp_path / "native/p.cpp", "1")
    path = made.build_host(source)
    assert path.read_text() == f"{caller.uid}\n"
    assert path.parent == caches.ROOT_CACHE / str(caller.uid)
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o755)
    assert list(path.parent.iterdir()) == [path], "the folder of the caller's is gone"
    assert made.build_host(source) == path


@as_root
@pytest.mark.parametrize("made", ["ln -s /etc/shadow", "mkfifo", "mkdir", "true"])
def test_what_the_caller_leaves_instead_of_a_build_is_not_kept(
    cache: Cache, caller: Owner, tmp_path: Path, made: str
) -> None:
    says = put(tmp_path / "tools/g++", f'#!/bin/sh\nexec {made} "$(eval echo \\${{$#}})"\n', runs=True)
    tools = chain(user=caller, gxx=[Compiler(says, (12, 2), "g++")])
    with pytest.raises(CaptureUnavailable):
        tools.build_host(put(tmp_path / "native/p.cpp", "1"))
    assert list((caches.ROOT_CACHE / str(caller.uid)).iterdir()) == []


@as_root
def test_a_build_that_the_caller_put_there_is_not_used(cache: Cache, caller: Owner) -> None:
    theirs = Cache(caller)
    path = theirs.make("x.so", compiled())
    assert path.stat().st_uid == 0
    os.chown(path, caller.uid, caller.gid)
    with pytest.raises(CaptureUnavailable, match="can be written by other users"):
        theirs.find("x.so")


@as_root
def test_compilers_are_asked_as_the_caller(caller: Owner, tmp_path: Path) -> None:
    says = put(tmp_path / "bin/nvcc", '#!/bin/sh\necho "release 13.$(id -u), V1"\n', runs=True)
    (found,) = find_parts({"PATH": str(says.parent)}, [], tmp_path, caller).nvcc
    assert found.version == (13, caller.uid)


@as_root
def test_root_runs_no_compiler_that_others_can_write(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    says = put(tmp_path / "bin/nvcc", f'#!/bin/sh\ntouch {ran}\necho "release 13.0, V1"\n', runs=True)
    os.chown(says, OTHER, OTHER)
    parts = find_parts({"PATH": str(says.parent)}, [], tmp_path, ME)
    with pytest.raises(CaptureUnavailable, match=r"not run as root: .* written by other users") as refusal:
        chain(nvcc=parts.nvcc).nvcc()
    assert refusal.value.hint.startswith("Use sudo as the user")
    assert not ran.exists()


@as_root
def test_root_takes_a_compiler_of_its_own_before_one_of_others(tmp_path: Path) -> None:
    theirs, ours = nvcc(tmp_path / "theirs/nvcc", "13.5"), nvcc(tmp_path / "opt/cuda/bin/nvcc", "13.0")
    os.chown(theirs, OTHER, OTHER)
    parts = find_parts({"PATH": str(theirs.parent)}, [], tmp_path, ME)
    assert chain(nvcc=parts.nvcc).nvcc().path == ours


@as_root
def test_root_links_no_library_that_others_can_write(tmp_path: Path) -> None:
    library = put(tmp_path / "libcupti.so.13")
    os.chown(library, OTHER, OTHER)
    tools = chain(gxx=[Compiler(Path("/g++"), (12, 2), "")], cupti=[Part((tmp_path,), library, (13, 0))])
    with pytest.raises(CaptureUnavailable, match=f"{library} can be written by other users"):
        tools.build_host(put(tmp_path / "a.cpp"), ["cupti"])


def test_a_folder_that_this_user_may_not_look_into_has_no_build(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    assert cache.find("made.so") is None
