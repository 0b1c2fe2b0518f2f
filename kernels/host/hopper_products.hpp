// Warpgroup products (wgmma) and stmatrix on the host.
//
// A product is carried out when its warp waits for it: registers read earlier hold old values, and
// registers or shared memory changed in between show. Operands are found by the bits of their
// descriptors alone.
#pragma once

#include "collectives.hpp"
#include "hopper_copies.hpp"

namespace host {

// ---- warpgroup products ----------------------------------------------------------------------------

// Where a 16-byte piece of an operand lies: element (mn, k) for k = 0..7 of a K-major operand's row,
// or (mn..mn + 7, k) of an MN-major one (PTX ISA, "Strides", 128-byte swizzle).
struct Descriptor {
    std::size_t start, leading, stride;

    Descriptor(Worker& w, std::uint64_t bits, Site site)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1)
            w.fail("limit", -1, 0, "wgmma at %s:%d: descriptor with swizzle mode %d, only 1 (128 "
                   "bytes) is known",
                   site.file, site.line, static_cast<int>(bits >> 62));
        if (bits >> 49 & 7)
            w.fail("limit", -1, 0, "wgmma at %s:%d: descriptor with a base offset", site.file,
                   site.line);
    }
    std::size_t k_major(unsigned mn, unsigned k) const {
        return swizzle(start + mn / 8 * stride + mn % 8 * SWIZZLED_ROW + k * 2);
    }
    std::size_t mn_major(unsigned mn, unsigned k) const {
        return swizzle(start + mn / 64 * leading + k / 8 * stride + k % 8 * SWIZZLED_ROW +
                       mn % 64 * 2);
    }
};

// Rows first..first + rows - 1 of an operand, 16 deep, as out[row][k].
template <bool CHECKS>
void fetch_operand(Worker& w, const Descriptor& d, bool transposed, unsigned first, unsigned rows,
                   std::uint16_t (*out)[16], std::uint32_t issued, Site site) {
    for (unsigned i = 0; i < rows * 2; ++i) {
        const unsigned mn = first + (transposed ? i % (rows / 8) * 8 : i / 2);
        const unsigned k = transposed ? i / (rows / 8) : i % 2 * 8;
        const std::size_t at = transposed ? d.mn_major(mn, k) : d.k_major(mn, k);
        if (at + 16 > w.shared_bytes)
            w.fail("out of bounds", -1, static_cast<std::int64_t>(at),
                   "wgmma at %s:%d reads offset %zu of %zu bytes of shared memory", site.file,
                   site.line, at, w.shared_bytes);
        engine_read<CHECKS>(w, at, issued, "wgmma", site);
        if (!out) continue;
        std::uint16_t values[8];
        std::memcpy(values, data(w.shared) + at, 16);
        for (unsigned e = 0; e < 8; ++e) {
            if (transposed)
                out[mn - first + e][k] = values[e];
            else
                out[mn - first][k + e] = values[e];
        }
    }
}

template <bool CHECKS>
void execute(Worker& w, const WarpProduct& p) {
    const WarpgroupProduct& m = p.lanes[0];
    // A warp reads its own 16 rows of A; what it reads of B serves all four.
    w.shared_traffic[READ] += (m.a_registers ? 0 : 16 * 16 * 2) + (p.warp == 0 ? m.n * 16 * 2 : 0);
    std::uint16_t b[256][16];
    fetch_operand<CHECKS>(w, Descriptor(w, m.b, p.site), m.transposed_b, 0, m.n, b, p.issued,
                          p.site);
    std::uint32_t a_registers[32][4], b_registers[32][2];
    const std::uint32_t* a_of[32];
    const std::uint32_t* b_of[32];
    float* d_of[32];
    if (m.a_registers) {
        for (int l = 0; l < 32; ++l) a_of[l] = p.lanes[l].a_registers;
    } else {
        std::uint16_t a[16][16];
        fetch_operand<CHECKS>(w, Descriptor(w, m.a, p.site), m.transposed_a, p.warp * 16, 16, a,
                              p.issued, p.site);
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, q = l % 4 * 2;
            std::memcpy(&a_registers[l][0], &a[g][q], 4);
            std::memcpy(&a_registers[l][1], &a[g + 8][q], 4);
            std::memcpy(&a_registers[l][2], &a[g][q + 8], 4);
            std::memcpy(&a_registers[l][3], &a[g + 8][q + 8], 4);
            a_of[l] = a_registers[l];
        }
    }
    for (unsigned column = 0; column < m.n; column += 8) {
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, q = l % 4 * 2;
            std::memcpy(&b_registers[l][0], &b[column + g][q], 4);
            std::memcpy(&b_registers[l][1], &b[column + g][q + 8], 4);
            b_of[l] = b_registers[l];
            d_of[l] = p.lanes[l].d + column / 2;
            if (m.first) std::memset(d_of[l], 0, 16);
        }
        if (m.type == FP16)
            multiply<FP16>(d_of, a_of, b_of);
        else
            multiply<BF16>(d_of, a_of, b_of);
    }
}

