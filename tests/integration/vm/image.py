"""Builds what the virtual machine boots, from the distribution's packages and this repository alone.

    build/vm/root             Python, BCC, bpftrace and what they need, unpacked
    build/vm/packages.cpio    the same as the kernel unpacks it at boot
    build/vm/linux-image-…/
        kernel                the kernel's image and headers, unpacked
        own                   the module, the stand-in, the package: made anew each time, like
        initramfs.cpio        all that the machine has

Neither root nor a mount is needed. The kernel takes archives in a row for one.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build/vm"
HERE = Path(__file__).parent

PROGRAMS = ("python3", "python3-bpfcc", "bpftrace", "busybox-static")
# What those depend on for their installation only: here they are unpacked.
NOT_NEEDED = re.compile(
    r"perl|libperl|dpkg|tar$|install-info|mailcap|media-types|mime-support|readline-common"
)


class Unobtainable(Exception):
    """A tool or package that this machine cannot have; the text says which."""


@dataclass(frozen=True)
class Image:
    """What to boot."""

    vmlinuz: Path
    initramfs: Path


def build(package: str) -> Image:
    """The image with the kernel of `package`, from the cache as far as it can be. Raises Unobtainable.

    Kernels for the cloud have kprobes, serial ports and the initramfs built in.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "gcc", "make"):
        if shutil.which(tool) is None:
            raise Unobtainable(f"there is no {tool}")
    folder = CACHE / package
    kernel = _depends(package)[0]
    headers = kernel.replace("image", "headers")
    release = kernel.removeprefix("linux-image-")
    _unpack([kernel, headers, *_depends(headers)], folder / "kernel")
    packages = CACHE / "packages.cpio"
    if _unpack(_closure(PROGRAMS), CACHE / "root") or not packages.exists():
        _compile(CACHE / "root", CACHE / "root/usr/lib")
        partial = packages.with_suffix(".partial")
        with partial.open("wb") as archive:
            write_archive(archive, CACHE / "root")
        partial.rename(packages)
    own = _own_files(folder, release)
    initramfs = folder / "initramfs.cpio"
    with initramfs.open("wb") as archive:
        with packages.open("rb") as start:
            shutil.copyfileobj(start, archive, 1 << 20)
        write_archive(archive, own)
    return Image(folder / f"kernel/boot/vmlinuz-{release}", initramfs)


def _own_files(folder: Path, release: str) -> Path:
    """The folder of what is this repository's: /init, and /tracepipe with all that it runs."""
    own = folder / "own"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(
        ROOT / "tracepipe", own / "tracepipe/tracepipe", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(HERE / "capture_in_guest.py", own / "tracepipe")
    shutil.copy(HERE / "init", own)
    _make("-C", str(ROOT / "fixtures/standin"), f"BUILD={own / 'tracepipe'}")
    headers = folder / f"kernel/usr/src/linux-headers-{release}"
    # As installed it includes an absolute path.
    common = headers.with_name(re.sub(r"-cloud-amd64$", "-common", headers.name))
    (headers / "Makefile").write_text(f"include {common}/Makefile\n")
    module = folder / "module"
    _make("-C", str(ROOT / "fixtures/nvidia-module"), f"KERNEL={headers}", f"BUILD={module}")
    shutil.copy(module / "nvidia.ko", own / "tracepipe")
    _compile(CACHE / "root", own / "tracepipe")
    return own


def _compile(root: Path, folder: Path) -> None:
    """Compile the modules of Python in a folder, by the guest's own: an emulated processor takes minutes."""
    (loader,) = (root / "lib").glob("*-linux-gnu/ld-linux-*")
    libraries = f"{loader.parent}:{root / 'usr/lib' / loader.parent.name}"
    command = [str(loader), "--library-path", libraries, str(root / "usr/bin/python3"), "-S"]
    # The archive has no times of files, by which a compiled one would be found to be old.
    command += ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHOME": str(root / "usr")})


def _make(*arguments: str) -> None:
    subprocess.run(["make", "-s", *arguments], check=True)


def _depends(package: str) -> list[str]:
    """The kernel's packages that `package` directly depends on. Raises Unobtainable if there are none."""
    found = re.findall(r"^ +Depends: (linux-[\w.+-]+)$", _apt_cache("depends", package), re.MULTILINE)
    if not found:
        raise Unobtainable(f"apt knows no package {package} (Debian 12 has it; apt-get update?)")
    return found


def _closure(packages: tuple[str, ...]) -> list[str]:
    options = [
        f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    ]
    listing = _apt_cache("depends", "--recurse", *options, *packages)
    names = set(re.findall(r"^[\w.+-]+$", listing, re.MULTILINE))
    return sorted(name for name in names if not NOT_NEEDED.match(name))


def _apt_cache(*arguments: str) -> str:
    result = subprocess.run(["apt-cache", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise Unobtainable(result.stderr.strip().splitlines()[0])
    return result.stdout


def _unpack(packages: list[str], folder: Path) -> bool:
    """Download `packages` and unpack them into `folder`; False if they are there already."""
    policy = _apt_cache("policy", *packages)
    versions = re.findall(r"^([\w.+-]+):\n.*\n  Candidate: (\S+)", policy, re.MULTILINE)
    wanted = "\n".join(sorted(f"{name} {version}" for name, version in versions))
    stamp = folder.with_suffix(".versions")
    if folder.is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return False
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as downloads:
        download = subprocess.run(
            ["apt-get", "download", "-q", *packages],
            cwd=downloads,
            capture_output=True,
            text=True,
            check=False,
        )
        if download.returncode:
            raise Unobtainable(f"packages cannot be downloaded: {download.stderr.strip().splitlines()[0]}")
        for package in sorted(Path(downloads).iterdir()):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    for unread in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/i18n"):
        shutil.rmtree(folder / unread, ignore_errors=True)
    stamp.write_text(wanted)
    return True


def _below(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        yield from (Path(name) / entry for entry in sorted(folders + files))


def write_archive(out: BinaryIO, folder: Path) -> None:
    """The files below `folder` in cpio's format "newc", all root's.

    Documentation/driver-api/early-userspace/buffer-format.rst of the kernel: a header of fourteen fields, the
    name, the content, each filled up to four bytes; hexadecimal digits, eight a field:

        070701 │ inode │ mode │ uid │ gid │ links │ time │ size │ device ×4 │ name size │ check
    """

    def entry(name: str, mode: int, content: bytes) -> None:
        path = name.encode() + b"\0"
        fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        header = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + path
        out.write(header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4))

    for path in _below(folder):
        mode = path.lstat().st_mode
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            entry(name, mode, os.fsencode(path.readlink()))
        else:
            entry(name, mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    entry("TRAILER!!!", 0, b"")
