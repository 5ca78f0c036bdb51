/* SPDX-License-Identifier: MIT */
/* Writes warps of one GPU as Perfetto's packets, in a packet sequence of their own.
 *
 * The count of running warps has no packets. It is a field of the begin or end that changes it,
 * TrackEvent.extra_counter_values, whose track is the default of the sequence.
 */
#include "perfetto.h"
#include "warp_names.h"

/* At most MET_MAX names of KERNELS_MAX kernels are remembered as used once. At most NAMED_MAX that are used
 * again get a number. */
#define MET_MAX (1 << 17)
#define KERNELS_MAX 256
#define NAMED_MAX (1 << 16)
#define FIRST_IID 2 /* 1 is that of an exit */

enum { NAME_NEW, NAME_MET };

/* By kernel and warp: NAME_NEW, NAME_MET, or the number of a name. */
typedef struct tp_names {
    int32_t *of[KERNELS_MAX];
    int64_t rooms[KERNELS_MAX];
    int64_t met, named;
} tp_names;

void tp_names_free(tp_names *names)
{
    for (int i = 0; names && i < KERNELS_MAX; i++)
        free(names->of[i]);
    free(names);
}

/* Finds where a warp's name is remembered, NULL where it is not. Returns 0 or TP_NO_MEMORY. */
static int find_name(tp_perfetto *p, int32_t kernel, int64_t number, int32_t **found)
{
    *found = 0;
    if (kernel < 0 || kernel >= KERNELS_MAX || number < 0 || number >= MET_MAX)
        return 0;
    if (!p->names && !(p->names = calloc(1, sizeof *p->names)))
        return TP_NO_MEMORY;
    tp_names *names = p->names;
    int64_t before = names->rooms[kernel];
    if (TP_GROW(names->of[kernel], names->rooms[kernel], number))
        return TP_NO_MEMORY;
    for (int64_t i = before; i < names->rooms[kernel]; i++)
        names->of[kernel][i] = NAME_NEW;
    *found = &names->of[kernel][number];
    return 0;
}

/* The number of a warp's name, 0 where the name is to be written in place. The text is put into `p->scratch`
 * unless it has a number already. */
static int64_t name_of(tp_perfetto *p, const tp_kernel *kernels, int32_t kernel, int64_t number)
{
    int32_t *found;
    if (find_name(p, kernel, number, &found))
        return TP_NO_MEMORY;
    if (found && *found > NAME_MET)
        return *found;
    if (tp_warp_name(&p->scratch, &p->ready[NAMES], &kernels[kernel], number))
        return TP_NO_MEMORY;
    if (!found)
        return 0;
    tp_names *names = p->names;
    if (*found == NAME_NEW) {
        if (names->met < MET_MAX) {
            names->met++;
            *found = NAME_MET;
        }
        return 0;
    }
    if (names->named >= NAMED_MAX)
        return 0;
    int64_t iid = FIRST_IID + names->named++;
    *found = (int32_t)iid;
    return tp_put_interned(p, EVENT_NAMES, iid, p->scratch.data, p->scratch.size) ? TP_NO_MEMORY : iid;
}

typedef struct {
    tp_perfetto *p;
    const tp_slices *s;
    const tp_kernel *kernels;
    int64_t offset;
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
    int64_t iid = name_of(p, j->kernels, s->kernel[slice], s->number[slice]);
    if (iid < 0)
        return TP_NO_MEMORY;
    int64_t name = iid ? 1 + tp_varint_size(iid) : 2 + tp_varint_size(p->scratch.size) + p->scratch.size;
    const int64_t known[] = {s->source[slice], s->exits[slice], s->cycles[slice], s->lanes[slice]};
    /* A protobuf integer is modulo 2^64. */
    int64_t source = (int64_t)((uint64_t)known[0] - (uint64_t)ts - (uint64_t)j->offset);
    const int64_t shown[] = {source, known[1], known[2], known[3]};
    const int key[] = {KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES};
    int64_t flow = s->flow[slice], mark = s->unclosed[slice] ? MARK_UNCLOSED : MARK_NONE;
    int64_t size = 2 + tp_size_of(&p->ready[TOPS], s->row[slice]) + name + (flow ? 10 : 0);
    size += tp_size_of(&p->ready[MARK], mark) + value_size(value);
    for (int i = 0; i < 4; i++)
        size += known[i] < 0 ? 0 : tp_annotated_size(tp_size_of(keys, key[i]), shown[i]);
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, size);
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_BEGIN;
    to = tp_copy(to, &p->ready[TOPS], s->row[slice]);
    if (iid) {
        *to++ = 0x50;
        to = tp_varint(to, (uint64_t)iid);
    } else {
        *to++ = 0xBA;
        *to++ = 0x01;
        to = tp_bytes(to, p->scratch.data, p->scratch.size);
    }
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
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, 2 + tp_size_of(&p->ready[TRACKS], row) + value_size(value));
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
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, 2 + tp_size_of(&p->ready[TRACKS], row) + 2 + tp_varint_size(value));
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

/* Writes changes of warps from `from` on and stops at an exit, which Python writes. `counter` is the row of
 * the count. Source times are written as differences from `offset`. Returns where it stopped, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_warps(tp_perfetto *p, const tp_changes *c, const tp_slices *s, const tp_kernel *kernels,
                                    int32_t counter, int64_t offset, int64_t from, int64_t to)
{
    tp_job job = {p, s, kernels, offset};
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
    return i;
}
