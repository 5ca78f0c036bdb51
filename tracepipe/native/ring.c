/* SPDX-License-Identifier: MIT */
/* A BPF ring buffer that two or more threads empty; tracer/bpf/maps.py draws its memory. One thread takes
 * the records. The other moves them to a file if they are not taken in time, and does not wait for the
 * interpreter:
 *
 *     position   0 ────────── taken ────── consumer ────── producer
 *                             in the file   in the ring
 *
 * Neither waits for the other. A thread that has copied records moves the consumer's position over them. A
 * thread that finds the position moved discards its copy. The place of a record in the file is its position,
 * so records that were taken are a hole there.
 */
#include <errno.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tables.h"

#define RECORD_BYTES 64
#define FLAGS_AT 24          /* bits of a record's length that are 0 when the record is complete */
#define STEP_BYTES (1 << 18) /* is moved before the kernel gets its room back */
#define LITTLE 64            /* with less than 1/64 of the ring in use, it is looked at less often */
#define MUCH 16              /* from 1/16 of the ring in use on, records are moved */
#define MOVED (-1)

typedef struct {
    uint64_t *consumer, *producer; /* positions, each at the start of a page */
    const uint8_t *data;           /* from the page after the producer's, mapped twice in a row */
    int64_t data_bytes, page_bytes;
    int64_t step_bytes; /* that are moved in one step */
    uint64_t first;     /* position of the first record */
    int file;
    uint8_t is_over, is_moved; /* set by one of the threads that follow it */
} tp_ring;

static size_t mapped_bytes(const tp_ring *r)
{
    return (size_t)(r->page_bytes + 2 * r->data_bytes);
}

/* Returns the ring of a map, whose data is a power of two of bytes, with an empty file; NULL where it cannot
 * be mapped. */
TP_EXPORT tp_ring *tp_ring_new(int map, int64_t data_bytes, int file)
{
    tp_ring *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    *r = (tp_ring){.data_bytes = data_bytes, .page_bytes = sysconf(_SC_PAGESIZE), .file = file};
    r->step_bytes = data_bytes < STEP_BYTES ? data_bytes : STEP_BYTES;
    r->consumer = mmap(NULL, (size_t)r->page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, map, 0);
    r->producer = mmap(NULL, mapped_bytes(r), PROT_READ, MAP_SHARED, map, r->page_bytes);
    if (r->consumer != MAP_FAILED && r->producer != MAP_FAILED) {
        r->data = (const uint8_t *)r->producer + r->page_bytes;
        r->first = *r->consumer;
        return r;
    }
    if (r->consumer != MAP_FAILED)
        munmap(r->consumer, (size_t)r->page_bytes);
    if (r->producer != MAP_FAILED)
        munmap(r->producer, mapped_bytes(r));
    free(r);
    return NULL;
}

TP_EXPORT void tp_ring_free(tp_ring *r)
{
    munmap(r->consumer, (size_t)r->page_bytes);
    munmap(r->producer, mapped_bytes(r));
    free(r);
}

static uint64_t position(const tp_ring *r)
{
    return __atomic_load_n(r->consumer, __ATOMIC_ACQUIRE);
}

/* How many bytes have left the ring. */
TP_EXPORT int64_t tp_ring_left(const tp_ring *r)
{
    return (int64_t)(position(r) - r->first);
}

/* Bytes from there to the producer's position. They are more than the ring has where another thread has taken
 * them. */
static int64_t waiting_from(const tp_ring *r, uint64_t from)
{
    return (int64_t)(__atomic_load_n(r->producer, __ATOMIC_ACQUIRE) - from);
}

/* How many bytes were written to the ring. */
TP_EXPORT int64_t tp_ring_made(const tp_ring *r)
{
    return waiting_from(r, r->first);
}

static const uint8_t *at_position(const tp_ring *r, uint64_t from)
{
    return r->data + (from & (uint64_t)(r->data_bytes - 1));
}

