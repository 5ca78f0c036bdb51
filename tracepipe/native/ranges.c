/* SPDX-License-Identifier: MIT */
/* How the ranges of warps nest. event/warps.py does the same in Python. */
#include "tables.h"

#define OUTER (-1)
#define CROSSING (-2)
#define DEPTH_MAX 64

/* Finds the range around each range, and the begins and ends of those that do not cross another, in their
 * order: twice the range's place, plus 1 for its end. `counts` has how many ranges each warp has, which come
 * in the order of their begins. Returns how many begins and ends there are. */
TP_EXPORT int64_t tp_ranges_nest(int64_t warps, const int64_t *counts, const int64_t *begin, const int64_t *dur,
                                 int32_t *inside, int64_t *steps)
{
    int64_t around[DEPTH_MAX], ends[DEPTH_MAX], made = 0, at = 0;
    for (int64_t warp = 0; warp < warps; warp++) {
        int depth = 0;
        for (int64_t past = at + counts[warp]; at < past; at++) {
            int64_t end = tp_after(begin[at], dur[at]);
            while (depth && ends[depth - 1] <= begin[at])
                steps[made++] = 2 * around[--depth] + 1;
            if ((depth && ends[depth - 1] < end) || depth == DEPTH_MAX) {
                inside[at] = CROSSING;
                continue;
            }
            inside[at] = depth ? (int32_t)around[depth - 1] : OUTER;
            around[depth] = at;
            ends[depth++] = end;
            steps[made++] = 2 * at;
        }
        while (depth)
            steps[made++] = 2 * around[--depth] + 1;
    }
    return made;
}
