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

enum { TILE = 8, CHUNK = 256 };

typedef struct {
    int64_t length;             /* L */
    int64_t limit;              /* slots + 1 */
    int64_t width;              /* entries per row: limit + the largest checkpoint */
    const int32_t *index;       /* (L+2) x (L+1): row of stretch i..l */
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

/* out(m) = min(out(m), F(i..j-1) + e(m - a_{j-1}, j, l) + e(m, i, j-1)) for m in [low, high) that
 * leave room for the sweep i..j-1 */
static void relax_split(const Table *t, int64_t i, int64_t j, int64_t l, int64_t sweep_bytes,
                        int64_t low, int64_t high) {
    int64_t threshold = slots_of(t, t->pending[l] + sweep_bytes);
    const REAL *restrict after = row(t, j, l);
    const REAL *restrict before = row(t, i, j - 1) + t->activation[i - 1];
    REAL *restrict out = row(t, i, l) + t->activation[i - 1];
    const REAL seconds = (REAL)(t->prefix[j - 1] - t->prefix[i - 1]);
    for (int64_t m = threshold > low ? threshold : low; m < high; m++) {
        REAL cost = after[m] + before[m] + seconds;
        out[m] = cost < out[m] ? cost : out[m];
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
            if (!total) continue; /* copies of stretches that are known */
            /* splits whose two parts are both outside this tile */
            for (int64_t low = 0; low < t->limit; low += CHUNK) {
                const int64_t high = low + CHUNK < t->limit ? low + CHUNK : t->limit;
                for (int64_t j = i1 + 1; j <= l0; j++) {
                    if (j < l0) {
                        for (int64_t i = i0; i <= i1; i++)
                            prefetch(row(t, i, j) + t->activation[i - 1] + low, high - low);
                        for (int64_t l = l0; l <= l1; l++)
                            prefetch(row(t, j + 1, l) + low, high - low);
                    }
                    for (int64_t i = i0; i <= i1; i++)
                        for (int64_t k = 0; k < count[i - i0]; k++)
                            relax_split(t, i, j, open[i - i0][k], scratch[(i - i0) * stride + j],
                                        low, high);
                }
            }
            /* and the rest, in the order in which they become known */
            for (int64_t i = i1; i >= i0; i--)
                for (int64_t k = 0; k < count[i - i0]; k++) {
                    const int64_t l = open[i - i0][k];
                    start_with_keep(t, i, l);
                    for (int64_t j = i + 1; j <= l; j++) {
                        if (j == i1 + 1 && j <= l0) j = l0 + 1; /* done above */
                        if (j > l) break;
                        relax_split(t, i, j, l, scratch[(i - i0) * stride + j], 0, t->limit);
                    }
                    t->done[t->index[i * (t->length + 1) + l]] = 1;
                }
        }
    }
}