/* The bytes of complete records at the start of `data`, up to the first that is still being written. */
static int64_t ready(const uint8_t *data, int64_t size)
{
    int64_t at = 0;
    while (at < size && !(__atomic_load_n((const uint32_t *)(data + at), __ATOMIC_ACQUIRE) >> FLAGS_AT))
        at += RECORD_BYTES;
    return at;
}

/* Moves the consumer's position over records that were copied, unless another thread has done that. */
static int leaves(tp_ring *r, uint64_t from, int64_t size)
{
    return __atomic_compare_exchange_n(r->consumer, &from, from + (uint64_t)size, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Copies complete records, at most `room` bytes, after the `taken` bytes so far. Returns how many bytes it
 * copied, or MOVED where the records are in the file. */
TP_EXPORT int64_t tp_ring_copy(const tp_ring *r, int64_t taken, uint8_t *to, int64_t room)
{
    uint64_t from = r->first + (uint64_t)taken;
    int64_t size = waiting_from(r, from);
    if (position(r) != from)
        return MOVED;
    size = ready(at_position(r, from), size < room ? size : room);
    memcpy(to, at_position(r, from), (size_t)size);
    return size;
}

/* Gives the room of records that were copied back to the kernel. Returns 0 where they were moved meanwhile:
 * the copy must be discarded. */
TP_EXPORT int tp_ring_leave(tp_ring *r, int64_t taken, int64_t size)
{
    return leaves(r, r->first + (uint64_t)taken, size);
}

/* Writes all, or what the disk has room for. Returns how many bytes of complete records it wrote. */
static int64_t put(const tp_ring *r, const uint8_t *data, int64_t size, int64_t offset)
{
    int64_t done = 0;
    while (done < size) {
        ssize_t written = pwrite(r->file, data + done, (size_t)(size - done), offset + done);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return done / RECORD_BYTES * RECORD_BYTES;
        done += written;
    }
    return done;
}

/* Moves all complete records of the ring to the file and returns whether the file took them. One thread does
 * this at a time: otherwise it could write what the kernel has put in place of records that another thread
 * moved meanwhile. */
static int move(tp_ring *r)
{
    uint64_t from = position(r);
    int64_t size, end = (int64_t)from + waiting_from(r, from);
    while ((size = end - (int64_t)from) > 0) {
        int64_t step = ready(at_position(r, from), size < r->step_bytes ? size : r->step_bytes);
        if (!step)
            break;
        int64_t put_bytes = put(r, at_position(r, from), step, (int64_t)(from - r->first));
        leaves(r, from, put_bytes);
        if (put_bytes < step)
            return 0;
        from = position(r);
    }
    return 1;
}

static void wait_ns(int64_t time_ns)
{
    nanosleep(&(struct timespec){.tv_sec = time_ns / 1000000000, .tv_nsec = time_ns % 1000000000}, NULL);
}

/* Moves records to the file while the ring is filling, until `tp_ring_end`. Of several threads, the first to
 * look moves them. The ring is looked at often while it fills. A file that takes nothing is tried again, as
 * its disk may have room later. */
TP_EXPORT void tp_ring_follow(tp_ring *r, int64_t short_ns, int64_t long_ns)
{
    int64_t time_ns = short_ns;
    while (!__atomic_load_n(&r->is_over, __ATOMIC_ACQUIRE)) {
        wait_ns(time_ns);
        int64_t size = waiting_from(r, position(r));
        int moves = size * MUCH > r->data_bytes && !__atomic_exchange_n(&r->is_moved, 1, __ATOMIC_ACQUIRE);
        int is_full = moves && !move(r);
        if (moves)
            __atomic_store_n(&r->is_moved, 0, __ATOMIC_RELEASE);
        if (is_full)
            time_ns = long_ns;
        else
            time_ns = size * LITTLE > r->data_bytes ? short_ns : 2 * time_ns < long_ns ? 2 * time_ns : long_ns;
    }
}

/* Makes `tp_ring_follow` return after its current step. */
TP_EXPORT void tp_ring_end(tp_ring *r)
{
    __atomic_store_n(&r->is_over, 1, __ATOMIC_RELEASE);
}
