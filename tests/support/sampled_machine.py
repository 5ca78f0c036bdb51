"""A machine with two GPUs whose counters can be sampled, by the stand-in for CUPTI in a folder.

    python -m tests.support.sampled_machine FOLDER capture --gpu-counters 1ms -- true

is the command `tracepipe` there; `behaviour`, in the folder, says what the stand-in does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from tracepipe.tracer.gpu.build import cache, toolchain
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, owner, uuid_text
from tracepipe.tracer.gpu.build.toolchain import Part, Parts, Toolchain, find_gxx, find_parts

UUIDS = (uuid_text(b"\0" * 16), uuid_text(b"\x11" * 16))


def sampled_machine(folder: Path, gpus: int = 1) -> Toolchain:
    """What there is to build with and for, where `build_sampling` has made the folder."""
    found = tuple(Gpu("stand-in", "sm_90", uuid, 132) for uuid in UUIDS[:gpus])
    part = Part(find_parts().cupti[0].include, folder / "libcupti.so.13", (13, 0))
    user = owner()
    return Toolchain(
        Driver((13, 0), found), Parts(gxx=find_gxx(os.environ["PATH"], user), cupti=[part]), user
    )


def main() -> None:
    """Run tracepipe on that machine, whose builds are in the folder."""
    from tracepipe import cli

    folder = Path(sys.argv.pop(1))
    machine = sampled_machine(folder, int(os.environ.get("STANDIN_GPUS", "1")))
    with (
        mock.patch.object(toolchain, "this_toolchain", lambda: machine),
        mock.patch.object(cache, "ROOT_CACHE", folder / "cache"),
    ):
        cli.main()


if __name__ == "__main__":
    main()
