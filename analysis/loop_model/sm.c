/* One SM that carries out the instructions of its thread blocks, clock by clock.
 *
 * What is modelled: four schedulers that issue one warp's instruction a clock each; the stall counts
 * and the six counters of every instruction; pipes with an interval between instructions; the ports
 * of the register file; the tensor cores, which four warps of a warpgroup use together; shared
 * memory, one port of a fixed width for products, copies and accesses; mbarriers, named barriers and
 * copies with latencies. Caches of instructions and constants always hit.
 *
 * Numbers come from parameters.py, by way of native.py: nothing is chosen here.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SCHEDULERS = 4, COUNTERS = 6, GROUP = 4, MAX_WARPS = 64, MAX_BARRIERS = 64, MAX_BLOCKS = 16,
       NAMED = 16 * MAX_BLOCKS, MAX_AHEAD = 4 };
enum { NONE, OFF, WAIT, ARRIVE, COPY_IN, COPY_OUT, BARRIER_SYNC, BARRIER_ARRIVE, JUMP, WARP_COPY,
       WARP_COPIES_END, ADD };
/* Units, as in parameters.py. */
enum { ISSUE_ONLY, FMA, FMA_HEAVY, ALU, XU, UNIFORM, MEMORY, TENSOR, GROUP_WAIT, COUNTER_WAIT,
       FLUSH, WARP_TENSOR, UNITS };
enum { FIRST_COME, ROUND_ROBIN, SAME_GROUP };
enum { OLDEST, GREEDY, IN_TURN };

typedef struct {
    int32_t unit, interval, latency;
    int32_t stall, yields, write, read, wait, reads_even, reads_odd;
    int32_t amount, from_shared, last_of_group, accumulates, pending;
} Step;

typedef struct {
    int32_t steps_in_table;
    const Step *table;
    int32_t warps;
    const int64_t *first;           /* warps + 1: where each warp's way begins */
    const int32_t *steps, *kinds, *objects, *values;
    int32_t barriers;
    const int32_t *arrivals;        /* per mbarrier */
    const int64_t *start;           /* per warp: clock at which it may begin */
    /* parameters */
    int32_t tensor_tail, tensor_window, tensor_ahead, tensor_order;
    int32_t bank_ports, tensor_register_reads;
    int32_t shared_bytes, copy_bytes, copy_latency, copy_far, copy_issue, store_latency;
    int32_t try_wait, arrive_visible, barrier_port, named_release;
    int32_t jump, xu_queue, source_hold, add_bytes, pick;
    uint32_t seed;                  /* which copies come from the far half of L2 */
    int64_t limit;
    /* results */
    int32_t *issued;                /* per entry of the ways: its clock */
    int64_t *busy;                  /* UNITS + 2: clocks of each unit, of the shared-memory port, of
                                       issue slots, over all schedulers */
    int32_t *tensor_starts, *tensor_ends, *tensor_groups;
    int64_t tensor_ops, tensor_room;
    int64_t clocks;                 /* until the last warp is done; -1: never */
} Run;

typedef struct { int64_t at; int32_t warp, counter; } Due;

typedef struct {
    int64_t ready;
    int64_t place, end;
    int32_t counters[COUNTERS];
    int32_t blocked;                /* at a named barrier */
    int32_t products, groups;       /* tensor instructions and groups issued */
    int64_t copies_read;            /* when shared memory was read by this warp's copies */
} Warp;

typedef struct { int32_t pending; int64_t bytes; int32_t completed; } Mbarrier;
typedef struct { int32_t warp, barrier, parity, counter; } Waiter;
typedef struct { int32_t arrived, waiting; int32_t warps[MAX_WARPS]; } Named;
/* warp, counter: of the end of a warp's copies, -1 for a copy; barrier: -1 for none. */
typedef struct { int64_t from; int32_t barrier, warp, counter; int64_t left, bytes; } Copy;
typedef struct { Copy *copies; int64_t first, last, room; } Stream;
typedef struct { int32_t width, shared, last, accumulates; } Product;

typedef struct {                    /* what a warpgroup asked of the tensor cores */
    Product *ops;
    int64_t *arrived;               /* clock of the fourth warp's issue, -1 before */
    int32_t room, admitted, started, finished, groups_done;
    int32_t got[MAX_WARPS];
} Group;

