/* SPDX-License-Identifier: MIT */
/* Writes operations as Chrome's JSON, each as a line after a comma:
 *
 *     {"ph":"B","name":"cuInit","cat":"userspace","pid":7,"tid":3,"ts":3600000000.125,"args":{"cpu":1,"flags":0}}
 *                      └ name ┘└──────── the track's top ────────┘└──── time ───────┘         └── arguments ──┘
 *
 * Python gives the texts of names, tracks and shapes. Arguments are copied from the recording where their
 * text is of the native grammar.
 */
#include "decimal.h"
#include "json.h"
#include "tables.h"
#include "ops.h"
#include "shown.h"
#include "warp_names.h"

/* The texts that Python gives. By track: PLACES has its ids, TOPS its category and ids, COUNTS the line of a
 * count up to its time. NAMES are by name; KERNELS are names of kernels after a quote. By shape: BEFORE is
 * what is shown before its arguments, LAUNCH whether its launch is shown, AFTER what is shown after that.
 * MARK is by mark, ARGS by arguments, LINES by frame of Python. Each argument starts with a comma. */
enum { PLACES, TOPS, COUNTS, NAMES, KERNELS, BEFORE, LAUNCH, AFTER, MARK, ARGS, LINES, READY };

/* Begins and ends of a track at one nanosecond: how often they alternated, and whether the last one was an
 * end. */
typedef struct {
    int64_t at;
    int32_t step, is_end;
} tp_turns;

/* Where the text of arguments is: not looked up yet, in the recording's table, or among the texts of Python.
 * */
enum { UNKNOWN, AS_RECORDED, AS_MADE };
typedef struct {
    uint8_t where;
    uint16_t shadows;
} tp_known;

typedef struct {
    tp_strings ready[READY];
    tp_turns *turns; /* by track */
    tp_known *args;  /* by arguments */
    int64_t turn_count, turn_room, args_count, args_room;
    tp_buffer out, name;
    int64_t base;
} tp_chrome;

/* When this much is written, it must be taken before more is written. */
#define OUT_FULL (1 << 18)
/* The most bytes of a line and its separator, without the texts in it. */
#define LINE_ROOM 256

static inline uint8_t *tp_put(uint8_t *to, const void *from, int64_t size)
{
    memcpy(to, from, (size_t)size);
    return to + size;
}
#define TP_LITERAL(to, text) tp_put((to), (text), (int64_t)sizeof(text) - 1)

/* Completes an object of arguments, whose members were put after ARGS_ROOM bytes, each after a comma. Without
 * members, nothing is written. */
#define ARGS_ROOM 8
static inline uint8_t *tp_end_args(uint8_t *to, uint8_t *end)
{
    if (end == to + ARGS_ROOM)
        return to;
    memcpy(to, ",\"args\":{", ARGS_ROOM + 1);
    *end++ = '}';
    return end;
}

static inline uint8_t *tp_named_number(uint8_t *to, const char *name, int64_t value)
{
    *to++ = ',';
    *to++ = '"';
    to = tp_put(to, name, (int64_t)strlen(name));
    *to++ = '"';
    *to++ = ':';
    return tp_signed_decimal(to, value);
}

/* Thousandths of a nanosecond, two a step. At the most steps, they stay below half a nanosecond. */
#define APART 2
#define APART_MAX 249

TP_EXPORT void tp_chrome_free(tp_chrome *c)
{
    if (!c)
        return;
    for (int i = 0; i < READY; i++)
        tp_strings_free(&c->ready[i]);
    free(c->turns);
    free(c->args);
    free(c->out.data);
    free(c->name.data);
    free(c);
}

TP_EXPORT tp_chrome *tp_chrome_new(int64_t base)
{
    tp_chrome *c = calloc(1, sizeof *c);
    if (c)
        c->base = base;
    return c;
}

static int reach_args(tp_chrome *c, int64_t args)
{
    if (TP_GROW(c->args, c->args_room, args))
        return TP_NO_MEMORY;
    for (; c->args_count <= args; c->args_count++)
        c->args[c->args_count] = (tp_known){UNKNOWN, 0};
    return 0;
}

