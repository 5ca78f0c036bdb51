/* SPDX-License-Identifier: MIT */
/* Warps on the hardware slots of a GPU, and how many of them run at a time.
 *
 * Kernels in flight at one time take turns on a slot, and their batches come one after the other: a warp may
 * belong before one that has its place already. layout/warps.py has the same in Python.
 */
#include <stdint.h>

#include "tables.h"

/* A radix sort of times. The times that are sorted here are within some milliseconds: three bytes of them
 * differ. */

#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

typedef struct {
    uint64_t key;
    int64_t place;
} tp_keyed;

/* Puts the places of `keys` into `order`, sorted by key and stable. Returns 0 or TP_NO_MEMORY. */
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

/* So many stays on a slot are remembered for those of batches that overlap theirs. */
#define STAYS_MAX 1024

enum { FATE_DRAWN, FATE_BESIDE, FATE_OPEN };

typedef struct {
    int64_t begin, end;
} tp_stay;

typedef struct {
    tp_stay *stays;
    int64_t count, room, forgotten;
} tp_slot_row;

typedef struct {
    tp_slot_row *rows;
    int64_t count, room;
} tp_warps;

TP_EXPORT tp_warps *tp_warps_new(void)
{
    return calloc(1, sizeof(tp_warps));
}

TP_EXPORT void tp_warps_free(tp_warps *w)
{
    for (int64_t i = 0; w && i < w->count; i++)
        free(w->rows[i].stays);
    if (w)
        free(w->rows);
    free(w);
}

/* Rows are numbered from 0 on; there are `count` now. */
static int make_rows(tp_warps *w, int64_t count)
{
    if (count && TP_GROW(w->rows, w->room, count - 1))
        return TP_NO_MEMORY;
    for (; w->count < count; w->count++)
        w->rows[w->count] = (tp_slot_row){0, 0, 0, INT64_MIN};
    return 0;
}

static int insert(tp_slot_row *row, int64_t at, int64_t begin, int64_t end)
{
    if (TP_GROW(row->stays, row->room, row->count))
        return TP_NO_MEMORY;
    memmove(row->stays + at + 1, row->stays + at, (size_t)(row->count - at) * sizeof *row->stays);
    row->stays[at] = (tp_stay){begin, end};
    row->count++;
    return 1;
}

/* Takes a row over that time: 1 done, 0 it is not free. No batch begins before `base` any more. */
static int take(tp_slot_row *row, int64_t base, int64_t begin, int64_t end)
{
    if (!row->count)
        return insert(row, 0, begin, end);
    int64_t last = row->stays[row->count - 1].end;
    if (begin >= last) {
        if (last <= base || row->count >= STAYS_MAX) {
            row->forgotten = last;
            row->count = 0;
        }
        return insert(row, row->count, begin, end);
    }
    int64_t at = 0, above = row->count;
    while (at < above) {
        int64_t half = (at + above) / 2;
        const tp_stay *s = &row->stays[half];
        if (s->begin < begin || (s->begin == begin && s->end < end))
            at = half + 1;
        else
            above = half;
    }
    int64_t free_at = at ? row->stays[at - 1].end : row->forgotten;
    /* Not where it ends as the next begins: what is drawn first comes first in a stable sort. */
    if (begin < free_at || at == row->count || end >= row->stays[at].begin)
        return 0;
    return insert(row, at, begin, end);
}

/* The fate of each warp of some batches, in the order of entries, given as begin and stay (below 0: it has not
 * left) on a row. `rows` are how many rows there are, `sizes` how many warps each batch has, and `bases` before
 * when no warp of it, or of a later one, begins. */
TP_EXPORT int tp_warps_take(tp_warps *w, int64_t rows, int64_t batches, const int64_t *sizes, const int64_t *bases,
                            const int64_t *begin, const int64_t *stay, const int32_t *row, uint8_t *fate)
{
    if (make_rows(w, rows))
        return TP_NO_MEMORY;
    for (int64_t batch = 0, i = 0, end = 0; batch < batches; batch++) {
        for (end += sizes[batch]; i < end; i++) {
            if (stay[i] < 0) {
                fate[i] = FATE_OPEN;
                continue;
            }
            if (row[i] < 0 || row[i] >= rows)
                return TP_NO_MEMORY;
            int taken = take(&w->rows[row[i]], bases[batch], begin[i], tp_after(begin[i], stay[i]));
            if (taken < 0)
                return TP_NO_MEMORY;
            fate[i] = taken ? FATE_DRAWN : FATE_BESIDE;
        }
    }
    return 0;
}

/* Puts the changes before a time in order, and says how many warps run after each time: in the last change of
 * that time, -1 in the others. `running` is how many did before; how many changes there are before that time. */
TP_EXPORT int64_t tp_warps_running(int64_t count, const int64_t *ts, const int8_t *delta, int64_t before,
                                   int64_t *order, int64_t *value, int64_t *running)
{
    if (tp_order(ts, count, order))
        return TP_NO_MEMORY;
    int64_t change = 0, i = 0;
    for (; i < count && ts[order[i]] < before; i++) {
        change += delta[order[i]];
        value[i] = -1;
        if (i + 1 < count && ts[order[i + 1]] == ts[order[i]])
            continue;
        if (change)
            value[i] = *running += change;
        change = 0;
    }
    return i;
}
