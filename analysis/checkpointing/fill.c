/* Fills the table of optimal.py: e(m, i, l), the least repeated forward time of stages i..l with m
 * memory slots.  The recurrence is written in optimal.py, in NumPy; this is the same loop for chains
 * whose stages all differ, where NumPy would need minutes.
 *
 * It is a matrix product over (min, +) whose entries are rows of m, with a triangular dependence,
 * and is tiled like one: a tile is TILE values of i by TILE values of l, so that a row fetched from
 * memory (the table fits in no cache) serves TILE sums, and CHUNK entries of m, so that the tile's
 * results stay in the first-level cache.
 *
 * Compiled with -DREAL=float or -DREAL=double by native.py.
 */
#include <stdint.h>

enum { TILE = 16, CHUNK = 512, FUSED = 4 };

typedef struct {
    int64_t length;             /* L */
    int64_t limit;              /* slots + 1 */
    int64_t width;              /* entries per row: limit + the largest checkpoint */
    const int32_t *index;       /* (L+2) x (L+1): row of subchain i..l */
    const int64_t *activation;  /* 0..L, slots of a_l */
    const int64_t *whole;       /* 0..L, slots of a_l with its interior */
    const int64_t *own_need;    /* 0..L, slots of stage l's backward */
    const int64_t *saving;      /* 0..L, bytes of a differentiable run of l */
    const int64_t *running;     /* 0..L, bytes of a_l with its forward's temporaries */
    const int64_t *held;        /* 0..L, bytes of a_l */
    const int64_t *pending;     /* 0..L, bytes of the gradient of a_l that waits; 0 for L */
    const double *prefix;       /* 0..L, seconds of stages 1..l */
    int64_t unit;               /* bytes per slot */
    REAL *rows;                 /* filled with infinity */
    uint8_t *done;              /* per row */
} Table;

static int64_t slots_of(const Table *t, int64_t bytes) { return (bytes + t->unit - 1) / t->unit; }

static REAL *row(const Table *t, int64_t first, int64_t last) {
    return t->rows + (int64_t)t->index[first * (t->length + 1) + last] * t->width;
}

/* out(m) = min(out(m), F(i..j-1) + e(m - a_{j-1}, j, l) + e(m, i, j-1)) for j = j0..j1 and those m in
 * [low, high) that leave room for the sweep i..j-1, FUSED values of j in one pass over m.
 * sweep[j] = bytes of running i..j-1, which never falls with j. */
static void relax_splits(const Table *t, int64_t i, int64_t j0, int64_t j1, int64_t l,
                         const int64_t *sweep, int64_t low, int64_t high) {
    REAL *restrict out = row(t, i, l) + t->activation[i - 1];
    for (int64_t j = j0; j <= j1; j += FUSED) {
        const int64_t count = j + FUSED - 1 <= j1 ? FUSED : j1 - j + 1;
        const REAL *after[FUSED], *before[FUSED];
        REAL seconds[FUSED];
        int64_t all = slots_of(t, t->pending[l] + sweep[j + count - 1]);
        if (count < FUSED) all = high; /* a remainder goes one by one */
        if (all < low) all = low;
        if (all > high) all = high;
        for (int64_t k = 0; k < count; k++) {
            after[k] = row(t, j + k, l);
            before[k] = row(t, i, j + k - 1) + t->activation[i - 1];
            seconds[k] = (REAL)(t->prefix[j + k - 1] - t->prefix[i - 1]);
            if (all == low) continue;
            int64_t own = slots_of(t, t->pending[l] + sweep[j + k]);
            for (int64_t m = own > low ? own : low; m < all; m++) {
                REAL cost = after[k][m] + before[k][m] + seconds[k];
                out[m] = cost < out[m] ? cost : out[m];
            }
        }
        if (count < FUSED) break;
        const REAL *restrict a0 = after[0], *restrict a1 = after[1], *restrict a2 = after[2],
                   *restrict a3 = after[3], *restrict b0 = before[0], *restrict b1 = before[1],
                   *restrict b2 = before[2], *restrict b3 = before[3];
        const REAL s0 = seconds[0], s1 = seconds[1], s2 = seconds[2], s3 = seconds[3];
        for (int64_t m = all; m < high; m++) {
            REAL c0 = a0[m] + b0[m] + s0, c1 = a1[m] + b1[m] + s1;
            REAL c2 = a2[m] + b2[m] + s2, c3 = a3[m] + b3[m] + s3;
            REAL left = c0 < c1 ? c0 : c1, right = c2 < c3 ? c2 : c3;
            REAL best = left < right ? left : right;
            out[m] = best < out[m] ? best : out[m];
        }
    }
}

