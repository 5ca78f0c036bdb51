/* SPDX-License-Identifier: MIT */
/* Finds the records of probes.bpf.c that are needed to know which calls were under way or took long. Calls
 * that began and ended in a chunk are not needed, nor all but the last of a thread's turns on a processor.
 * The records that are left give tracer/records/unrendered.py and spans.py the same results as all of them.
 * tracer/records/record.py draws the layout of a record.
 */
#include "tables.h"

#define RECORD_BYTES 64
#define NONE (-1)
#define ENDED 0x30 /* of a switch's state: the thread will not run again */

enum kind { CALL_ENTER = 1, MORE, CALL_RETURN, SYSCALL_ENTER, SYSCALL_EXIT, SWITCH_OUT, SWITCH_IN, SERVED = 10,
            THREAD_NEW, THREAD_NAME, TEXT, EVENT, THREAD_IDS, WINDOW, THREAD_END, KINDS };
enum role { IGNORED = 1, MOMENTARY = 2, NAMING = 4 }; /* of a function */
#define PARTS (1u << MORE | 1u << TEXT | 1u << SERVED)

typedef struct { /* of a thread, or of a processor where no thread is known: the places of its last records */
    uint64_t key;
    int32_t call, part, syscall, run; /* the newest */
    uint8_t is_used;
    uint8_t has_no_parts;  /* no record of an earlier chunk has parts */
    uint8_t is_in_none;    /* the needed records so far have no open system call */
} tp_teller;

typedef struct {
    const uint8_t *records;
    int32_t *below, *part; /* by call: the call around it, and its newest part; by part: the part before it */
    uint8_t *left_out;
    tp_teller *tellers; /* by a hash of their key */
    int64_t used, room;
    uint32_t kinds;
} tp_sieve;

static uint64_t u64_at(const tp_sieve *s, int64_t place, int at)
{
    uint64_t value;
    memcpy(&value, s->records + place * RECORD_BYTES + at, sizeof value);
    return value;
}

static uint32_t u32_at(const tp_sieve *s, int64_t place, int at)
{
    return (uint32_t)u64_at(s, place, at);
}

static int64_t lasted_ns(const tp_sieve *s, int64_t begin, int64_t end)
{
    return (int64_t)(u64_at(s, end, 8) - u64_at(s, begin, 8));
}

static int64_t slot_of(const tp_sieve *s, uint64_t key)
{
    int64_t slot = (int64_t)(key * 0x9E3779B97F4A7C15u >> 32) & (s->room - 1);
    while (s->tellers[slot].is_used && s->tellers[slot].key != key)
        slot = (slot + 1) & (s->room - 1);
    return slot;
}

static int grow(tp_sieve *s)
{
    tp_sieve grown = *s;
    grown.room = s->room ? 2 * s->room : 64;
    grown.tellers = calloc((size_t)grown.room, sizeof *grown.tellers);
    if (!grown.tellers)
        return TP_NO_MEMORY;
    for (int64_t i = 0; i < s->room; i++)
        if (s->tellers[i].is_used)
            grown.tellers[slot_of(&grown, s->tellers[i].key)] = s->tellers[i];
    free(s->tellers);
    *s = grown;
    return 0;
}

static tp_teller *teller(tp_sieve *s, uint64_t key)
{
    if (2 * s->used >= s->room && grow(s))
        return NULL;
    tp_teller *found = &s->tellers[slot_of(s, key)];
    if (!found->is_used) {
        *found = (tp_teller){key, NONE, NONE, NONE, NONE, 1, !(s->kinds & PARTS), 0};
        s->used++;
    }
    return found;
}

static void leave_out(tp_sieve *s, int32_t place)
{
    if (place != NONE)
        s->left_out[place] = 1;
}

static void leave_out_parts(tp_sieve *s, int32_t part)
{
    for (; part != NONE; part = s->part[part])
        s->left_out[part] = 1;
}

static void enter(tp_sieve *s, tp_teller *t, int32_t place, uint8_t role)
{
    int is_first = !t->has_no_parts; /* it may have parts in an earlier chunk */
    s->part[place] = t->part;
    t->part = NONE;
    t->has_no_parts = 1;
    if (role & MOMENTARY) {
        if (!(role & NAMING) && !is_first) {
            leave_out_parts(s, s->part[place]);
            leave_out(s, place);
        }
    } else if (!is_first) {
        s->below[place] = t->call;
        t->call = place;
    }
}

static void leave(tp_sieve *s, tp_teller *t, int32_t place, uint8_t role, int64_t limit_ns)
{
    uint32_t number = u32_at(s, place, 24);
    int32_t found = t->call, waiting = t->part;
    t->part = NONE;
    while (found != NONE && u32_at(s, found, 24) != number)
        found = s->below[found];
    if (found == NONE) { /* its call is in an earlier chunk, or unknown: it is kept */
        t->call = NONE;
        t->has_no_parts = 1;
        return;
    }
    for (; t->call != found; t->call = s->below[t->call]) { /* their returns were lost */
        leave_out_parts(s, s->part[t->call]);
        leave_out(s, t->call);
    }
    t->call = s->below[found];
    if (role & NAMING || lasted_ns(s, found, place) > limit_ns)
        return;
    leave_out_parts(s, s->part[found]);
    leave_out_parts(s, waiting);
    leave_out(s, found);
    leave_out(s, place);
}

