"""A histogram of durations with logarithmic buckets: count, sum and maximum are exact, percentiles
within 3%.
"""

from __future__ import annotations

from collections import Counter

_SUB_BITS = 4  # 16 buckets for each power of two: a bucket's middle is within 1/32 of all its values
_SUB = 1 << _SUB_BITS


class Histogram:
    """Counts of durations in ns. Values up to 31 have a bucket each."""

    __slots__ = ("buckets", "count", "max_ns", "total_ns")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = self.total_ns = self.max_ns = 0

    def add(self, durations_ns: list[int]) -> None:
        """Count durations, of which none is negative. As durations repeat, each distinct one is
        placed once.
        """
        if not durations_ns:
            return
        self.count += len(durations_ns)
        self.total_ns += sum(durations_ns)
        self.max_ns = max(self.max_ns, max(durations_ns))
        buckets = self.buckets
        for duration_ns, times in Counter(durations_ns).items():
            bucket = bucket_of(duration_ns)
            buckets[bucket] = buckets.get(bucket, 0) + times

    def copy(self) -> Histogram:
        """A copy, which later additions do not change."""
        copied = Histogram()
        copied.buckets = dict(self.buckets)
        copied.count, copied.total_ns, copied.max_ns = self.count, self.total_ns, self.max_ns
        return copied

    def percentile_ns(self, percent: float) -> int:
        """The duration that `percent` of all do not exceed: the middle of its bucket; 0 if there are none."""
        rank = max(1, -(-self.count * percent // 100))
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                low_ns, high_ns = bounds_ns(bucket)
                return min((low_ns + high_ns - 1) // 2, self.max_ns)
        return 0

    def spread(self, edges_ns: tuple[int, ...]) -> list[int]:
        """How many durations are below the first edge, between each two edges, and from the last edge on.

        Edges must be powers of two, which divide no bucket.
        """
        counts = [0] * (len(edges_ns) + 1)
        for bucket, times in self.buckets.items():
            low_ns = bounds_ns(bucket)[0]
            counts[sum(low_ns >= edge_ns for edge_ns in edges_ns)] += times
        return counts


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration: its leading five bits, and the number of the bits after them."""
    shift = duration_ns.bit_length() - _SUB_BITS - 1
    return (shift << _SUB_BITS) + (duration_ns >> shift) if shift > 0 else duration_ns


def bounds_ns(bucket: int) -> tuple[int, int]:
    """The first duration of a bucket and the first after it."""
    shift = (bucket >> _SUB_BITS) - 1
    if shift <= 0:
        return bucket, bucket + 1
    leading = _SUB + (bucket & (_SUB - 1))
    return leading << shift, (leading + 1) << shift