/* Sets a text by its number. A text of arguments comes with what it shadows (see shown.h). */
TP_EXPORT int tp_chrome_set(tp_chrome *c, int which, int64_t number, const uint8_t *text, int64_t size, int shadows)
{
    if (number < 0 || tp_strings_set(&c->ready[which], number, text, size))
        return TP_NO_MEMORY;
    if (which == PLACES) {
        if (TP_GROW(c->turns, c->turn_room, number))
            return TP_NO_MEMORY;
        for (; c->turn_count <= number; c->turn_count++)
            c->turns[c->turn_count] = (tp_turns){-1, 0, 0};
    }
    if (which == ARGS) {
        if (reach_args(c, number))
            return TP_NO_MEMORY;
        c->args[number] = (tp_known){AS_MADE, (uint16_t)shadows};
    }
    return 0;
}

/* Forgets all arguments, and all names and shapes if they too have other numbers from now on. */
TP_EXPORT void tp_chrome_forget(tp_chrome *c, int shapes)
{
    for (int which = BEFORE; shapes && which <= AFTER; which++)
        tp_strings_clear(&c->ready[which]);
    if (shapes)
        tp_strings_clear(&c->ready[NAMES]);
    tp_strings_clear(&c->ready[ARGS]);
    c->args_count = 0;
}

/* Returns what was written. It is valid until the next call. */
TP_EXPORT int64_t tp_chrome_take(tp_chrome *c, const uint8_t **text)
{
    int64_t size = c->out.size;
    *text = c->out.data;
    c->out.size = 0;
    return size;
}

/* Returns how often begins and ends have alternated on a track at this time so far. */
static int step_of(tp_turns *turns, int kind, int64_t ts)
{
    int is_end = kind == OP_END;
    if (kind == OP_INSTANT)
        return turns->at == ts ? turns->step : 0;
    if (turns->at != ts)
        *turns = (tp_turns){ts, 0, is_end};
    else if (turns->is_end != is_end)
        *turns = (tp_turns){ts, turns->step + (turns->step < APART_MAX), is_end};
    return turns->step;
}

/* Writes a time: µs since the base with three decimals, and three more that keep begins and ends of a track
 * apart. */
static int tp_chrome_when(tp_chrome *c, int32_t track, int kind, int64_t ts, uint8_t *when)
{
    /* The difference of two times may need 64 unsigned bits. */
    uint64_t ns = ts > c->base ? (uint64_t)ts - (uint64_t)c->base : 0;
    int step = kind == OP_COUNTER || track < 0 || track >= c->turn_count ? 0 : step_of(&c->turns[track], kind, ts);
    uint8_t *to = tp_decimal(when, ns / 1000);
    *to++ = '.';
    to = tp_three_digits(to, (int64_t)(ns % 1000));
    if (step)
        to = tp_three_digits(to, step * APART);
    return (int)(to - when);
}

static uint8_t *tp_chrome_head(uint8_t *to, int kind)
{
    if (kind == OP_INSTANT)
        return TP_LITERAL(to, ",\n{\"ph\":\"i\",\"s\":\"t\",\"name\":");
    return kind == OP_END ? TP_LITERAL(to, ",\n{\"ph\":\"E\",\"name\":") : TP_LITERAL(to, ",\n{\"ph\":\"B\",\"name\":");
}

static uint8_t *tp_chrome_flow(tp_chrome *c, uint8_t *to, int64_t flow, int32_t track, const uint8_t *when, int when_size)
{
    if (!flow)
        return to;
    to = TP_LITERAL(to, ",\n{\"ph\":\"");
    *to++ = flow < 0 ? 's' : 't';
    to = TP_LITERAL(to, "\",\"cat\":\"flow\",\"name\":\"flow\",\"id\":");
    to = tp_decimal(to, flow < 0 ? -(uint64_t)flow : (uint64_t)flow);
    to = tp_put(tp_copy(to, &c->ready[PLACES], track), when, when_size);
    return TP_LITERAL(to, ",\"bp\":\"e\"}");
}

/* Writes a value of a counter, given as a member of JSON. */
static int count_text(tp_chrome *c, int32_t track, int64_t ts, const uint8_t *member, int64_t size)
{
    uint8_t when[32];
    if (tp_reserve(&c->out, LINE_ROOM + tp_size_of(&c->ready[COUNTS], track) + size))
        return TP_NO_MEMORY;
    uint8_t *to = tp_copy(c->out.data + c->out.size, &c->ready[COUNTS], track);
    to = tp_put(to, when, tp_chrome_when(c, track, OP_COUNTER, ts, when));
    to = TP_LITERAL(tp_put(TP_LITERAL(to, ",\"args\":{"), member, size), "}}");
    c->out.size = to - c->out.data;
    return 0;
}

