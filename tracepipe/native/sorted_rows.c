/* SPDX-License-Identifier: MIT */
/* Sorts rows by time, any number of them, in limited memory.
 *
 *     rows in memory ── sorted ──▶ a run in the file   ┐
 *                                  a run in the file   ├── merged ──▶ columns, or a longer run
 *                                  …                   ┘
 *
 * At the same time, the lower rank comes first. At the same rank, the longer row comes first, and then the
 * one that was added first. Some kilobytes of each run that is merged are in memory. Texts that are longer
 * are read when their row comes.
 */
#include "sorted_rows.h"

#include <errno.h>
#include <unistd.h>

#define HEAD ((int64_t)sizeof(tp_sorted_row))
#define WRITTEN_BYTES (1 << 18)

typedef struct {
    int64_t ts, dur, place;
    int32_t rank;
} tp_key;

/* A run: where it is in the file, and what of it is in memory. */
typedef struct {
    int64_t at, end; /* of what is not in memory yet */
    uint8_t *data;
    int64_t from, size, room;
    tp_sorted_row row; /* the next one */
} tp_source;

typedef struct {
    int64_t *ts, *rank, *dur, *number, *second_end, *first_end;
    int32_t *first;
} tp_sorted_columns;

struct tp_sorted {
    tp_buffer rows, run; /* those in memory, one after the other, and the same sorted */
    tp_key *keys;
    int64_t keys_room, count, begun;
    int64_t run_rows, run_bytes;
    tp_source *sources;
    int32_t *heap; /* a binary heap of the sources that have a row */
    int64_t sources_count, heap_size;
    int file;
    tp_table firsts;
    tp_buffer first, seconds;
};

/* Frees the memory of rows that were written to a run. */
static void let_go(tp_sorted *s)
{
    free(s->rows.data);
    free(s->keys);
    s->rows = (tp_buffer){0};
    s->keys = 0;
    s->keys_room = s->count = 0;
    if (s->file >= 0) {
        free(s->run.data);
        s->run = (tp_buffer){0};
    }
}

static void end_merging(tp_sorted *s)
{
    for (int64_t i = 0; i < s->sources_count; i++)
        free(s->sources[i].data);
    free(s->sources);
    free(s->heap);
    s->sources = 0;
    s->heap = 0;
    s->sources_count = s->heap_size = 0;
}

TP_EXPORT void tp_sorted_free(tp_sorted *s)
{
    if (!s)
        return;
    end_merging(s);
    tp_table_free(&s->firsts);
    free(s->keys);
    free(s->rows.data);
    free(s->run.data);
    free(s->first.data);
    free(s->seconds.data);
    free(s);
}

/* Returns new rows, which count as full at `run_rows` rows or `run_bytes` bytes. */
TP_EXPORT tp_sorted *tp_sorted_new(uint64_t key, int64_t run_rows, int64_t run_bytes)
{
    tp_sorted *s = calloc(1, sizeof *s);
    if (s && tp_table_init(&s->firsts, key)) {
        tp_sorted_free(s);
        return 0;
    }
    if (s) {
        s->run_rows = run_rows;
        s->run_bytes = run_bytes;
    }
    return s;
}

/* Taking rows ------------------------------------------------------------------------------------------------- */

int tp_sorted_is_full(const tp_sorted *s)
{
    return s->count >= s->run_rows || s->rows.size >= s->run_bytes;
}

tp_buffer *tp_sorted_begin(tp_sorted *s, const void *first, int64_t size)
{
    s->begun = s->rows.size;
    if (tp_reserve(&s->rows, HEAD + size))
        return 0;
    s->rows.size += HEAD;
    tp_append(&s->rows, first, size);
    return &s->rows;
}

void tp_sorted_leave(tp_sorted *s)
{
    s->rows.size = s->begun;
}

