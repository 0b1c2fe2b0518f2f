/* A GPU's L2 fed by the blocks of one launch; analysis/l2/__init__.py describes the model.
 *
 * Only the first `sampled_sets` sets of each partition are simulated. A hash spreads lines over
 * sets, so they see a fair sample of the lines; a line outside them costs nothing here.
 *
 * Compiled by analysis/native.py. The structures are repeated, field by field, in launch.py.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SECTOR = 32, LINE = 128, LINE_SECTORS = LINE / SECTOR }; /* bytes */
enum { PAGE = 64 }; /* lines an entry of the index of sampled lines stands for */
#define NOTHING UINT32_MAX /* the line of an empty way, and the end of the list of lines */
enum { READ = 0, WRITE = 1, ATOMIC = 2 };
/* When a stream moves its tile: in every step, or by whether the block visits the tile for the first
 * or the last time. A list says which in these bits of its entries. */
enum { ALWAYS = 0, FIRST = 1, NOT_FIRST = 2, LAST = 3, NOT_LAST = 4 };
enum { FIRST_BIT = 40 }; /* the bit of the last time is the next one */

typedef struct {
    int64_t first, end; /* byte addresses */
    int64_t kind, tensor;
} Range;

typedef struct {
    int64_t first;                  /* byte address of tile 0 */
    int64_t tile_bytes, head_bytes; /* the last tile of a head may be shorter */
    int64_t tiles;                  /* of a head; the same for all streams of a block */
    int64_t kind, tensor, when;
} Stream;

typedef struct {
    int64_t start, steps, direction; /* tiles start, start + direction, ... */
    int64_t list;                    /* or, if >= 0, the tiles tiles[list .. list + steps) */
    int64_t stream, streams;         /* what a step moves */
    int64_t before, befores;         /* ranges moved before the first step ... */
    int64_t after, afters;           /* ... and after the last */
} Block;

typedef struct {
    int64_t partitions, sets, sampled_sets, ways; /* sets: of a partition */
    int64_t lines;        /* of the address space */
    int64_t tensors;
    int64_t sms, slots;   /* slots: blocks an SM holds */
    int64_t fixed;        /* 1: a slot takes every (sms * slots)-th block; 0: the next one */
    int64_t burst;        /* tiles a block moves at a time */
    int64_t blocks;
    double lone_speedup, older_share;
    const double *pace;      /* per SM: time of a step with all slots busy */
    const int64_t *side;     /* per SM: its partition */
    const Block *block;
    const Stream *stream;
    const Range *range;
    const int64_t *tiles;
} Launch;

/* Sectors of the sampled lines, by tensor. */
typedef struct {
    int64_t fetched;       /* from HBM to L2 */
    int64_t written;       /* from L2 to HBM while the launch runs */
    int64_t left;          /* still to be written when it ends */
    int64_t touched;       /* distinct sectors that blocks read or wrote */
} Count;

typedef struct {
    uint32_t line;
    uint8_t valid, dirty; /* a bit per sector */
    uint8_t tensor;
} Way;

typedef struct {
    const Launch *launch;
    Count *count;
    Way *ways;
    uint32_t *line;  /* sampled lines, ascending */
    uint32_t *place; /* per sampled line: set, and its home partition in the top bit */
    uint8_t *seen;   /* per sampled line: sectors that were touched before */
    int64_t *page;   /* per PAGE lines: the first sampled line */
} Cache;