typedef struct {                    /* a product taken by the tensor cores */
    int32_t group, width, accumulates;
    double fetch;                   /* bytes of its operands still to come */
    int64_t end, number;
} InLine;

typedef struct {
    Run *run;
    Warp warps[MAX_WARPS];
    Mbarrier mbarriers[MAX_BARRIERS];
    Named named[NAMED];
    Group groups[MAX_WARPS / GROUP];
    Waiter waiters[MAX_WARPS * COUNTERS];
    int waiting;
    Due *due; int64_t dues, due_room;
    Stream in, out;
    int64_t pipe[SCHEDULERS][UNITS];
    double debt[SCHEDULERS][2];     /* register reads not yet delivered, by bank */
    int64_t mbarrier_port, copy_unit, add_unit, shared_queue;
    InLine line[MAX_AHEAD + 2];     /* products in the tensor cores: one computes, some wait */
    int32_t lined, begun, last_group;
    int32_t last[SCHEDULERS];
    int32_t outstanding;            /* admitted products that have not left the tensor cores */
    uint32_t random;
    int64_t now;
} Sm;

static void push_due(Sm *s, int64_t at, int32_t warp, int32_t counter) {
    if (s->dues == s->due_room) {
        s->due_room = 2 * s->due_room + 64;
        s->due = realloc(s->due, (size_t)s->due_room * sizeof(Due));
    }
    int64_t i = s->dues++;
    while (i > 0 && s->due[(i - 1) / 2].at > at) { s->due[i] = s->due[(i - 1) / 2]; i = (i - 1) / 2; }
    s->due[i] = (Due){at, warp, counter};
}

static Due pop_due(Sm *s) {
    Due top = s->due[0], moved = s->due[--s->dues];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= s->dues) break;
        if (child + 1 < s->dues && s->due[child + 1].at < s->due[child].at) child++;
        if (s->due[child].at >= moved.at) break;
        s->due[i] = s->due[child];
        i = child;
    }
    s->due[i] = moved;
    return top;
}

/* A phase may be complete: tells those who wait for it. */
static void settle(Sm *s, int32_t b, int64_t at) {
    Mbarrier *m = &s->mbarriers[b];
    if (m->pending != 0 || m->bytes != 0) return;
    m->completed++;
    m->pending = s->run->arrivals[b];
    for (int i = 0; i < s->waiting;) {
        Waiter *w = &s->waiters[i];
        if (w->barrier == b && (m->completed & 1) != w->parity) {
            push_due(s, at + s->run->arrive_visible + s->run->try_wait, w->warp, w->counter);
            *w = s->waiters[--s->waiting];
        } else {
            i++;
        }
    }
}

static void begin(Sm *s) {
    InLine *first = &s->line[0];
    first->end = s->now + first->width / 2;
    s->begun = 1;
    if (first->number < s->run->tensor_room) {
        s->run->tensor_starts[first->number] = (int32_t)s->now;
        s->run->tensor_groups[first->number] = first->group;
    }
}

static void stream_advance(Sm *s, Stream *stream, double *port) {
    while (stream->first < stream->last && stream->copies[stream->first].warp >= 0) {
        Copy *end = &stream->copies[stream->first++];
        push_due(s, s->now, end->warp, end->counter);
    }
    if (stream->first == stream->last) return;
    Copy *c = &stream->copies[stream->first];
    if (c->from > s->now) return;
    int64_t part = s->run->copy_bytes;
    if (part > c->left) part = c->left;
    if (part > *port) part = (int64_t)*port;
    c->left -= part;
    *port -= (double)part;
    if (c->left == 0) {
        if (c->barrier >= 0) {
            s->mbarriers[c->barrier].bytes -= c->bytes;
            settle(s, c->barrier, s->now);
        }
        stream->first++;
    }
}

/* Which warpgroup's product is next; -1 for none. */
static int32_t next_group(Sm *s) {
    const Run *r = s->run;
    const int groups = r->warps / GROUP;
    int32_t best = -1;
    int64_t best_at = 0;
    for (int k = 0; k < groups; k++) {
        int32_t i = r->tensor_order == ROUND_ROBIN ? (s->last_group + 1 + k) % groups : k;
        Group *g = &s->groups[i];
        if (g->started >= g->admitted || g->arrived[g->started] < 0 || g->arrived[g->started] > s->now)
            continue;
        if (r->tensor_order == ROUND_ROBIN) return i;
        if (r->tensor_order == SAME_GROUP && i == s->last_group) return i;
        if (best < 0 || g->arrived[g->started] < best_at) { best = i; best_at = g->arrived[g->started]; }
    }
    return best;
}

