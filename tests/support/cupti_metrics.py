"""What NVIDIA's CUPTI takes of the counters' metrics on a chip, which needs no GPU: it only plans.

python -m tests.support.cupti_metrics libcupti.so.13 GH100      a line for each counter: its metric, or -
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_void_p
from pathlib import Path

from tracepipe.tracer.gpu.engines.counters import COUNTERS, MEMORY_PEAK

_PM_SAMPLING = 1


class _Params(ctypes.Structure):
    """What all of these begin with; see cupti_profiler_host.h."""

    _fields_ = (("size", c_size_t), ("private", c_void_p))


class _Initialize(_Params):
    _fields_ = (("type", c_int), ("chip", c_char_p), ("available", c_void_p), ("host", c_void_p))


class _Deinitialize(_Params):
    _fields_ = (("host", c_void_p),)


class _AddMetrics(_Params):
    _fields_ = (("host", c_void_p), ("names", POINTER(c_char_p)), ("count", c_size_t))


class _ImageSize(_Params):
    _fields_ = (("host", c_void_p), ("image_size", c_size_t))


class _Image(_Params):
    _fields_ = (("host", c_void_p), ("image_size", c_size_t), ("image", POINTER(c_uint8)))


class _Passes(_Params):
    _fields_ = (("image_size", c_size_t), ("image", POINTER(c_uint8)), ("passes", c_size_t))


class Chip:
    """A chip as CUPTI plans for it."""

    def __init__(self, library: str, chip: str) -> None:
        # CUPTI opens it by its bare name, which is found where it is loaded already.
        self._beside = ctypes.CDLL(str(Path(library).with_name("libnvperf_host.so")))
        self._cupti, self._chip = ctypes.CDLL(library), chip

    def passes(self, names: list[str]) -> int:
        """In how many passes the metrics can be counted; 0 where CUPTI refuses them."""
        host = self._call("Initialize", _Initialize(type=_PM_SAMPLING, chip=self._chip.encode())).host
        try:
            some = (c_char_p * len(names))(*(name.encode() for name in names))
            self._call("ConfigAddMetrics", _AddMetrics(host=host, names=some, count=len(names)))
            size = self._call("GetConfigImageSize", _ImageSize(host=host)).image_size
            image = (c_uint8 * size)()
            self._call("GetConfigImage", _Image(host=host, image_size=size, image=image))
            return int(self._call("GetNumOfPasses", _Passes(image_size=size, image=image)).passes)
        except ValueError:
            return 0
        finally:
            self._call("Deinitialize", _Deinitialize(host=host))

    def _call(self, name: str, params: _Params) -> _Params:
        params.size = ctypes.sizeof(params)
        if self._cupti[f"cuptiProfilerHost{name}"](ctypes.byref(params)):
            raise ValueError(name)
        return params


def main() -> None:
    """Choose as the sampler does."""
    chip = Chip(*sys.argv[1:])
    taken: list[str] = []
    for counter in COUNTERS:
        fits = [one for one in counter.metrics if chip.passes([*taken, one]) == 1]
        taken += fits[:1]
        peak = counter.metrics[fits[0]] if fits else ""
        known = peak in ("", MEMORY_PEAK) or chip.passes([peak]) > 0
        print(counter.name, fits[0] if fits else "-", "" if known else "without a peak", sep="\t")


if __name__ == "__main__":
    main()
