/* SPDX-License-Identifier: MIT */
/* Writes warps of one GPU as Chrome's JSON. */
#include "chrome.h"
#include "warp_names.h"

typedef struct {
    tp_chrome *c;
    const tp_changes *changes;
    const tp_slices *slices;
    const tp_kernel *kernels;
    const int32_t *tracks;
} tp_job;

static uint8_t *put_known(uint8_t *to, const char *name, int64_t value)
{
    return value == -1 ? to : tp_named_number(to, name, value);
}

/* Writes what is known of a warp as arguments. */
static uint8_t *put_args(const tp_job *j, uint8_t *to, int32_t slice)
{
    const tp_slices *s = j->slices;
    uint8_t *end = put_known(to + ARGS_ROOM, "source_ns", s->source[slice]);
    end = put_known(end, "exits", s->exits[slice]);
    end = put_known(end, "cycles", s->cycles[slice]);
    end = put_known(end, "lanes", s->lanes[slice]);
    if (s->unclosed[slice])
        end = tp_copy(end, &j->c->ready[MARK], MARK_UNCLOSED);
    return tp_end_args(to, end);
}

/* Writes the mask of the lanes that leave. */
static uint8_t *put_mask(uint8_t *to, uint64_t mask)
{
    int digits = 8;
    while (digits < 16 && mask >> 4 * digits)
        digits++;
    to = TP_LITERAL(to, ",\"args\":{\"mask\":\"0x");
    while (digits--)
        *to++ = (uint8_t)"0123456789abcdef"[mask >> 4 * digits & 15];
    to = TP_LITERAL(to, "\",\"lanes\":");
    to = tp_decimal(to, (uint64_t)__builtin_popcountll(mask));
    *to++ = '}';
    return to;
}

/* Writes a slice's begin, end or exit. */
static int write_change(const tp_job *j, int64_t i)
{
    tp_chrome *c = j->c;
    const tp_slices *s = j->slices;
    int32_t slice = j->changes->slice[i], track = j->tracks[s->row[slice]];
    int change = j->changes->kind[i];
    int kind = change == WARP_BEGIN ? OP_BEGIN : change == WARP_END ? OP_END : OP_INSTANT;
    const tp_strings *top = &c->ready[kind == OP_END ? PLACES : TOPS];
    if (kind != OP_INSTANT && tp_warp_name(&c->name, &c->ready[KERNELS], &j->kernels[s->kernel[slice]], s->number[slice]))
        return TP_NO_MEMORY;
    int64_t size = 3 * LINE_ROOM + c->name.size + tp_size_of(top, track) + tp_size_of(&c->ready[PLACES], track);
    if (tp_reserve(&c->out, size))
        return TP_NO_MEMORY;
    uint8_t when[32], *to = tp_chrome_head(c->out.data + c->out.size, kind);
    int when_size = tp_chrome_when(c, track, kind, j->changes->ts[i], when);
    to = kind == OP_INSTANT ? TP_LITERAL(to, "\"exit") : tp_put(to, c->name.data, c->name.size);
    *to++ = '"';
    to = tp_put(tp_copy(to, top, track), when, when_size);
    if (kind == OP_BEGIN)
        to = put_args(j, to, slice);
    else if (kind == OP_INSTANT)
        to = put_mask(to, (uint64_t)j->changes->mask[i]);
    *to++ = '}';
    if (kind == OP_BEGIN)
        to = tp_chrome_flow(c, to, s->flow[slice], track, when, when_size);
    c->out.size = to - c->out.data;
    return 0;
}

/* Writes changes of warps from `from` on, until there is much to take. `tracks` are by the GPU's rows;
 * `counter` is the track of the count of running warps. Returns where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_chrome_warps(tp_chrome *c, const tp_changes *changes, const tp_slices *slices,
                                  const tp_kernel *kernels, const int32_t *tracks, int32_t counter, int64_t from,
                                  int64_t to)
{
    tp_job job = {c, changes, slices, kernels, tracks};
    for (int64_t i = from; i < to; i++) {
        if (c->out.size > OUT_FULL)
            return i;
        if (changes->kind[i] != WARP_COUNT && write_change(&job, i))
            return TP_NO_MEMORY;
        if (changes->value[i] >= 0 && tp_chrome_count(c, counter, changes->ts[i], changes->value[i]))
            return TP_NO_MEMORY;
    }
    return to;
}
