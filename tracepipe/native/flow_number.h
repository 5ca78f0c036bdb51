/* SPDX-License-Identifier: MIT */
/* The number of a flow: `flow_number` of readers/ids.py. */
#ifndef TP_FLOW_NUMBER_H
#define TP_FLOW_NUMBER_H

#include <stdint.h>
#include <string.h>

/* BLAKE2b (RFC 7693) of one block, without a key and with a digest of 8 bytes, the first word of its state. */

#define TP_FLOW_BYTES_MAX 128
#define TP_ROUNDS 12
#define TP_DIGEST_BYTES 8
#define TP_FLOW_LIMIT (((uint64_t)1 << 52) - 1)

static const uint64_t TP_START[8] = {
    0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
    0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u,
};

static const uint8_t TP_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t tp_turned(uint64_t value, int bits)
{
    return value >> bits | value << (64 - bits);
}

static inline void tp_mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = tp_turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = tp_turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = tp_turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = tp_turned(v[b] ^ v[c], 63);
}

/* The number of a flow whose key is `size` bytes; the others of the block are 0. */
static inline int64_t tp_flow_digest(const uint8_t *block, int64_t size)
{
    uint64_t words[16], v[16], start = TP_START[0] ^ 0x01010000u ^ TP_DIGEST_BYTES;
    for (int i = 0; i < 16; i++) {
        words[i] = 0;
        for (int j = 7; j >= 0; j--)
            words[i] = words[i] << 8 | block[8 * i + j];
    }
    memcpy(v, TP_START, sizeof TP_START);
    memcpy(v + 8, TP_START, sizeof TP_START);
    v[0] = start;
    v[12] ^= (uint64_t)size;
    v[14] = ~v[14];
    for (int round = 0; round < TP_ROUNDS; round++) {
        const uint8_t *at = TP_ORDER[round % 10];
        for (int i = 0; i < 4; i++)
            tp_mix(v, i, i + 4, i + 8, i + 12, words[at[2 * i]], words[at[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            tp_mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, words[at[2 * i + 8]], words[at[2 * i + 9]]);
    }
    return (int64_t)((start ^ v[0] ^ v[8]) & TP_FLOW_LIMIT);
}

#endif
