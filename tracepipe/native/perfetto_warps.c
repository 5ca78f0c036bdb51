/* Warps of one GPU into Perfetto's packets, on a sequence of their own.
 *
 * How many run is no packet but a field of the begin or end that changes it: TrackEvent.extra_counter_values,
 * whose track is the sequence's default.
 */
#include "perfetto.h"
#include "warp_names.h"

/* Names that came once are remembered, so many; those that come again get a number. */
#define MET_MAX (1 << 15)

/* The name's field into `b`. */
static int put_name(tp_perfetto *p, tp_buffer *b, const tp_kernel *kernel, int64_t number, const tp_strings *names)
{
    tp_table *known = &p->interned[EVENT_NAMES];
    tp_buffer *name = &p->scratch;
    if (tp_warp_name(name, names, kernel, number))
        return TP_NO_MEMORY;
    uint64_t hash = tp_hash(name->data, name->size, known->key);
    int64_t iid = tp_table_find(known, name->data, name->size, hash) + 1;
    if (iid <= 0) {
        iid = 0;
        int64_t met = tp_table_find(&p->met, name->data, name->size, hash);
        if (met >= 0)
            iid = tp_perfetto_intern(p, EVENT_NAMES, name->data, name->size);
        else if (met < 0 && p->met.strings.count < MET_MAX)
            met = tp_table_add(&p->met, name->data, name->size, hash);
        if (iid < 0 || met == TP_NO_MEMORY)
            return TP_NO_MEMORY;
    }
    b->size = 0;
    if (tp_reserve(b, name->size + 16))
        return TP_NO_MEMORY;
    uint8_t *to = b->data;
    if (iid) {
        *to++ = 0x50;
        to = tp_varint(to, (uint64_t)iid);
    } else {
        *to++ = 0xBA;
        *to++ = 0x01;
        to = tp_bytes(to, name->data, name->size);
    }
    b->size = to - b->data;
    return 0;
}

typedef struct {
    tp_perfetto *p;
    const tp_slices *s;
    const tp_kernel *kernels;
    const tp_strings *names;
    int64_t offset;
    tp_buffer name;
} tp_job;

static int64_t value_size(int64_t value)
{
    return value < 0 ? 0 : 1 + tp_varint_size(value);
}

static uint8_t *put_value(uint8_t *to, int64_t value)
{
    if (value < 0)
        return to;
    *to++ = 0x60;
    return tp_varint(to, (uint64_t)value);
}

static int write_begin(tp_job *j, int64_t ts, int32_t slice, int64_t value)
{
    tp_perfetto *p = j->p;
    const tp_slices *s = j->s;
    const tp_strings *keys = &p->ready[KEYS];
    if (put_name(p, &j->name, &j->kernels[s->kernel[slice]], s->number[slice], j->names))
        return TP_NO_MEMORY;
    const int64_t known[] = {s->source[slice], s->exits[slice], s->cycles[slice], s->lanes[slice]};
    /* A protobuf integer is modulo 2^64. */
    int64_t source = (int64_t)((uint64_t)known[0] - (uint64_t)ts - (uint64_t)j->offset);
    const int64_t shown[] = {source, known[1], known[2], known[3]};
    const int key[] = {KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES};
    int64_t flow = s->flow[slice], mark = s->unclosed[slice] ? MARK_UNCLOSED : MARK_NONE;
    int64_t size = 2 + tp_size_of(&p->ready[TOPS], s->row[slice]) + j->name.size + (flow ? 10 : 0);
    size += tp_size_of(&p->ready[MARK], mark) + value_size(value);
    for (int i = 0; i < 4; i++)
        size += known[i] < 0 ? 0 : tp_annotated_size(tp_size_of(keys, key[i]), shown[i]);
    uint8_t *to = tp_put_packet(p, ts, size);
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_BEGIN;
    to = tp_copy(to, &p->ready[TOPS], s->row[slice]);
    memcpy(to, j->name.data, (size_t)j->name.size);
    to += j->name.size;
    for (int i = 0; i < 4; i++)
        if (known[i] >= 0)
            to = tp_put_annotated(to, keys, key[i], shown[i], 0);
    to = tp_copy(to, &p->ready[MARK], mark);
    to = put_value(to, value);
    tp_end_packet(p, tp_put_flow(to, flow));
    return 0;
}

static int write_end(tp_perfetto *p, int64_t ts, int32_t row, int64_t value)
{
    uint8_t *to = tp_put_packet(p, ts, 2 + tp_size_of(&p->ready[TRACKS], row) + value_size(value));
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_END;
    tp_end_packet(p, put_value(tp_copy(to, &p->ready[TRACKS], row), value));
    return 0;
}

static int write_count(tp_perfetto *p, int64_t ts, int32_t row, int64_t value)
{
    if (value < 0)
        return 0;
    uint8_t *to = tp_put_packet(p, ts, 2 + tp_size_of(&p->ready[TRACKS], row) + 2 + tp_varint_size(value));
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_COUNTER;
    to = tp_copy(to, &p->ready[TRACKS], row);
    *to++ = 0xF0;
    *to++ = 0x01;
    tp_end_packet(p, tp_varint(to, (uint64_t)value));
    return 0;
}

/* Writes changes of warps from `from` on; stops at an exit, which Python writes. `counter` is the row of the
 * count, `offset` what source times are given from. Where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_warps(tp_perfetto *p, const tp_changes *c, const tp_slices *s, const tp_kernel *kernels,
                                    const tp_perfetto *named, int32_t counter, int64_t offset, int64_t from,
                                    int64_t to)
{
    tp_job job = {p, s, kernels, &named->ready[NAMES], offset, {0}};
    int64_t i = from;
    for (int failed = 0; i < to && c->kind[i] != WARP_EXIT; i++) {
        int32_t slice = c->slice[i];
        if (c->kind[i] == WARP_BEGIN)
            failed = write_begin(&job, c->ts[i], slice, c->value[i]);
        else if (c->kind[i] == WARP_END)
            failed = write_end(p, c->ts[i], s->row[slice], c->value[i]);
        else
            failed = write_count(p, c->ts[i], counter, c->value[i]);
        if (failed) {
            i = TP_NO_MEMORY;
            break;
        }
    }
    free(job.name.data);
    return i;
}
