"""Launches and kernels of warps, each stored once: a launch may have many batches, a recording many
launches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Any, Final

from tracepipe.event.columns import NONE, Bools, Int32s, distinct
from tracepipe.event.model import Record
from tracepipe.event.warps import PlacedWarps
from tracepipe.kernel_names import short_kernel_name
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.eager import picked, where
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.numbered import Numbered

WARP_LANES: Final = 32
LARGEST: Final = (1 << 63) - 1
_SIZES: Final = ("grid", "block")
# A kernel: bits of the known values, its name, GPU, process, grid and block.
_KERNEL: Final = Struct("<Bi2q6q")
_OF_KERNEL: Final = [("known", "u1"), ("name", "<i4"), ("gpu", "<i8"), ("pid", "<i8"),
                     ("grid", "<i8", 3), ("block", "<i8", 3)]  # fmt: skip
# A launch: bits of the known values, its kernel, and its own values.
_LAUNCH: Final = Struct("<BiQ3q")
_OF_LAUNCH: Final = [("known", "u1"), ("kernel", "<i4"), ("launch", "<u8"), ("stream", "<i8"),
                     ("warps_per_block", "<i8"), ("bound_ns", "<i8")]  # fmt: skip
# The number of kernels that are cached.
_CACHED_MAX: Final = 256
OF_KERNEL: Final = ("name", "gpu", "pid", *_SIZES)
OF_LAUNCH: Final = ("launch", "stream", "warps_per_block", "bound_ns")


class LaunchTable:
    """Launches and their kernels by number. A kernel is a name, GPU, process, grid and block."""

    def __init__(self) -> None:
        self._names = Numbered()
        self._kernels, self._launches = Numbered(_KERNEL.size), Numbered(_LAUNCH.size)
        self._met: dict[tuple[Any, ...], tuple[int, int | None]] = {}
        """Key of a kernel → its number, and how many warps its blocks have."""

    def __len__(self) -> int:
        return len(self._launches)

    def number(self, warps: PlacedWarps, bound_ns: int | None) -> int:
        """The number of the launch of a batch of warps."""
        launched = warps.launched
        kernel, per_block = self._kernel(launched)
        own = [_fitting(launched.get("stream")), per_block, bound_ns]
        launch = launched.get("launch")
        known = _known(launch, *own)
        return self._launches.number(_LAUNCH.pack(known, kernel, launch or 0, *(value or 0 for value in own)))

    def _kernel(self, launched: Record) -> tuple[int, int | None]:
        """The number of a launch's kernel, and how many warps its blocks have."""
        sizes = [launched.get(name) for name in _SIZES]
        of = (
            *(launched.get(name) for name in ("name", "gpu", "pid")),
            *(size and tuple(size) for size in sizes),
        )
        if (earlier := self._met.get(of)) is not None:
            return earlier
        values = [_fitting(launched.get(name)) for name in ("gpu", "pid")]
        name, block = launched.get("name"), sizes[1]
        name = None if name is None else short_kernel_name(name)
        known = _known(name, *values, *sizes)
        text = NONE if name is None else self._names.number(name.encode("utf-8", "surrogatepass"))
        flat = [min(size, LARGEST) for three in sizes for size in three or (0, 0, 0)]
        kernel = self._kernels.number(_KERNEL.pack(known, text, *(value or 0 for value in values), *flat))
        per_block = _fitting(-(-block[0] * block[1] * block[2] // WARP_LANES)) if block else None
        if len(self._met) >= _CACHED_MAX:
            self._met.clear()
        self._met[of] = kernel, per_block
        return kernel, per_block

    def put_away(self) -> None:
        """Move the launches to files, where there are many. No launch may get a new number afterwards. Raises
        OutputError.
        """
        for one in (self._names, self._kernels, self._launches):
            one.put_away()

    def _rows(self, name: str) -> tuple[Any, int]:
        """The table with a column, and the number of the column's bit in `known`."""
        if name in OF_KERNEL:
            return np.frombuffer(self._kernels.data, np.dtype(_OF_KERNEL)), OF_KERNEL.index(name)
        return np.frombuffer(self._launches.data, np.dtype(_OF_LAUNCH)), OF_LAUNCH.index(name)

    @property
    def kernel_of(self) -> Int32s:
        """The number of each launch's kernel. Shape `(launches,)`."""
        numbers: Int32s = np.frombuffer(self._launches.data, np.dtype(_OF_LAUNCH))["kernel"]
        return numbers

    def column(self, name: str, launches: Ints) -> tuple[Any, Any]:
        """A column of some launches (names as numbers), and flags for known values. Shapes `(n,)`."""
        rows, place = self._rows(name)
        places = self.kernel_of[launches] if name in OF_KERNEL else launches
        return rows[name][places], rows["known"][places] >> place & 1 != 0

    def series(self, name: str, launches: Ints) -> pl.Series:
        """A column of a frame, for rows of these launches; null where a value is not known."""
        values, known = self.column(name, launches)
        if name != "name":
            return where(known, pl.Series(name, values))
        numbers, places = np.unique(values, return_inverse=True)
        texts = [None if number == NONE else self.name(number) for number in numbers.tolist()]
        return picked(pl.Series(name, texts, dtype=pl.String), places)

    def text_bytes(self, launches: Ints) -> int:
        """How many bytes the names of some launches' kernels have, each name counted once."""
        numbers = distinct(self.column("name", launches)[0])
        return int(self._names.sizes(numbers[numbers != NONE]).sum())

    def name(self, number: int) -> str:
        """The name with a number; invalid Unicode is replaced."""
        return self._names[number].decode("utf-8", "replace")

    def flags_by_names(self, matches: Callable[[str], bool]) -> Bools:
        """Flags the launches whose kernels have matching names. Shape `(launches,)`."""
        names = range(len(self._names))
        of_name = np.fromiter(chain((matches(self.name(number)) for number in names), (False,)), np.bool_)
        rows, _ = self._rows("name")
        of_launch: Bools = of_name[rows["name"]][self.kernel_of]
        return of_launch

    def kernels(self) -> list[Record]:
        """The kernels by number, as records of `OF_KERNEL`; None where a value is not known."""
        rows, _ = self._rows("name")
        found = []
        for row in rows:
            values = (
                None if row["name"] == NONE else self.name(row["name"]),
                *(row[of].tolist() for of in OF_KERNEL[1:]),
            )
            known = [value if row["known"] >> at & 1 else None for at, value in enumerate(values)]
            found.append(dict(zip(OF_KERNEL, known, strict=True)))
        return found


def _known(*values: object) -> int:
    """A bit for each value that is not None."""
    return sum(1 << at for at, value in enumerate(values) if value is not None)


def _fitting(value: int | None) -> int | None:
    """A number that fits a column, else None."""
    return value if value is not None and value <= LARGEST else None