/* The tensor cores for this clock. A product's operands come from shared memory while it computes,
 * and those of up to tensor_ahead products behind it before. */
static void tensor_advance(Sm *s, double *port) {
    Run *r = s->run;
    while (s->begun > 0 && s->now >= s->line[0].end && s->line[0].fetch <= 0) {
        Group *g = &s->groups[s->line[0].group];
        Product *op = &g->ops[g->finished++];
        s->outstanding--;
        if (s->line[0].number < r->tensor_room) r->tensor_ends[s->line[0].number] = (int32_t)s->now;
        if (op->last) push_due(s, s->now + r->tensor_tail, -1 - s->line[0].group, 0);
        memmove(&s->line[0], &s->line[1], (size_t)(MAX_AHEAD) * sizeof(InLine));
        s->lined--;
        s->begun = 0;
        if (s->lined > 0) begin(s);
    }
    while (s->lined <= r->tensor_ahead && (s->lined == 0 || s->line[s->lined - 1].fetch <= 0)) {
        int32_t group = next_group(s);
        if (group < 0) break;
        Group *g = &s->groups[group];
        Product *op = &g->ops[g->started++];
        s->line[s->lined++] =
            (InLine){group, op->width, op->accumulates, op->shared, 0, r->tensor_ops++};
        s->last_group = group;
        if (s->lined == 1) begin(s);
        if (op->shared > 0) break;
    }
    for (int k = 0; k < s->lined && *port > 0; k++) {
        double part = s->line[k].fetch < *port ? s->line[k].fetch : *port;
        s->line[k].fetch -= part;
        *port -= part;
    }
    if (s->begun) r->busy[TENSOR]++;
}

static int may_issue(Sm *s, int sched, int w) {
    Run *r = s->run;
    Warp *warp = &s->warps[w];
    if (warp->place >= warp->end || warp->blocked || warp->ready > s->now) return 0;
    const Step *step = &r->table[r->steps[warp->place]];
    for (int c = 0; c < COUNTERS; c++)
        if ((step->wait >> c & 1) && warp->counters[c] > 0) return 0;
    if (r->kinds[warp->place] == OFF) return 1;
    if (step->reads_even && s->debt[sched][0] >= r->bank_ports) return 0;
    if (step->reads_odd && s->debt[sched][1] >= r->bank_ports) return 0;
    switch (step->unit) {
    case XU:
        return s->pipe[sched][XU] <= s->now + (int64_t)r->xu_queue * step->interval;
    case TENSOR: {
        Group *g = &s->groups[w / GROUP];
        return warp->products < g->admitted || s->outstanding < r->tensor_window;
    }
    case GROUP_WAIT:
        return warp->groups - s->groups[w / GROUP].groups_done <= step->pending;
    case COUNTER_WAIT:
        return warp->counters[step->amount] <= step->pending;
    case MEMORY:
        return s->pipe[sched][MEMORY] <= s->now && s->shared_queue < 4 * r->shared_bytes;
    case FMA_HEAVY:
        return s->pipe[sched][FMA_HEAVY] <= s->now && s->pipe[sched][FMA] <= s->now;
    default:
        return s->pipe[sched][step->unit] <= s->now;
    }
}

static void admit(Sm *s, int w, const Step *step) {
    Group *g = &s->groups[w / GROUP];
    Warp *warp = &s->warps[w];
    int32_t op = warp->products++;
    if (op == g->admitted) {
        if (g->admitted == g->room) {
            g->room = 2 * g->room + 64;
            g->ops = realloc(g->ops, (size_t)g->room * sizeof(Product));
            g->arrived = realloc(g->arrived, (size_t)g->room * sizeof(int64_t));
        }
        g->ops[op] = (Product){step->amount, step->from_shared, step->last_of_group, step->accumulates};
        g->arrived[op] = -1;
        g->admitted++;
        s->outstanding++;
    }
    int have = 1;
    for (int k = 0; k < GROUP; k++)
        if (s->warps[w / GROUP * GROUP + k].products <= op) have = 0;
    if (have) g->arrived[op] = s->now + 1;
    if (step->last_of_group) warp->groups++;
}

