/* SPDX-License-Identifier: MIT */
/* A radix sort of times. The times that are sorted here are within some milliseconds: three bytes of them
 * differ. */
#include "order.h"
#include "tables.h"

#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

typedef struct {
    uint64_t key;
    int64_t place;
} tp_keyed;

TP_EXPORT int tp_order(const int64_t *keys, int64_t count, int64_t *order)
{
    int64_t least = count ? keys[0] : 0, most = least, sorted = 1;
    for (int64_t i = 0; i < count; i++) {
        order[i] = i;
        sorted &= i == 0 || keys[i - 1] <= keys[i];
        least = keys[i] < least ? keys[i] : least;
        most = keys[i] > most ? keys[i] : most;
    }
    if (sorted)
        return 0;
    tp_keyed *both = malloc((size_t)count * 2 * sizeof *both), *from = both, *to = both + count;
    int64_t *starts = malloc((DIGITS + 1) * sizeof *starts);
    if (!both || !starts) {
        free(both);
        free(starts);
        return TP_NO_MEMORY;
    }
    uint64_t span = (uint64_t)most - (uint64_t)least;
    for (int64_t i = 0; i < count; i++)
        from[i] = (tp_keyed){(uint64_t)keys[i] - (uint64_t)least, i};
    for (int shift = 0; shift < 64 && span >> shift; shift += DIGIT_BITS) {
        memset(starts, 0, (DIGITS + 1) * sizeof *starts);
        for (int64_t i = 0; i < count; i++)
            starts[(from[i].key >> shift & (DIGITS - 1)) + 1]++;
        for (int d = 0; d < DIGITS; d++)
            starts[d + 1] += starts[d];
        for (int64_t i = 0; i < count; i++)
            to[starts[from[i].key >> shift & (DIGITS - 1)]++] = from[i];
        tp_keyed *swap = from;
        from = to;
        to = swap;
    }
    for (int64_t i = 0; i < count; i++)
        order[i] = from[i].place;
    free(both);
    free(starts);
    return 0;
}
