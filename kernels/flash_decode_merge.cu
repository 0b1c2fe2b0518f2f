// The second kernel of decoding: out and lse of each row from those of its splits.
//
// lse = log(sum over splits of e^lse_s), out = sum over splits of e^(lse_s - lse) out_s, in one pass:
// 32 splits at a time, rescaled as in the online softmax (FlashAttention 2022, Algorithm 1). One warp
// a row; a lane has four neighbouring columns, or several such. Nothing depends on the order in which
// flash_decode's blocks ran.
//
// Reads and writes, in bytes, of the splits that have keys (analysis/sums/decode.py):
//   part_out   read  rows D 4  per split      part_lse  read  rows 4  per split
//   SEQLENS    seqlens  read  4  per row
//   out        write rows D e                 lse       write rows 4
//
// Limits: head_dim <= HEAD_DIM, a multiple of 8; rows start on 16-byte boundaries.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE      0 fp16, 1 bf16, 2 fp32: of out
// HEAD_DIM   columns of a tile; the argument head_dim may be smaller
// BLOCK_N    keys of flash_decode's tiles: which splits have keys follows
// SEQLENS    1: sequence b has seqlens[b] keys; 0: all have seqlen_k
#include "decode.cuh"
#include "device.cuh"
#include "tile.cuh"

constexpr int MERGE_WARPS = 4;  // rows a block of the merging kernel

// out and lse of each row from those of its splits, one warp a row.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
flash_decode_merge(Tensor4<const float> part_out, Tensor4<const float> part_lse, Tensor4<io_t> out,
                   Tensor3<float> lse, int heads, int seqlen_q, int seqlen_k, int head_dim,
                   int splits, int rows
#if SEQLENS
                   , Tensor1<const int> seqlens
#endif
) {
    const int row = blockIdx.x * MERGE_WARPS + warp_id(), lane = lane_id();
    if (row >= rows) return;
    const int query = row % seqlen_q, head = row / seqlen_q % heads;
    const int batch = row / seqlen_q / heads;
    int keys = seqlen_k;
#if SEQLENS
    keys = lane == 0 ? ld_global(seqlens.data + batch) : 0;
    keys = shfl(keys, 0);
#endif
    auto has_keys = [=](int split) {
        const Span<BLOCK_N> span(keys, split, splits);
        return span.first < span.end;
    };
    constexpr int PIECES = (HEAD_DIM / 4 + 31) / 32;  // of four columns a lane
    float acc[PIECES][4] = {};
    float max = neg_infinity(), sum = 0.0f;
    const float* const of_splits = part_lse.row(batch, head, query);
    for (int first = 0; first < splits; first += 32) {
        const int own = first + lane;
        const float value =
            own < splits && has_keys(own) ? ld_global(of_splits + own) : neg_infinity();
        float new_max = fmaxf(max, value);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) new_max = fmaxf(new_max, shfl_xor(new_max, mask));
        const float safe_max = new_max == neg_infinity() ? 0.0f : new_max;
        const float rescale = exp2_approx((max - safe_max) * LOG2E);
        const float weight = exp2_approx((value - safe_max) * LOG2E);
        max = new_max;
        float added = weight;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) added += shfl_xor(added, mask);
        sum = sum * rescale + added;
#pragma unroll
        for (int x = 0; x < PIECES; ++x)
#pragma unroll
            for (int y = 0; y < 4; ++y) acc[x][y] *= rescale;
#pragma unroll 1
        for (int s = first; s < min_int(first + 32, splits); ++s) {
            const float share = shfl(weight, s - first);
            if (!has_keys(s)) continue;
            const float* const from = part_out.row(int64(batch) * splits + s, head, query);
#pragma unroll
            for (int x = 0; x < PIECES; ++x) {
                const int col = (x * 32 + lane) * 4;
                if (col >= head_dim) continue;
                const auto four = ld_global(reinterpret_cast<const Vec<float, 4>*>(from + col));
#pragma unroll
                for (int y = 0; y < 4; ++y) acc[x][y] = fmaf(share, four[y], acc[x][y]);
            }
        }
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    io_t* const to = out.row(batch, head, query);
#pragma unroll
    for (int x = 0; x < PIECES; ++x) {
        const int col = (x * 32 + lane) * 4;
        if (col >= head_dim) continue;
        Vec<io_t, 4> rounded;
#pragma unroll
        for (int y = 0; y < 4; ++y) rounded[y] = from_float<io_t>(acc[x][y] * inverse);
        st_global(reinterpret_cast<Vec<io_t, 4>*>(to + col), rounded);
    }
    if (lane == 0)
        st_global(lse.at(batch, head, query),
                  sum == 0.0f ? neg_infinity() : fmaf(LN2, log2_approx(sum), max));
}