static void enter_syscall(tp_sieve *s, tp_teller *t, int32_t place)
{
    leave_out(s, t->syscall); /* its exit was lost */
    t->syscall = t->is_in_none ? place : NONE;
}

static void leave_syscall(tp_sieve *s, tp_teller *t, int32_t place, const int64_t *limits_ns, int64_t syscalls)
{
    uint32_t number = u32_at(s, place, 24);
    int32_t entered = t->syscall;
    t->syscall = NONE;
    t->is_in_none = 1;
    if (entered == NONE || (number < syscalls && lasted_ns(s, entered, place) > limits_ns[number]))
        return;
    leave_out(s, entered);
    leave_out(s, place);
}

static void forget(tp_teller *t)
{
    *t = (tp_teller){t->key, NONE, NONE, NONE, NONE, 1, 1, 1};
}

static void turn(tp_sieve *s, tp_teller *t, int32_t place, int is_out)
{
    leave_out(s, t->run);
    t->run = place;
    if (is_out && s->records[(int64_t)place * RECORD_BYTES + 32] & ENDED) /* the thread has ended */
        forget(t);
}

static void event(tp_sieve *s, tp_teller *t, int32_t place)
{
    if (t->has_no_parts) {
        leave_out_parts(s, t->part);
        leave_out(s, place);
    }
    t->part = NONE;
    t->has_no_parts = 1;
}

static int look(tp_sieve *s, int32_t place, const uint8_t *roles, const int64_t *limits_ns, int64_t functions,
                const int64_t *syscall_limits_ns, int64_t syscalls)
{
    const uint8_t *record = s->records + (int64_t)place * RECORD_BYTES;
    uint32_t tid = u32_at(s, place, 16), number = u32_at(s, place, 24);
    uint8_t kind = record[28];
    if (kind >= KINDS || !(s->kinds >> kind & 1)) {
        s->left_out[place] = 1;
        return 0;
    }
    if (kind == THREAD_NEW || kind == THREAD_NAME || kind == THREAD_IDS)
        return 0;
    int is_part = PARTS >> kind & 1, is_call = kind == CALL_ENTER || kind == CALL_RETURN;
    uint8_t role = is_call && number < functions ? roles[number] : 0;
    int64_t limit_ns = is_call && number < functions ? limits_ns[number] : INT64_MAX;
    if (role & IGNORED) {
        s->left_out[place] = 1;
        return 0;
    }
    uint64_t key = tid;
    if (!tid && (is_part || kind == EVENT))
        key = (uint64_t)1 << 32 | record[30] | (uint64_t)record[31] << 8; /* its processor */
    tp_teller *t = teller(s, key);
    if (!t)
        return TP_NO_MEMORY;
    if (is_part) {
        s->part[place] = t->part;
        t->part = place;
    } else if (kind == CALL_ENTER) {
        enter(s, t, place, role);
    } else if (kind == CALL_RETURN) {
        leave(s, t, place, role, limit_ns);
    } else if (kind == SYSCALL_EXIT) {
        leave_syscall(s, t, place, syscall_limits_ns, syscalls);
    } else if (kind == SYSCALL_ENTER) {
        enter_syscall(s, t, place);
    } else if (kind == EVENT) {
        event(s, t, place);
    } else if (kind == THREAD_END) {
        forget(t);
    } else {
        turn(s, t, place, kind == SWITCH_OUT);
    }
    return 0;
}

/* Finds the places of the records that are needed, of the kinds whose bit is set, and returns how many they
 * are. `roles` and `limits_ns` are by function, and for system calls: a call that took longer than its limit
 * is needed. */
TP_EXPORT int64_t tp_records_needed(const uint8_t *records, int64_t count, uint32_t kinds, const uint8_t *roles,
                                    const int64_t *limits_ns, int64_t functions, const int64_t *syscall_limits_ns,
                                    int64_t syscalls, int32_t *needed)
{
    tp_sieve s = {.records = records, .kinds = kinds};
    int64_t made = TP_NO_MEMORY, at = 0;
    if (count > INT32_MAX)
        return TP_NO_MEMORY;
    s.below = malloc((size_t)(count + 1) * sizeof *s.below);
    s.part = malloc((size_t)(count + 1) * sizeof *s.part);
    s.left_out = calloc((size_t)(count + 1), 1);
    if (s.below && s.part && s.left_out) {
        while (at < count
               && !look(&s, (int32_t)at, roles, limits_ns, functions, syscall_limits_ns, syscalls))
            at++;
        if (at == count) {
            made = 0;
            for (at = 0; at < count; at++)
                if (!s.left_out[at])
                    needed[made++] = (int32_t)at;
        }
    }
    free(s.below);
    free(s.part);
    free(s.left_out);
    free(s.tellers);
    return made;
}

/* Counts the records of each kind below 32, and those of functions by function. */
TP_EXPORT void tp_records_count(const uint8_t *records, int64_t count, int64_t functions, int64_t *by_kind,
                                int64_t *by_function)
{
    tp_sieve s = {.records = records};
    for (int64_t at = 0; at < count; at++) {
        uint8_t kind = records[at * RECORD_BYTES + 28];
        uint32_t number = u32_at(&s, at, 24);
        if (kind < 32)
            by_kind[kind]++;
        if ((kind == CALL_ENTER || kind == CALL_RETURN || kind == EVENT) && number < functions)
            by_function[number]++;
    }
}