int tp_sorted_end(tp_sorted *s, tp_sorted_row row)
{
    if (TP_GROW(s->keys, s->keys_room, s->count)) {
        tp_sorted_leave(s);
        return TP_NO_MEMORY;
    }
    row.second = (int32_t)(s->rows.size - s->begun - HEAD - row.first);
    memcpy(s->rows.data + s->begun, &row, sizeof row);
    s->keys[s->count++] = (tp_key){row.ts, row.dur, s->begun, row.rank};
    return 0;
}

/* Adds a row. Returns whether the rows are full then, or TP_NO_MEMORY. */
TP_EXPORT int tp_sorted_add(tp_sorted *s, int64_t ts, int rank, int64_t dur, int64_t number, const uint8_t *first,
                            int64_t first_size, const uint8_t *second, int64_t second_size)
{
    tp_sorted_row row = {.ts = ts, .dur = dur, .number = number, .rank = rank, .first = (int32_t)first_size};
    if (!tp_sorted_begin(s, first, first_size))
        return TP_NO_MEMORY;
    if (tp_append(&s->rows, second, second_size)) {
        tp_sorted_leave(s);
        return TP_NO_MEMORY;
    }
    return tp_sorted_end(s, row) ? TP_NO_MEMORY : tp_sorted_is_full(s);
}

TP_EXPORT int64_t tp_sorted_count(const tp_sorted *s)
{
    return s->count;
}

/* Runs -------------------------------------------------------------------------------------------------------- */

static int key_is_before(const tp_key *a, const tp_key *b)
{
    if (a->ts != b->ts)
        return a->ts < b->ts;
    return a->rank != b->rank ? a->rank < b->rank : a->dur > b->dur;
}

/* Sorts `count` keys; fast where they are in order already. `room` has space for half of them. */
static void sort(tp_key *keys, int64_t count, tp_key *room)
{
    if (count < 2)
        return;
    int64_t half = count / 2, from = 0, other = half, to = 0;
    sort(keys, half, room);
    sort(keys + half, count - half, room);
    if (!key_is_before(&keys[half], &keys[half - 1]))
        return;
    memcpy(room, keys, (size_t)half * sizeof *keys);
    while (from < half && other < count)
        keys[to++] = key_is_before(&keys[other], &room[from]) ? keys[other++] : room[from++];
    memcpy(keys + to, room + from, (size_t)(half - from) * sizeof *keys);
}

static int write_all(int file, const uint8_t *data, int64_t size, int64_t at)
{
    while (size) {
        ssize_t written = pwrite(file, data, (size_t)size, at);
        if (written < 0 && errno != EINTR)
            return -errno;
        if (written > 0) {
            data += written;
            size -= written;
            at += written;
        }
    }
    return 0;
}

/* Makes a run of the rows in memory: in `file` at `at`, or in memory where `file` is below 0. Returns its
 * size, TP_NO_MEMORY, or a negative errno of the file. */
TP_EXPORT int64_t tp_sorted_run(tp_sorted *s, int file, int64_t at)
{
    tp_key *room = malloc((size_t)(s->count / 2 + 1) * sizeof *room);
    s->run.size = 0;
    if (!room || tp_reserve(&s->run, s->rows.size)) {
        free(room);
        return TP_NO_MEMORY;
    }
    sort(s->keys, s->count, room);
    free(room);
    for (int64_t i = 0; i < s->count; i++) {
        tp_sorted_row row;
        memcpy(&row, s->rows.data + s->keys[i].place, sizeof row);
        tp_append(&s->run, s->rows.data + s->keys[i].place, HEAD + row.first + row.second);
    }
    s->rows.size = s->count = 0;
    int failed = file < 0 ? 0 : write_all(file, s->run.data, s->run.size, at);
    return failed ? failed : s->run.size;
}

/* Reads more of a run, after what is left in memory. Returns 0 or a negative errno. */
static int read_on(tp_source *source, int file)
{
    if (source->from) {
        source->size -= source->from;
        memmove(source->data, source->data + source->from, (size_t)source->size);
        source->from = 0;
    }
    while (source->at < source->end && source->size < source->room) {
        int64_t size = source->room - source->size, left = source->end - source->at;
        ssize_t got = pread(file, source->data + source->size, (size_t)(size < left ? size : left), source->at);
        if (got == 0 || (got < 0 && errno != EINTR))
            return got ? -errno : -EIO;
        if (got > 0) {
            source->size += got;
            source->at += got;
        }
    }
    return 0;
}