/* Writes the line of a count. The caller has reserved room for the texts of its track. */
static int tp_chrome_count(tp_chrome *c, int32_t track, int64_t ts, int64_t value)
{
    uint8_t member[32] = "\"value\":";
    return count_text(c, track, ts, member, tp_signed_decimal(member + 8, value) - member);
}

/* What an operation shows. `args` are its arguments without their first comma or brace, where a quote
 * follows. */
typedef struct {
    const uint8_t *args;
    int64_t args_size, source, line;
    int32_t shape;
    int mark;
} tp_shown;

/* Finds the text of an event's arguments, as recorded or as Python made it; none where `args` is below 0. */
static void find_args(const tp_chrome *c, tp_reader *texts, int32_t args, tp_shown *shown)
{
    const uint8_t *text;
    if (args < 0)
        return;
    if (c->args[args].where == AS_RECORDED) {
        shown->args_size = tp_reader_text(texts, 1, args, &text) - 2;
        shown->args = text + 1;
    } else if (tp_size_of(&c->ready[ARGS], args)) {
        const tp_place *place = &c->ready[ARGS].places[args];
        shown->args_size = place->size - 1;
        shown->args = c->ready[ARGS].bytes.data + place->at + 1;
    }
}

/* Writes the object of arguments as the last field of a line. */
static uint8_t *put_args(const tp_chrome *c, uint8_t *to, const tp_shown *s, int64_t launch)
{
    const tp_strings *ready = c->ready;
    uint8_t *end = tp_copy(to + ARGS_ROOM, &ready[BEFORE], s->shape);
    if (s->args_size) {
        *end++ = ',';
        end = tp_put(end, s->args, s->args_size);
    }
    end = tp_copy(end, &ready[LINES], s->line);
    if (s->source != -1)
        end = tp_named_number(end, "source_ns", s->source);
    if (tp_size_of(&ready[LAUNCH], s->shape)) {
        end = tp_copy(end, &ready[LAUNCH], s->shape);
        if (launch < 0) /* beyond 63 bits, which Perfetto reads as -1 */
            *end++ = '"';
        end = tp_decimal(end, (uint64_t)launch);
        if (launch < 0)
            *end++ = '"';
    }
    end = tp_copy(end, &ready[AFTER], s->shape);
    return tp_end_args(to, tp_copy(end, &ready[MARK], s->mark));
}

static int write_op(tp_chrome *c, const tp_drawn *d, int32_t track, int64_t at, const tp_shown *s, int64_t launch)
{
    int kind = d->kind[at];
    const tp_strings *ready = c->ready, *top = &ready[kind == OP_END ? PLACES : TOPS];
    int64_t size = LINE_ROOM + tp_size_of(&ready[NAMES], d->name[at]) + tp_size_of(top, track), of_flow;
    of_flow = LINE_ROOM + tp_size_of(&ready[PLACES], track);
    size += of_flow + tp_size_of(&ready[BEFORE], s->shape) + s->args_size;
    for (int64_t left = d->flow2[at]; tp_next_flow(d, &left);)
        size += of_flow;
    size += tp_size_of(&ready[LAUNCH], s->shape) + tp_size_of(&ready[AFTER], s->shape) + tp_size_of(&ready[LINES], s->line);
    if (tp_reserve(&c->out, size))
        return TP_NO_MEMORY;
    uint8_t when[32], *to = tp_chrome_head(c->out.data + c->out.size, kind);
    int when_size = tp_chrome_when(c, track, kind, d->ts[at], when);
    to = tp_copy(tp_copy(to, &ready[NAMES], d->name[at]), top, track);
    to = put_args(c, tp_put(to, when, when_size), s, launch);
    *to++ = '}';
    if (kind != OP_END) {
        to = tp_chrome_flow(c, to, d->flow[at], track, when, when_size);
        for (int64_t left = d->flow2[at], flow; (flow = tp_next_flow(d, &left));)
            to = tp_chrome_flow(c, to, flow, track, when, when_size);
    }
    c->out.size = to - c->out.data;
    return 0;
}