/* Rows lie pages apart, so the hardware does not see the next one coming. */
static void prefetch(const REAL *from, int64_t count) {
    for (int64_t m = 0; m < count; m += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(from + m);
}

static void start_with_keep(const Table *t, int64_t i, int64_t l) {
    REAL *out = row(t, i, l) + t->activation[i - 1];
    int64_t threshold = slots_of(t, t->pending[l] + t->saving[i]);
    if (threshold < t->own_need[i]) threshold = t->own_need[i];
    if (i == l) {
        for (int64_t m = threshold; m < t->limit; m++) out[m] = 0;
        return;
    }
    if (threshold < t->whole[i]) threshold = t->whole[i];
    const REAL *after = row(t, i + 1, l) + t->activation[i] - t->whole[i];
    for (int64_t m = threshold; m < t->limit; m++) out[m] = after[m] < out[m] ? after[m] : out[m];
}

/* sweep[j] = bytes of running i..j-1 keeping nothing in between, j = i+1..end */
static void sweep_bytes(const Table *t, int64_t i, int64_t end, int64_t *sweep) {
    int64_t most = 0;
    for (int64_t j = i + 1; j <= end; j++) {
        int64_t need = t->running[j - 1] + (j - 1 > i ? t->held[j - 2] : 0);
        most = need > most ? need : most;
        sweep[j] = most;
    }
}

/* scratch: TILE * (L + 2) integers */
void fill(const Table *t, int64_t *scratch) {
    const int64_t stride = t->length + 2;
    for (int64_t l0 = 1; l0 <= t->length; l0 += TILE) {
        const int64_t l1 = l0 + TILE - 1 < t->length ? l0 + TILE - 1 : t->length;
        /* tiles of i from the diagonal down: i1, i1-1, ..., i0 */
        for (int64_t i1 = l1; i1 >= 1; i1 -= TILE) {
            const int64_t i0 = i1 - TILE + 1 > 1 ? i1 - TILE + 1 : 1;
            int64_t open[TILE][TILE], count[TILE], total = 0;
            for (int64_t i = i0; i <= i1; i++) {
                int64_t k = i - i0;
                count[k] = 0;
                for (int64_t l = l0 > i ? l0 : i; l <= l1; l++)
                    if (!t->done[t->index[i * (t->length + 1) + l]]) open[k][count[k]++] = l;
                if (count[k]) sweep_bytes(t, i, l1, scratch + k * stride);
                total += count[k];
            }
            if (!total) continue; /* copies of subchains that are known */
            /* splits whose two parts are both outside this tile */
            for (int64_t low = 0; low < t->limit; low += CHUNK) {
                const int64_t high = low + CHUNK < t->limit ? low + CHUNK : t->limit;
                for (int64_t j = i1 + 1; j <= l0; j += FUSED) {
                    const int64_t j1 = j + FUSED - 1 < l0 ? j + FUSED - 1 : l0;
                    for (int64_t ahead = j + FUSED; ahead <= l0 && ahead < j + 2 * FUSED; ahead++) {
                        for (int64_t i = i0; i <= i1; i++)
                            prefetch(row(t, i, ahead - 1) + t->activation[i - 1] + low, high - low);
                        for (int64_t l = l0; l <= l1; l++)
                            prefetch(row(t, ahead, l) + low, high - low);
                    }
                    for (int64_t i = i0; i <= i1; i++)
                        for (int64_t k = 0; k < count[i - i0]; k++)
                            relax_splits(t, i, j, j1, open[i - i0][k], scratch + (i - i0) * stride,
                                         low, high);
                }
            }
            /* and the rest, in the order in which they become known */
            for (int64_t i = i1; i >= i0; i--)
                for (int64_t k = 0; k < count[i - i0]; k++) {
                    const int64_t l = open[i - i0][k];
                    start_with_keep(t, i, l);
                    const int64_t *sweep = scratch + (i - i0) * stride;
                    const int64_t near = i1 < l ? i1 : l; /* inside the tile's subchain of i ... */
                    const int64_t far = (i1 > l0 ? i1 : l0) + 1; /* ... and of l */
                    relax_splits(t, i, i + 1, near, l, sweep, 0, t->limit);
                    relax_splits(t, i, far, l, l, sweep, 0, t->limit);
                    t->done[t->index[i * (t->length + 1) + l]] = 1;
                }
        }
    }
}
