/* SPDX-License-Identifier: MIT */
/* Writes when threads run: task states of TracePacket.generic_kernel_task_state_event, and sched_waking in
 * ftrace's bundles.
 *
 *     117 ─ 1 cpu │ 3 tid │ 4 state            1 ─ 1 cpu │ 2 event ─ 1 timestamp │ 2 pid of the waker
 *                                                                    20 ─ 2 pid │ 5 target_cpu
 */
#include "json.h"
#include "lines.h"
#include "perfetto.h"

#define ID_LIMIT INT32_MAX
#define NOBODY (-1)

enum { UNKNOWN, RUNS, LEAVES, WOKEN };
enum { RUNNABLE = 2, RUNNING, SLEEPS, WAITS, STOPPED, DESTROYED = 8 };

/* By event, and by shape. */
typedef struct {
    const int64_t *ts;
    const int32_t *shape, *args;
    const uint8_t *kind;
    const int32_t *cpu, *tid;
} tp_switches;

typedef struct {
    int64_t waker, target;
    int state;
} tp_switch_args;

static int is_text(const uint8_t *at, const uint8_t *end, const char *text)
{
    return (size_t)(end - at) == strlen(text) && !memcmp(at, text, (size_t)(end - at));
}

/* The state of a thread that left its processor, by its text. */
static int state_of(const uint8_t *at, const uint8_t *end)
{
    static const struct {
        const char *text;
        int state;
    } states[] = {{"\"runnable\"", RUNNABLE}, {"\"preempted\"", RUNNABLE}, {"\"disk\"", WAITS},
                  {"\"parked\"", WAITS},      {"\"idle\"", WAITS},         {"\"stopped\"", STOPPED},
                  {"\"traced\"", STOPPED},    {"\"dead\"", DESTROYED},     {"\"zombie\"", DESTROYED}};
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        if (is_text(at, end, states[i].text))
            return states[i].state;
    return SLEEPS;
}

static int64_t id_of(const uint8_t *at, const uint8_t *end)
{
    int64_t value;
    return tp_unsigned(at, end, &value) && value <= ID_LIMIT ? value : NOBODY;
}

/* Reads arguments. Returns 0, or -1 where Python must read their text. */
static int read_args(tp_reader *texts, int32_t args, tp_switch_args *found)
{
    const uint8_t *at = 0, *end;
    int64_t size = texts ? tp_reader_text(texts, 1, args, &at) : -1;
    if (size < 2 || *at != '{')
        return -1;
    for (end = at + size; *at != '}';) {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':')
            return -1;
        const uint8_t *value = after + 1;
        if (!(at = tp_value(value, end)) || at >= end || (*at != ',' && *at != '}'))
            return -1;
        if (is_text(key, after, "\"by_tid\""))
            found->waker = id_of(value, at);
        else if (is_text(key, after, "\"target_cpu\""))
            found->target = id_of(value, at);
        else if (is_text(key, after, "\"prev_state\""))
            found->state = state_of(value, at);
    }
    return at + 1 == end ? 0 : -1;
}

static uint8_t *put_field(uint8_t *to, uint8_t tag, int64_t value)
{
    *to++ = tag;
    return tp_varint(to, (uint64_t)value);
}

static int write_state(tp_perfetto *p, int64_t ts, int32_t cpu, int32_t tid, int state)
{
    uint8_t *to = tp_put_packet(p, ts, TASK_STATE, 4 + tp_varint_size(cpu) + tp_varint_size(tid));
    if (!to)
        return TP_NO_MEMORY;
    tp_end_packet(p, put_field(put_field(put_field(to, 0x08, cpu), 0x18, tid), 0x20, state));
    return 0;
}

static int write_waking(tp_perfetto *p, int64_t ts, int64_t when, int32_t cpu, int32_t tid, const tp_switch_args *a)
{
    int64_t waking = 1 + tp_varint_size(tid) + (a->target < 0 ? 0 : 1 + tp_varint_size(a->target));
    int64_t event = 2 + tp_varint_size(when) + tp_varint_size(a->waker) + 2 + tp_varint_size(waking) + waking;
    uint8_t *to = tp_put_packet(p, ts, FTRACE_EVENTS, 2 + tp_varint_size(cpu) + tp_varint_size(event) + event);
    if (!to)
        return TP_NO_MEMORY;
    to = put_field(put_field(to, 0x08, cpu), 0x12, event);
    to = put_field(put_field(to, 0x08, when), 0x10, a->waker);
    *to++ = 0xA2;
    to = put_field(to, 0x01, waking);
    to = put_field(to, 0x10, tid);
    tp_end_packet(p, a->target < 0 ? to : put_field(to, 0x28, a->target));
    return 0;
}

/* Writes events from `from` on and stops at one whose arguments Python must read. `ahead` is by how much
 * CLOCK_BOOTTIME is ahead of their times, ns. Returns where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_switches(tp_perfetto *p, const tp_switches *s, tp_reader *texts, int64_t ahead, int64_t from,
                                       int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        int32_t shape = s->shape[i], args = s->args[i];
        int kind = s->kind[shape];
        tp_switch_args found = {NOBODY, NOBODY, SLEEPS};
        if (args >= 0 && kind != RUNS && read_args(texts, args, &found))
            return i;
        int failed;
        if (kind == WOKEN && found.waker != NOBODY) {
            int64_t when = (int64_t)((uint64_t)s->ts[i] + (uint64_t)ahead);
            failed = write_waking(p, s->ts[i], when > 0 ? when : 0, s->cpu[shape], s->tid[shape], &found);
        } else {
            int state = kind == RUNS ? RUNNING : kind == WOKEN ? RUNNABLE : found.state;
            failed = write_state(p, s->ts[i], s->cpu[shape], s->tid[shape], state);
        }
        if (failed)
            return TP_NO_MEMORY;
    }
    return to;
}
