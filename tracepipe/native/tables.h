/* SPDX-License-Identifier: MIT */
/* Growing buffers and tables of byte strings, which the other files here use.
 *
 * Every function that can run out of memory returns a negative result then, and leaves its data unchanged.
 */
#ifndef TP_TABLES_H
#define TP_TABLES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TP_EXPORT __attribute__((visibility("default")))
#define TP_NO_MEMORY (-1)

typedef struct {
    uint8_t *data;
    int64_t size, room;
} tp_buffer;

/* Makes room for `more` bytes after those in use. */
static inline int tp_reserve(tp_buffer *b, int64_t more)
{
    if (more <= b->room - b->size)
        return 0;
    int64_t room = b->room ? b->room : 256;
    while (room - b->size < more) {
        if (room > INT64_MAX / 4)
            return TP_NO_MEMORY;
        room *= 2;
    }
    uint8_t *data = realloc(b->data, (size_t)room);
    if (!data)
        return TP_NO_MEMORY;
    b->data = data;
    b->room = room;
    return 0;
}

static inline int tp_append(tp_buffer *b, const void *from, int64_t size)
{
    if (tp_reserve(b, size))
        return TP_NO_MEMORY;
    if (size)
        memcpy(b->data + b->size, from, (size_t)size);
    b->size += size;
    return 0;
}

/* Makes room for element `count` of an array that grows by doubling. Returns 0 or TP_NO_MEMORY. */
static inline int tp_grow(void **array, int64_t *room, int64_t count, size_t each)
{
    if (count < *room)
        return 0;
    if (count > INT64_MAX / 4 / (int64_t)each)
        return TP_NO_MEMORY;
    int64_t wanted = *room ? *room : 2; /* small, as there may be a million such arrays */
    while (wanted <= count)
        wanted *= 2;
    void *grown = realloc(*array, (size_t)wanted * each);
    if (!grown)
        return TP_NO_MEMORY;
    *array = grown;
    *room = wanted;
    return 0;
}
#define TP_GROW(array, room, count) tp_grow((void **)&(array), &(room), (count), sizeof *(array))

/* Byte strings by number from 0 on. They may be set in any order; one that was never set is empty. */
typedef struct {
    int64_t at;
    int32_t size; /* -1: not set */
    int32_t recipe; /* of arguments, from 1 on; 0: not known */
} tp_place;

typedef struct {
    tp_buffer bytes;
    tp_place *places;
    int64_t count, room;
} tp_strings;

int tp_strings_set(tp_strings *s, int64_t number, const void *from, int64_t size);
void tp_strings_clear(tp_strings *s);
void tp_strings_free(tp_strings *s);

static inline int tp_strings_has(const tp_strings *s, int64_t number)
{
    return number >= 0 && number < s->count && s->places[number].size >= 0;
}

static inline int64_t tp_size_of(const tp_strings *s, int64_t number)
{
    return tp_strings_has(s, number) ? s->places[number].size : 0;
}

static inline uint8_t *tp_copy(uint8_t *to, const tp_strings *s, int64_t number)
{
    if (!tp_strings_has(s, number))
        return to;
    const tp_place *place = &s->places[number];
    memcpy(to, s->bytes.data + place->at, (size_t)place->size);
    return to + place->size;
}

/* Byte strings, numbered in the order in which they are added. Hashes are keyed, so that no input can be made
 * to have many collisions. */
typedef struct {
    uint64_t hash;
    int64_t number; /* -1: free */
} tp_slot;

typedef struct {
    tp_strings strings;
    tp_slot *slots;
    uint64_t mask, used, key;
} tp_table;

uint64_t tp_hash(const uint8_t *data, int64_t size, uint64_t key);
int tp_table_init(tp_table *t, uint64_t key);
/* For many tables of few strings each. */
int tp_table_init_small(tp_table *t, uint64_t key);
void tp_table_clear(tp_table *t);
void tp_table_free(tp_table *t);
/* The number of a string, -2 where it is not in the table. */
int64_t tp_table_find(const tp_table *t, const uint8_t *data, int64_t size, uint64_t hash);
/* Adds a string that `tp_table_find` did not find. Returns its number, or TP_NO_MEMORY. */
int64_t tp_table_add(tp_table *t, const uint8_t *data, int64_t size, uint64_t hash);

/* Times have 64 bits, and damaged or hostile recordings may have any of them. */
/* The sum, at most the last time that 64 bits can have; `length` is not negative. */
static inline int64_t tp_after(int64_t ts, int64_t length)
{
    int64_t sum;
    return __builtin_add_overflow(ts, length, &sum) ? INT64_MAX : sum;
}

/* The tables of a recording's reader. */
typedef struct tp_reader tp_reader;

/* The text of a shape, or of arguments; -1 where there is no such number. */
int64_t tp_reader_text(tp_reader *r, int args, int64_t number, const uint8_t **text);
int64_t tp_reader_number(tp_reader *r, int args, const uint8_t *text, int64_t size);
int64_t tp_reader_count(tp_reader *r, int args);
/* Recipes are texts of arguments with HOLE and a number in place of some values. Returns the number of a recipe,
 * from 1 on, 0 where there are too many, or TP_NO_MEMORY. */
#define HOLE 1
int64_t tp_reader_recipe(tp_reader *r, const uint8_t *text, int64_t size);
int64_t tp_reader_recipe_text(tp_reader *r, int64_t recipe, const uint8_t **text);
/* The recipe from which arguments were made, 0 where it is not known. */
int32_t tp_reader_recipe_of(tp_reader *r, int64_t number);
/* Numbers arguments without a look whether their text has a number already. Returns the number or TP_NO_MEMORY. */
int64_t tp_reader_append(tp_reader *r, const uint8_t *text, int64_t size, int32_t recipe);

#endif