/* Appends the next bytes of a run to `to`. Returns 0, TP_NO_MEMORY or a negative errno. */
static int take_bytes(tp_source *source, int file, tp_buffer *to, int64_t size)
{
    if (tp_reserve(to, size))
        return TP_NO_MEMORY;
    while (size) {
        int64_t there = source->size - source->from, some = there < size ? there : size;
        tp_append(to, source->data + source->from, some);
        source->from += some;
        size -= some;
        int failed = size ? read_on(source, file) : 0;
        if (failed)
            return failed;
    }
    return 0;
}

/* Moves to the next row of a run. Returns whether there is one, or a negative errno. */
static int come_to_row(tp_source *source, int file)
{
    if (source->size - source->from < HEAD) {
        int failed = read_on(source, file);
        if (failed)
            return failed;
        if (source->size < HEAD)
            return 0;
    }
    memcpy(&source->row, source->data + source->from, sizeof source->row);
    source->from += HEAD;
    return 1;
}

/* Merging ----------------------------------------------------------------------------------------------------- */

static int is_before(const tp_sorted *s, int32_t one, int32_t other)
{
    const tp_sorted_row *a = &s->sources[one].row, *b = &s->sources[other].row;
    if (a->ts != b->ts)
        return a->ts < b->ts;
    if (a->rank != b->rank)
        return a->rank < b->rank;
    return a->dur != b->dur ? a->dur > b->dur : one < other;
}

/* Moves a source down the heap to its place. */
static void settle(tp_sorted *s, int64_t at)
{
    int32_t moved = s->heap[at];
    for (;;) {
        int64_t below = 2 * at + 1;
        if (below + 1 < s->heap_size && is_before(s, s->heap[below + 1], s->heap[below]))
            below++;
        if (below >= s->heap_size || !is_before(s, s->heap[below], moved))
            break;
        s->heap[at] = s->heap[below];
        at = below;
    }
    s->heap[at] = moved;
}

/* Moves the first source to its next row. Returns 0 or a negative errno. */
static int go_on(tp_sorted *s)
{
    int there = come_to_row(&s->sources[s->heap[0]], s->file);
    if (there < 0)
        return there;
    if (!there)
        s->heap[0] = s->heap[--s->heap_size];
    if (s->heap_size)
        settle(s, 0);
    return 0;
}

/* Reads the first bytes of a source. */
static int open_source(tp_sorted *s, tp_source *source, int64_t bytes)
{
    if (s->file < 0) {
        source->data = s->run.data;
        source->size = s->run.size;
        s->run = (tp_buffer){0};
        return 0;
    }
    source->data = malloc((size_t)bytes);
    source->room = bytes;
    return source->data ? 0 : TP_NO_MEMORY;
}

/* Begins to merge runs of a file, in the order in which they were made, with `bytes` of each in memory; or
 * gives the run in memory, where `file` is below 0. All rows must be in runs. Returns 0, TP_NO_MEMORY or a
 * negative errno. */
TP_EXPORT int tp_sorted_merge(tp_sorted *s, int file, const int64_t *starts, const int64_t *ends, int64_t count,
                              int64_t bytes)
{
    end_merging(s);
    s->file = file;
    let_go(s);
    s->sources = calloc((size_t)count + 1, sizeof *s->sources);
    s->heap = malloc((size_t)(count + 1) * sizeof *s->heap);
    if (!s->sources || !s->heap)
        return TP_NO_MEMORY;
    for (s->sources_count = 0; s->sources_count < count;) {
        tp_source *source = &s->sources[s->sources_count];
        *source = (tp_source){.at = starts[s->sources_count], .end = ends[s->sources_count]};
        if (open_source(s, source, bytes < HEAD ? HEAD : bytes))
            return TP_NO_MEMORY;
        s->sources_count++;
        int there = come_to_row(source, file);
        if (there < 0)
            return there;
        if (there)
            s->heap[s->heap_size++] = (int32_t)s->sources_count - 1;
    }
    for (int64_t at = s->heap_size / 2; at-- > 0;)
        settle(s, at);
    return 0;
}