/* Returns 1 where the text of arguments is known, 0 where Python must make it, or TP_NO_MEMORY. */
static int know_args(tp_chrome *c, tp_reader *texts, int32_t args)
{
    const uint8_t *text;
    if (reach_args(c, args))
        return TP_NO_MEMORY;
    if (c->args[args].where != UNKNOWN)
        return 1;
    int64_t size = texts ? tp_reader_text(texts, 1, args, &text) : 0;
    if (size <= 0 || tp_object(text, text + size) != text + size)
        return 0;
    c->args[args] = (tp_known){AS_RECORDED, (uint16_t)tp_shadows(text, size)};
    return 1;
}

/* Returns 1 where C can write an operation, else 0: it has arguments of its own, their text is not known, or
 * one of them replaces something that is shown in addition to arguments. Or TP_NO_MEMORY. */
static int can_write(tp_chrome *c, const tp_drawn *d, const tp_given *g, tp_reader *texts, int64_t at)
{
    int32_t event = d->event[at], args = event < 0 ? -1 : g->args[event];
    if (event < NO_EVENT)
        return 0;
    if (args < 0)
        return 1;
    int known = know_args(c, texts, args);
    if (known != 1 || !c->args[args].shadows)
        return known;
    int32_t shape = g->shape[event];
    int shown = tp_size_of(&c->ready[LAUNCH], shape) ? SHOWS_LAUNCH : 0;
    shown |= tp_size_of(&c->ready[BEFORE], shape) ? SHOWS_CPU : 0;
    shown |= tp_size_of(&c->ready[AFTER], shape) ? SHOWS_SIZES : 0;
    shown |= g->source && g->source[event] != -1 ? SHOWS_SOURCE : 0;
    shown |= g->line && g->line[event] >= 0 ? SHOWS_LINE : 0;
    shown |= d->mark[at] ? SHOWS_MARK << d->mark[at] : 0;
    return !(shown & c->args[args].shadows);
}

/* Writes operations from place `from` of their order on. `tracks` are by row; `texts` has the arguments or is
 * NULL. Stops at an operation that Python must write (`is_odd` is set), or when there is much to take.
 * Returns where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_chrome_write(tp_chrome *c, const tp_drawn *d, const tp_given *g, tp_reader *texts,
                                  const int32_t *tracks, int64_t from, int64_t to, int *is_odd)
{
    *is_odd = 0;
    for (int64_t i = from; i < to; i++) {
        int64_t at = d->order[i];
        if (c->out.size > OUT_FULL)
            return i;
        if (d->kind[at] == OP_COUNTER && d->event[at] >= NO_EVENT) {
            if (tp_chrome_count(c, tracks[d->row[at]], d->ts[at], d->value[at]))
                return TP_NO_MEMORY;
            continue;
        }
        int can = can_write(c, d, g, texts, at);
        if (can != 1) {
            *is_odd = 1;
            return can ? can : i;
        }
        int32_t event = d->event[at];
        int64_t launch = 0;
        tp_shown shown = {0, 0, -1, -1, -1, d->mark[at]};
        if (event >= 0) {
            shown.shape = g->shape[event];
            shown.source = g->source ? g->source[event] : -1;
            shown.line = g->line ? g->line[event] : -1;
            launch = g->launch[event];
            find_args(c, texts, g->args[event], &shown);
        }
        if (write_op(c, d, tracks[d->row[at]], at, &shown, launch))
            return TP_NO_MEMORY;
    }
    return to;
}

/* Writes one operation whose arguments Python made. */
TP_EXPORT int tp_chrome_one(tp_chrome *c, const tp_drawn *d, const int32_t *tracks, int64_t at, const uint8_t *args,
                            int64_t size)
{
    tp_shown shown = {args + 1, size ? size - 1 : 0, -1, -1, -1, 0};
    if (d->kind[at] == OP_COUNTER)
        return count_text(c, tracks[d->row[at]], d->ts[at], shown.args, shown.args_size);
    return write_op(c, d, tracks[d->row[at]], at, &shown, 0);
}

/* Writes a line that Python made, given without its comma. */
TP_EXPORT int tp_chrome_line(tp_chrome *c, const uint8_t *line, int64_t size)
{
    return tp_append(&c->out, ",\n", 2) || tp_append(&c->out, line, size) ? TP_NO_MEMORY : 0;
}

/* Warps of one GPU. */

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
static uint8_t *put_warp_args(const tp_job *j, uint8_t *to, int32_t slice)
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
        to = put_warp_args(j, to, slice);
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
