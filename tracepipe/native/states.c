/* SPDX-License-Identifier: MIT */
/* What a thread did in stretches of time: a sweep over its spans. analyses/host_states.py does the same in Python. */
#include "tables.h"

enum { OFF_CPU, DRIVER, OTHER_SYSCALL, IOCTL, ABSENT, IN_CALL, HOOKED, USER };
enum { RUNNING_SPANS, DRIVER_SPANS, SYSCALL_SPANS, CALL_SPANS, HOOK_SPANS, KINDS };
enum { IS_IOCTL = 1, IS_OUTERMOST = 2 };
#define NONE (-1)
#define MET 64

/* The spans of one kind, sorted by start. `flags` are those of system calls. */
typedef struct {
    const int64_t *start, *end;
    const int32_t *name;
    const uint8_t *flags;
    int64_t count;
} tp_spans;

/* `first` and `last`: from when to when the thread is known to have run; `on` and `off`: from its first stretch of
 * time on a processor to the end of its last. Without any, `has_run` is 0. */
typedef struct {
    int64_t has_run, first, last, on, off;
} tp_runs;

typedef struct {
    int64_t *stretch, *dur;
    int32_t *call, *syscall;
    uint8_t *state;
} tp_spent;

/* How far the sweep is in the spans of a kind: the next one to start, the end of those that started (of ioctls and
 * of others, for system calls), and the last that started of those that are named. */
typedef struct {
    int64_t next, until[2], named;
} tp_sweep;

/* Starts the spans that begin no later than `ts`. */
static void advance(const tp_spans *s, tp_sweep *at, int kind, int64_t ts)
{
    for (; at->next < s->count && s->start[at->next] <= ts; at->next++) {
        int64_t i = at->next, end = s->end[i];
        if (kind == SYSCALL_SPANS) {
            int is_ioctl = s->flags[i] & IS_IOCTL;
            if (end > at->until[is_ioctl])
                at->until[is_ioctl] = end;
            if (s->flags[i] & IS_OUTERMOST)
                at->named = i;
            continue;
        }
        /* Of hooked functions of several layers, one that begins in another is left out. */
        if (kind == CALL_SPANS || (kind == HOOK_SPANS && s->start[i] >= at->until[0]))
            at->named = i;
        if (end > at->until[0])
            at->until[0] = end;
    }
}

static int32_t name_at(const tp_spans *s, const tp_sweep *at, int64_t ts)
{
    return at->named >= 0 && ts < s->end[at->named] ? s->name[at->named] : NONE;
}

static int is_named(const tp_spans *s, const tp_sweep *at, int64_t ts)
{
    return at->named >= 0 && ts < s->end[at->named];
}

static int64_t sooner(int64_t next, int64_t edge, int64_t ts)
{
    return edge > ts && edge < next ? edge : next;
}

/* Adds up how long a thread was in each state, call and system call in each stretch, in the order in which they
 * first occur. The stretches are sorted and do not overlap. `out` has room for `room` rows. Returns how many there
 * are, of the stretches before `*done`; fewer than all if there is no room for the next one. */
TP_EXPORT int64_t tp_states(const tp_spans *spans, const tp_runs *runs, int64_t stretches, const int64_t *start,
                            const int64_t *end, const tp_spent *out, int64_t room, int64_t *done)
{
    tp_sweep at[KINDS];
    int64_t count = 0, met[MET]; /* rows of this stretch by a hash of what they are of */
    for (int kind = 0; kind < KINDS; kind++)
        at[kind] = (tp_sweep){0, {INT64_MIN, INT64_MIN}, NONE};
    for (*done = 0; *done < stretches; (*done)++) {
        int64_t first = count;
        for (int i = 0; i < MET; i++)
            met[i] = NONE;
        for (int64_t ts = start[*done], next; ts < end[*done]; ts = next) {
            next = end[*done];
            for (int kind = 0; kind < KINDS; kind++) {
                advance(&spans[kind], &at[kind], kind, ts);
                if (at[kind].next < spans[kind].count)
                    next = sooner(next, spans[kind].start[at[kind].next], ts);
                next = sooner(next, at[kind].until[0], ts);
                next = sooner(next, at[kind].until[1], ts);
                if (at[kind].named >= 0)
                    next = sooner(next, spans[kind].end[at[kind].named], ts);
            }
            const tp_spans *calls = &spans[CALL_SPANS], *syscalls = &spans[SYSCALL_SPANS], *hooks = &spans[HOOK_SPANS];
            int in_call = is_named(calls, &at[CALL_SPANS], ts), in_hook = is_named(hooks, &at[HOOK_SPANS], ts);
            int in_syscall = is_named(syscalls, &at[SYSCALL_SPANS], ts);
            int32_t call = in_call ? name_at(calls, &at[CALL_SPANS], ts) : name_at(hooks, &at[HOOK_SPANS], ts);
            int32_t syscall = call == NONE ? name_at(syscalls, &at[SYSCALL_SPANS], ts) : NONE;
            int state = in_call ? IN_CALL : in_hook ? HOOKED : USER;
            if (ts < at[SYSCALL_SPANS].until[1])
                state = IOCTL;
            if (ts < at[SYSCALL_SPANS].until[0])
                state = OTHER_SYSCALL;
            if (ts < at[DRIVER_SPANS].until[0])
                state = DRIVER;
            if (runs->has_run) {
                if (ts >= at[RUNNING_SPANS].until[0] && ts >= runs->on && ts < runs->off)
                    state = OFF_CPU;
                next = sooner(next, runs->first, ts);
                next = sooner(next, runs->last, ts);
                if (ts < runs->first || ts >= runs->last)
                    state = ABSENT;
                /* A thread that sleeps in a call until the end of the recording does not run again. */
                if (ts >= runs->last && (in_call || in_syscall || in_hook))
                    state = OFF_CPU;
            }
            uint32_t hash = ((uint32_t)call * 31 + (uint32_t)syscall) * 8 + (uint32_t)state;
            int64_t row = met[hash % MET];
            if (row < 0 || out->state[row] != state || out->call[row] != call || out->syscall[row] != syscall)
                for (row = first; row < count; row++)
                    if (out->state[row] == state && out->call[row] == call && out->syscall[row] == syscall)
                        break;
            if (row == count) {
                if (count == room)
                    return first;
                out->stretch[row] = *done;
                out->state[row] = (uint8_t)state;
                out->call[row] = call;
                out->syscall[row] = syscall;
                out->dur[row] = 0;
                count++;
            }
            out->dur[row] += next - ts;
            met[hash % MET] = row;
        }
    }
    return count;
}