/* The number of the first text of a source's next row; TP_NO_MEMORY or a negative errno. */
static int64_t first_of(tp_sorted *s, tp_source *source)
{
    int64_t size = source->row.first;
    const uint8_t *text = source->data + source->from;
    if (source->size - source->from >= size) {
        source->from += size;
    } else {
        s->first.size = 0;
        int failed = take_bytes(source, s->file, &s->first, size);
        if (failed)
            return failed;
        text = s->first.data;
    }
    uint64_t hash = tp_hash(text, size, s->firsts.key);
    int64_t number = tp_table_find(&s->firsts, text, size, hash);
    return number >= 0 ? number : tp_table_add(&s->firsts, text, size, hash);
}

/* Puts the next rows into columns, at most `room`, until they have `firsts` different first texts or `bytes`
 * of texts. Returns how many rows, TP_NO_MEMORY or a negative errno. `first` is the place of a text among the
 * different first texts of these rows, each of which ends at `first_end`. `made[0]` is how many of those
 * there are. */
TP_EXPORT int64_t tp_sorted_next(tp_sorted *s, tp_sorted_columns *to, int64_t room, int64_t firsts,
                                 int64_t bytes, int64_t *made)
{
    int64_t count = 0, size = 0, different = 0;
    s->seconds.size = 0;
    tp_table_clear(&s->firsts);
    for (; count < room && different < firsts && size < bytes && s->heap_size; count++) {
        tp_source *source = &s->sources[s->heap[0]];
        int64_t first = first_of(s, source);
        int failed = first < 0 ? (int)first : take_bytes(source, s->file, &s->seconds, source->row.second);
        if (failed)
            return failed;
        different = s->firsts.strings.count;
        size = s->firsts.strings.bytes.size + s->seconds.size;
        to->ts[count] = source->row.ts;
        to->rank[count] = source->row.rank;
        to->dur[count] = source->row.dur;
        to->number[count] = source->row.number;
        to->first[count] = (int32_t)first;
        to->second_end[count] = s->seconds.size;
        if ((failed = go_on(s)))
            return failed;
    }
    made[0] = different;
    for (int64_t i = 0; i < made[0]; i++)
        to->first_end[i] = s->firsts.strings.places[i].at + s->firsts.strings.places[i].size;
    return count;
}

/* Makes one run of those that are merged, at `at` in their file. Returns its size, TP_NO_MEMORY or a negative
 * errno. */
TP_EXPORT int64_t tp_sorted_fold(tp_sorted *s, int64_t at)
{
    int64_t size = 0;
    s->run.size = 0;
    while (s->heap_size) {
        tp_source *source = &s->sources[s->heap[0]];
        int failed = tp_append(&s->run, &source->row, HEAD);
        failed = failed ? failed : take_bytes(source, s->file, &s->run, source->row.first + source->row.second);
        failed = failed ? failed : go_on(s);
        if (!failed && (s->run.size >= WRITTEN_BYTES || !s->heap_size)) {
            failed = write_all(s->file, s->run.data, s->run.size, at + size);
            size += s->run.size;
            s->run.size = 0;
        }
        if (failed)
            return failed;
    }
    return size;
}

/* The texts of the rows that `tp_sorted_next` gave last, one after the other: the different first ones, or
 * the second ones. */
TP_EXPORT int64_t tp_sorted_texts(tp_sorted *s, int second, const uint8_t **texts)
{
    const tp_buffer *of = second ? &s->seconds : &s->firsts.strings.bytes;
    *texts = of->data;
    return of->size;
}