static uint64_t mix(uint64_t x) { /* a bijection of 64 bits that leaves no pattern (splitmix64) */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Every run of `sets` consecutive lines fills each set once, in an order that differs from run to
 * run and is spread over the run: line k of run r goes to set (k stride + offset(r)) mod sets. The
 * k of a given set is found with the stride's inverse. */
static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

static int64_t stride_of(int64_t sets) {
    int64_t stride = (int64_t)(0.6180339887 * (double)sets) | 1;
    while (common_divisor(stride, sets) != 1) stride++;
    return stride;
}

static int64_t inverse_of(int64_t a, int64_t m) {
    int64_t old_r = a, r = m, old_s = 1, s = 0;
    while (r) {
        const int64_t q = old_r / r, next_r = old_r - q * r, next_s = old_s - q * s;
        old_r = r, r = next_r, old_s = s, s = next_s;
    }
    return ((old_s % m) + m) % m;
}

static int64_t home_of(int64_t line, int64_t partitions) {
    return partitions > 1 ? (int64_t)(mix(~(uint64_t)line) & 1) : 0;
}

static int bits(unsigned x) { return (int)((x & 1) + (x >> 1 & 1) + (x >> 2 & 1) + (x >> 3 & 1)); }

static void write_back(Cache *c, Way *way) {
    c->count[way->tensor].written += bits(way->dirty);
    way->dirty = 0;
}

/* Brings the line to the front of its set; valid is 0 where it was not there. */
static Way *touch(Cache *c, int64_t side, int64_t set, uint32_t line, int64_t tensor) {
    const Launch *l = c->launch;
    Way *way = c->ways + (side * l->sampled_sets + set) * l->ways;
    if (way[0].line == line) return way;
    int64_t at = 1;
    while (at < l->ways && way[at].line != line) at++;
    Way found = {line, 0, 0, (uint8_t)tensor};
    if (at < l->ways)
        found = way[at];
    else
        write_back(c, way + --at);
    memmove(way + 1, way, (size_t)at * sizeof(Way));
    way[0] = found;
    return way;
}

static void reach(Cache *c, int64_t side, int64_t i, unsigned mask, int64_t kind, int64_t tensor) {
    const Launch *l = c->launch;
    const uint32_t line = c->line[i];
    const int64_t home = c->place[i] >> 31, set = c->place[i] & 0x7fffffffu;
    unsigned fetched = 0;
    if (kind == READ) {
        Way *here = touch(c, side, set, line, tensor);
        fetched = mask & ~(unsigned)here->valid;
        here->valid |= (uint8_t)mask;
        if (fetched && home != side) { /* a copy is filled through the line's home */
            Way *there = touch(c, home, set, line, tensor);
            const unsigned held = there->valid;
            there->valid |= (uint8_t)fetched;
            fetched &= ~held;
        }
    } else { /* at the line's home; a copy elsewhere is no longer true */
        if (l->partitions > 1) {
            Way *way = c->ways + ((1 - home) * l->sampled_sets + set) * l->ways;
            for (int64_t k = 0; k < l->ways; k++)
                if (way[k].line == line) way[k].valid &= (uint8_t)~mask;
        }
        Way *there = touch(c, home, set, line, tensor);
        if (kind == ATOMIC) fetched = mask & ~(unsigned)there->valid;
        there->valid |= (uint8_t)mask;
        there->dirty |= (uint8_t)mask;
    }
    c->count[tensor].fetched += bits(fetched);
    c->count[tensor].touched += bits(mask & ~(unsigned)c->seen[i]);
    c->seen[i] |= (uint8_t)mask;
}

static void move(Cache *c, int64_t side, int64_t first, int64_t end, int64_t kind, int64_t tensor) {
    if (first >= end) return;
    const int64_t last = (end - 1) / LINE;
    int64_t i = c->page[first / LINE / PAGE];
    while (c->line[i] < first / LINE) i++;
    for (; c->line[i] <= last; i++) {
        const int64_t start = (int64_t)c->line[i] * LINE;
        unsigned mask = 15;
        if (start < first) mask &= 15u << (first - start) / SECTOR;
        if (start + LINE > end) mask &= 15u >> (start + LINE - end) / SECTOR;
        reach(c, side, i, mask, kind, tensor);
    }
}

static void move_ranges(Cache *c, int64_t side, int64_t from, int64_t count) {
    for (const Range *r = c->launch->range + from; r < c->launch->range + from + count; r++)
        move(c, side, r->first, r->end, r->kind, r->tensor);
}

/* The tile of a step, with its bits. */
static int64_t tile_at(const Launch *l, const Block *b, int64_t step) {
    return b->list < 0 ? b->start + b->direction * step : l->tiles[b->list + step];
}

static int takes_part(int64_t when, int64_t bits) {
    const int64_t first = bits & 1, last = bits >> 1;
    switch (when) {
        case FIRST: return first;
        case NOT_FIRST: return !first;
        case LAST: return last;
        case NOT_LAST: return !last;
        default: return 1;
    }
}

/* Steps from..to of a block. Tiles that follow one another in a head are moved as one piece. */
static void move_tiles(Cache *c, int64_t side, const Block *b, int64_t from, int64_t to) {
    const Launch *l = c->launch;
    const int64_t a_head = b->streams ? l->stream[b->stream].tiles : 1;
    while (from < to) {
        const int64_t entry = tile_at(l, b, from), bits = entry >> FIRST_BIT;
        const int64_t tile = entry - (bits << FIRST_BIT), head = tile / a_head;
        int64_t low = tile, high = tile;
        for (from++; from < to; from++) {
            const int64_t next = tile_at(l, b, from) - (bits << FIRST_BIT);
            if (next / a_head != head || (next != high + 1 && next != low - 1)) break;
            if (next > high)
                high = next;
            else
                low = next;
        }
        for (const Stream *t = l->stream + b->stream; t < l->stream + b->stream + b->streams; t++) {
            if (!takes_part(t->when, bits)) continue;
            const int64_t start = t->first + head * t->head_bytes;
            const int64_t first = start + low % a_head * t->tile_bytes;
            const int64_t end = start + (high % a_head + 1) * t->tile_bytes;
            const int64_t limit = start + t->head_bytes;
            move(c, side, first, end < limit ? end : limit, t->kind, t->tensor);
        }
    }
}

static void release(Cache *c) {
    free(c->ways);
    free(c->line);
    free(c->place);
    free(c->seen);
    free(c->page);
}

typedef struct {
    int64_t line, set;
} Sampled;

static int by_line(const void *a, const void *b) {
    const int64_t x = ((const Sampled *)a)->line, y = ((const Sampled *)b)->line;
    return (x > y) - (x < y);
}

static int prepare(Cache *c, const Launch *l, Count *count) {
    memset(c, 0, sizeof *c);
    memset(count, 0, (size_t)l->tensors * sizeof(Count));
    c->launch = l;
    c->count = count;
    const int64_t runs = l->lines / l->sets + 1, most = runs * l->sampled_sets;
    c->ways = calloc((size_t)(l->partitions * l->sampled_sets * l->ways), sizeof(Way));
    c->line = malloc((size_t)(most + 1) * sizeof(uint32_t));
    c->place = malloc((size_t)(most + 1) * sizeof(uint32_t));
    c->seen = calloc((size_t)(most + 1), 1);
    c->page = malloc((size_t)(l->lines / PAGE + 1) * sizeof(int64_t));
    Sampled *found = malloc((size_t)most * sizeof(Sampled));
    if (!c->ways || !c->line || !c->place || !c->seen || !c->page || !found) {
        free(found);
        release(c);
        return 0;
    }
    const int64_t places = l->partitions * l->sampled_sets * l->ways;
    for (int64_t k = 0; k < places; k++) c->ways[k].line = NOTHING;
    const int64_t inverse = inverse_of(stride_of(l->sets), l->sets);
    int64_t i = 0, page = 0;
    for (int64_t run = 0; run < runs; run++) {
        const int64_t begin = i, offset = (int64_t)(mix((uint64_t)run) % (uint64_t)l->sets);
        for (int64_t set = 0; set < l->sampled_sets; set++) {
            const int64_t k = (set - offset + l->sets) % l->sets * inverse % l->sets;
            const int64_t x = run * l->sets + k;
            if (x < l->lines) found[i++] = (Sampled){x, set};
        }
        qsort(found + begin, (size_t)(i - begin), sizeof(Sampled), by_line);
    }
    for (int64_t k = 0; k < i; k++) {
        for (; page <= found[k].line / PAGE; page++) c->page[page] = k;
        c->line[k] = (uint32_t)found[k].line;
        c->place[k] = (uint32_t)found[k].set | (uint32_t)home_of(found[k].line, l->partitions) << 31;
    }
    for (; page <= l->lines / PAGE; page++) c->page[page] = i;
    free(found);
    c->line[i] = NOTHING;
    return 1;
}

static void finish(Cache *c) {
    const Launch *l = c->launch;
    for (Way *w = c->ways; w < c->ways + l->partitions * l->sampled_sets * l->ways; w++)
        c->count[w->tensor].left += bits(w->dirty);
    release(c);
}

/* ---- blocks in time ---------------------------------------------------------------------------- */

typedef struct {
    double time;
    int64_t slot;
} Event;

static int before(Event a, Event b) {
    return a.time < b.time || (a.time == b.time && a.slot < b.slot);
}

static void sift_down(Event *heap, int64_t count, int64_t at) {
    const Event moved = heap[at];
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

typedef struct {
    int64_t block, step; /* block -1: idle */
    int64_t started;     /* rank of start among all blocks */
} Slot;

/* Time of a step on this SM: with all slots busy each block gets an equal share of the SM (or the
 * oldest `older_share`); a block with fewer neighbours takes what is free, up to lone_speedup. */
static double step_time(const Launch *l, const Slot *slot, int64_t index) {
    const int64_t sm = index % l->sms;
    int64_t active = 0, oldest = index;
    for (int64_t s = sm; s < l->sms * l->slots; s += l->sms)
        if (slot[s].block >= 0) {
            active++;
            if (slot[s].started < slot[oldest].started) oldest = s;
        }
    double share = 1.0 / (double)active;
    if (active > 1 && l->older_share > share)
        share = oldest == index ? l->older_share : (1 - l->older_share) / (double)(active - 1);
    double speed = share * (double)l->slots;
    if (active < l->slots && speed > l->lone_speedup) speed = l->lone_speedup;
    return l->pace[sm] / speed;
}

static int64_t next_block(const Launch *l, int64_t index, int64_t previous, int64_t *started) {
    const int64_t all = l->sms * l->slots;
    const int64_t next = previous < 0 ? index : l->fixed ? previous + all : *started;
    if (next >= l->blocks) return -1;
    ++*started;
    return next;
}

/* All blocks of the launch, from an empty L2. count: one entry a tensor; finished: time of the last
 * block's end in steps. 0 on success, 1 without memory. */
int simulate(const Launch *l, Count *count, double *finished) {
    Cache c;
    const int64_t all = l->sms * l->slots;
    Slot *slot = malloc((size_t)all * sizeof(Slot));
    Event *heap = malloc((size_t)all * sizeof(Event));
    if (!slot || !heap || !prepare(&c, l, count)) {
        free(slot);
        free(heap);
        return 1;
    }
    int64_t started = 0, running = 0;
    for (int64_t i = 0; i < all; i++) slot[i] = (Slot){-1, -1, 0};
    for (int64_t i = 0; i < all && i < l->blocks; i++) {
        slot[i] = (Slot){next_block(l, i, -1, &started), -1, i};
        heap[running++] = (Event){0, i};
    }
    while (running) {
        const Event now = heap[0];
        Slot *s = slot + now.slot;
        const Block *b = l->block + s->block;
        const int64_t side = l->side[now.slot % l->sms];
        if (s->step < 0) {
            move_ranges(&c, side, b->before, b->befores);
            s->step = 0;
        }
        const int64_t left = b->steps - s->step, tiles = left < l->burst ? left : l->burst;
        if (tiles > 0) {
            move_tiles(&c, side, b, s->step, s->step + tiles);
            s->step += tiles;
            heap[0].time = now.time + (double)tiles * step_time(l, slot, now.slot);
        } else {
            move_ranges(&c, side, b->after, b->afters);
            *finished = now.time;
            s->block = next_block(l, now.slot, s->block, &started);
            s->step = -1;
            s->started = started;
            if (s->block < 0) heap[0] = heap[--running];
        }
        sift_down(heap, running, 0);
    }
    finish(&c);
    free(slot);
    free(heap);
    return 0;
}

/* A recorded order instead of a pace: event i is SM sm[i] moving tile step[i] of block block[i];
 * step -1 stands for what the block moves first, -2 for what it moves last. */
int replay(const Launch *l, int64_t events, const int64_t *sm, const int64_t *block,
           const int64_t *step, Count *count) {
    Cache c;
    if (!prepare(&c, l, count)) return 1;
    for (int64_t i = 0; i < events; i++) {
        const Block *b = l->block + block[i];
        const int64_t side = l->side[sm[i]];
        if (step[i] == -1)
            move_ranges(&c, side, b->before, b->befores);
        else if (step[i] == -2)
            move_ranges(&c, side, b->after, b->afters);
        else
            move_tiles(&c, side, b, step[i], step[i] + 1);
    }
    finish(&c);
    return 0;
}