template <bool CHECKS>
Switch wgmma(const WarpgroupProduct& product, Site site) {
    Worker& w = *current_worker;
    Warp& warp = *w.warp;
    warp.in[w.lane()] = &product;
    if (!w.arrive(Wait::WGMMA, site)) return w.leave();
    const unsigned index = w.running / 32;
    if (w.launch->threads % 128)
        w.fail("limit", -1, 0, "wgmma at %s:%d in a block of %d threads: whole warpgroups only",
               site.file, site.line, w.launch->threads);
    WarpProduct p;
    p.warp = index % 4;
    p.group = warp.product_group;
    p.site = site;
    for (int l = 0; l < 32; ++l) p.lanes[l] = *static_cast<const WarpgroupProduct*>(warp.in[l]);
    const WarpgroupProduct& m = p.lanes[0];
    for (const auto& lane : p.lanes)
        if (lane.a != m.a || lane.b != m.b)
            w.fail("divergence", -1, 0, "wgmma at %s:%d with different descriptors in a warp",
                   site.file, site.line);
    if constexpr (CHECKS) {
        fetch_operand<CHECKS>(w, Descriptor(w, m.b, site), m.transposed_b, 0, m.n, nullptr,
                              NOT_YET, site);
        if (!m.a_registers)
            fetch_operand<CHECKS>(w, Descriptor(w, m.a, site), m.transposed_a, p.warp * 16, 16,
                                  nullptr, NOT_YET, site);
    }
    p.issued = issue_time(w);
    warp.products.push_back(p);
    w.finish_collective();
    return {};
}

inline Switch wgmma_commit(Site site) {
    Worker& w = *current_worker;
    if (!w.arrive(Wait::WGMMA_COMMIT, site)) return w.leave();
    ++w.warp->product_group;
    w.finish_collective();
    return {};
}

template <bool CHECKS>
Switch wgmma_wait(int pending, Site site) {
    Worker& w = *current_worker;
    if (!w.arrive(Wait::WGMMA_WAIT, site)) return w.leave();
    Warp& warp = *w.warp;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < warp.products.size(); ++i) {
        if (warp.products[i].group + static_cast<std::uint32_t>(pending) >= warp.product_group)
            warp.products[kept++] = warp.products[i];
        else
            execute<CHECKS>(w, warp.products[i]);
    }
    warp.products.resize(kept);
    // The lanes meet here: what each read through the products is done for all.
    Clock& c = w.clock();
    c.seen[w.running / 32] = c.time;
    c.advance(w.tick(), w.clock_warps);
    w.finish_collective();
    return {};
}

// The inverse of ldmatrix: lane l's registers hold fragment elements, rows are addressed by lanes.
template <bool CHECKS>
Switch stmatrix_x4(void* row, const unsigned* r, bool transposed, Site site) {
    Worker& w = *current_worker;
    if constexpr (CHECKS) check_shared(w, row, 16, true, "stmatrix", site);
    w.shared_traffic[WRITE] += 16;
    Warp& warp = *w.warp;
    warp.out[w.lane()] = row;
    warp.in[w.lane()] = r;
    if (!w.arrive(Wait::STMATRIX, site)) return w.leave();
    for (int lane = 0; lane < 32; ++lane) {
        const auto* registers = static_cast<const std::uint32_t*>(warp.in[lane]);
        const int g = lane / 4, q = lane % 4 * 2;
        for (int m = 0; m < 4; ++m) {
            std::uint16_t pair[2];
            std::memcpy(pair, &registers[m], 4);
            for (int e = 0; e < 2; ++e) {
                const int line = transposed ? q + e : g, column = transposed ? g : q + e;
                char* const to = static_cast<char*>(data(warp.out[8 * m + line]));
                std::memcpy(to + 2 * column, &pair[e], 2);
            }
        }
    }
    w.finish_collective();
    return {};
}

}  // namespace host