static Copy *copy(Stream *stream, int64_t from, int32_t barrier, int64_t bytes) {
    if (stream->last == stream->room) {
        stream->room = 2 * stream->room + 64;
        stream->copies = realloc(stream->copies, (size_t)stream->room * sizeof(Copy));
    }
    Copy *added = &stream->copies[stream->last++];
    *added = (Copy){from, barrier, -1, -1, bytes, bytes};
    return added;
}

/* Clocks until the first byte of a copy comes, from the near or the far half of L2. */
static int32_t copy_latency(Sm *s) {
    s->random = 1664525u * s->random + 1013904223u;
    return s->random >> 31 ? s->run->copy_far : s->run->copy_latency;
}

static void issue(Sm *s, int sched, int w) {
    Run *r = s->run;
    Warp *warp = &s->warps[w];
    const int64_t at = warp->place++;
    const Step *step = &r->table[r->steps[at]];
    const int32_t kind = r->kinds[at];
    r->issued[at] = (int32_t)s->now;
    r->busy[UNITS + 1]++;
    warp->ready = s->now + (step->stall > 1 ? step->stall : 1);
    if (kind == OFF) return;
    s->debt[sched][0] += step->reads_even;
    s->debt[sched][1] += step->reads_odd;
    int64_t start = s->now, done;
    if (step->unit == XU) {
        if (s->pipe[sched][XU] > start) start = s->pipe[sched][XU];
        s->pipe[sched][XU] = start + step->interval;
    } else if (step->unit == FMA_HEAVY) {
        s->pipe[sched][FMA_HEAVY] = start + step->interval;
        s->pipe[sched][FMA] = start + 1;
    } else if (step->unit == TENSOR) {
        admit(s, w, step);
    } else {
        s->pipe[sched][step->unit] = start + step->interval;
    }
    r->busy[step->unit] += step->unit == TENSOR ? 0 : step->interval;
    done = start + step->latency;
    int64_t sources = start + r->source_hold;
    if (step->unit == MEMORY && step->amount > 0) {
        s->shared_queue += step->amount;
        done += s->shared_queue / r->shared_bytes;
    }
    switch (kind) {
    case WAIT: {
        Mbarrier *m = &s->mbarriers[r->objects[at]];
        if ((m->completed & 1) != r->values[at]) {
            done = s->now + r->try_wait;
        } else {
            if (step->write >= 0) warp->counters[step->write]++;
            s->waiters[s->waiting++] =
                (Waiter){w, r->objects[at], r->values[at], step->write >= 0 ? step->write : -1};
            if (step->write < 0) warp->blocked = 1;
            goto read_only;
        }
        break;
    }
    case ARRIVE: {
        if (s->mbarrier_port < s->now) s->mbarrier_port = s->now;
        s->mbarrier_port += r->barrier_port;
        Mbarrier *m = &s->mbarriers[r->objects[at]];
        m->pending--;
        m->bytes += r->values[at];
        settle(s, r->objects[at], s->mbarrier_port);
        break;
    }
    case COPY_IN: {
        if (s->copy_unit < s->now) s->copy_unit = s->now;
        s->copy_unit += r->copy_issue;
        copy(&s->in, s->copy_unit + copy_latency(s), r->objects[at], r->values[at]);
        sources = s->copy_unit;
        break;
    }
    case COPY_OUT: {
        if (s->copy_unit < s->now) s->copy_unit = s->now;
        s->copy_unit += r->copy_issue;
        int64_t from = s->copy_unit > warp->copies_read ? s->copy_unit : warp->copies_read;
        warp->copies_read = from + r->values[at] / r->copy_bytes;
        copy(&s->out, from, -1, r->values[at]);
        sources = s->copy_unit;
        break;
    }
    case BARRIER_SYNC:
    case BARRIER_ARRIVE: {
        Named *n = &s->named[r->objects[at] & (NAMED - 1)];
        n->arrived++;
        if (kind == BARRIER_SYNC) { n->warps[n->waiting++] = w; warp->blocked = 1; }
        if (n->arrived >= r->values[at]) {
            for (int i = 0; i < n->waiting; i++) {
                Warp *other = &s->warps[n->warps[i]];
                other->blocked = 0;
                if (other->ready < s->now + r->named_release) other->ready = s->now + r->named_release;
            }
            n->arrived = n->waiting = 0;
        }
        break;
    }
    case WARP_COPY:
        copy(&s->in, s->now + copy_latency(s), -1, r->values[at]);
        break;
    case WARP_COPIES_END: {             /* its counter is open until all copies before have come */
        Copy *end = copy(&s->in, s->now, -1, 0);
        end->warp = w;
        end->counter = step->write;
        warp->counters[step->write]++;
        return;
    }
    case ADD:
        if (s->add_unit < s->now) s->add_unit = s->now;
        s->add_unit += r->values[at] / r->add_bytes;
        if (sources < s->add_unit) sources = s->add_unit;
        break;
    case JUMP:
        if (warp->ready < s->now + r->jump) warp->ready = s->now + r->jump;
        break;
    default:
        break;
    }
    if (step->unit == FLUSH) {
        int64_t end = warp->copies_read > s->now ? warp->copies_read : s->now;
        sources = end + r->store_latency;
    }
    if (step->write >= 0) { warp->counters[step->write]++; push_due(s, done, w, step->write); }
read_only:
    if (step->read >= 0) { warp->counters[step->read]++; push_due(s, sources, w, step->read); }
}

