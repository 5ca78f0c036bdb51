/* SPDX-License-Identifier: MIT */
/* Tables of byte strings. */
#include "tables.h"

#define SLOTS_AT_FIRST 1024
#define SLOTS_OF_SMALL 8

int tp_strings_set(tp_strings *s, int64_t number, const void *from, int64_t size)
{
    if (size > INT32_MAX || number < 0 || number > INT32_MAX)
        return TP_NO_MEMORY;
    /* One byte more: there must be an address to copy from and compare with where all strings are empty. */
    if (TP_GROW(s->places, s->room, number) || tp_reserve(&s->bytes, size + 1))
        return TP_NO_MEMORY;
    for (; s->count <= number; s->count++)
        s->places[s->count] = (tp_place){0, -1, 0};
    s->places[number] = (tp_place){s->bytes.size, (int32_t)size, 0};
    return tp_append(&s->bytes, from, size);
}

void tp_strings_clear(tp_strings *s)
{
    s->bytes.size = s->count = 0;
}

void tp_strings_free(tp_strings *s)
{
    free(s->bytes.data);
    free(s->places);
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t word(const uint8_t *data)
{
    uint64_t w;
    memcpy(&w, data, 8);
    return w;
}

/* Multiplies and folds, 16 bytes a step. */
uint64_t tp_hash(const uint8_t *data, int64_t size, uint64_t key)
{
    uint64_t h = key ^ (uint64_t)size * 0x9E3779B97F4A7C15u, left[2] = {0, 0};
    int64_t at = 0;
    for (; at + 16 <= size; at += 16)
        h = mix(word(data + at) ^ key ^ 0xA0761D6478BD642Fu, word(data + at + 8) ^ h);
    if (at < size)
        memcpy(left, data + at, (size_t)(size - at));
    return mix(left[0] ^ key ^ 0xE7037ED1A0B428DBu, left[1] ^ h ^ 0x8EBC6AF09C88C6E3u);
}

static int make_slots(tp_table *t, uint64_t count)
{
    tp_slot *slots = malloc(count * sizeof *slots);
    if (!slots)
        return TP_NO_MEMORY;
    for (uint64_t i = 0; i < count; i++)
        slots[i].number = -1;
    for (uint64_t i = 0; t->slots && i <= t->mask; i++) {
        if (t->slots[i].number < 0)
            continue;
        uint64_t at = t->slots[i].hash & (count - 1);
        while (slots[at].number >= 0)
            at = (at + 1) & (count - 1);
        slots[at] = t->slots[i];
    }
    free(t->slots);
    t->slots = slots;
    t->mask = count - 1;
    return 0;
}

int tp_table_init(tp_table *t, uint64_t key)
{
    memset(t, 0, sizeof *t);
    t->key = key;
    return make_slots(t, SLOTS_AT_FIRST);
}

int tp_table_init_small(tp_table *t, uint64_t key)
{
    memset(t, 0, sizeof *t);
    t->key = key;
    return make_slots(t, SLOTS_OF_SMALL);
}

void tp_table_clear(tp_table *t)
{
    tp_strings_clear(&t->strings);
    t->used = 0;
    for (uint64_t i = 0; i <= t->mask; i++)
        t->slots[i].number = -1;
}

void tp_table_free(tp_table *t)
{
    tp_strings_free(&t->strings);
    free(t->slots);
}

int64_t tp_table_find(const tp_table *t, const uint8_t *data, int64_t size, uint64_t hash)
{
    for (uint64_t at = hash & t->mask; t->slots[at].number >= 0; at = (at + 1) & t->mask) {
        const tp_slot *slot = &t->slots[at];
        if (slot->hash != hash)
            continue;
        const tp_place *place = &t->strings.places[slot->number];
        if (place->size == size && !memcmp(t->strings.bytes.data + place->at, data, (size_t)size))
            return slot->number;
    }
    return -2;
}

int64_t tp_table_add(tp_table *t, const uint8_t *data, int64_t size, uint64_t hash)
{
    int64_t number = t->strings.count;
    if (t->used * 2 > t->mask && make_slots(t, (t->mask + 1) * 2))
        return TP_NO_MEMORY;
    if (tp_strings_set(&t->strings, number, data, size))
        return TP_NO_MEMORY;
    uint64_t at = hash & t->mask;
    while (t->slots[at].number >= 0)
        at = (at + 1) & t->mask;
    t->slots[at] = (tp_slot){hash, number};
    t->used++;
    return number;
}