/* The k-th warp of a scheduler to be asked: the oldest first, or the one that issued last and then
 * the youngest first, or each in its turn. */
static int candidate(int pick, int k, int last, int of) {
    if (pick == OLDEST) return k;
    if (pick == IN_TURN) return (last + 1 + k) % of;
    if (k == 0) return last;
    return of - k > last ? of - k : of - k - 1;
}

int simulate(Run *r) {
    Sm *s = calloc(1, sizeof(Sm));
    if (!s) return 1;
    s->run = r;
    s->random = r->seed;
    s->last_group = 0;
    for (int w = 0; w < r->warps; w++) {
        s->warps[w].place = r->first[w];
        s->warps[w].end = r->first[w + 1];
        s->warps[w].ready = r->start[w];
    }
    for (int b = 0; b < r->barriers; b++) s->mbarriers[b].pending = r->arrivals[b];
    int64_t alive = 0, quiet = 0;
    for (int w = 0; w < r->warps; w++) alive += s->warps[w].place < s->warps[w].end;
    r->clocks = -1;
    for (s->now = 0; alive > 0 && s->now < r->limit; s->now++) {
        while (s->dues && s->due[0].at <= s->now) {
            Due d = pop_due(s);
            if (d.warp < 0) s->groups[-1 - d.warp].groups_done++;
            else if (d.counter < 0) s->warps[d.warp].blocked = 0;
            else s->warps[d.warp].counters[d.counter]--;
            quiet = 0;
        }
        double port = r->shared_bytes;
        stream_advance(s, &s->in, &port);
        stream_advance(s, &s->out, &port);
        if (s->shared_queue > 0) {
            int64_t part = s->shared_queue < (int64_t)port ? s->shared_queue : (int64_t)port;
            s->shared_queue -= part;
            port -= (double)part;
        }
        tensor_advance(s, &port);
        if (port < r->shared_bytes) r->busy[UNITS]++;
        const int accumulating = s->begun && s->line[0].accumulates;
        for (int sched = 0; sched < SCHEDULERS; sched++) {
            for (int bank = 0; bank < 2; bank++) {
                double *debt = &s->debt[sched][bank];
                *debt -= r->bank_ports;
                if (*debt < 0) *debt = 0;
                *debt += accumulating * r->tensor_register_reads / 2.0;
            }
            int chosen = -1;
            const int of = (r->warps + SCHEDULERS - 1) / SCHEDULERS;
            for (int k = 0; k < of && chosen < 0; k++) {
                int w = candidate(r->pick, k, s->last[sched], of) * SCHEDULERS + sched;
                if (w < r->warps && may_issue(s, sched, w)) chosen = w;
            }
            if (chosen >= 0) s->last[sched] = chosen / SCHEDULERS;
            if (chosen < 0) continue;
            issue(s, sched, chosen);
            if (s->warps[chosen].place >= s->warps[chosen].end) alive--;
            quiet = 0;
        }
        if (++quiet > 100000) break;
    }
    if (alive == 0) r->clocks = s->now;
    for (int g = 0; g < MAX_WARPS / GROUP; g++) { free(s->groups[g].ops); free(s->groups[g].arrived); }
    free(s->due);
    free(s->in.copies);
    free(s->out.copies);
    free(s);
    return 0;
}
