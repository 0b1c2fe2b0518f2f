// The gradient of the sinks' logits, after flash_backward_rows.cu has made delta.
//
// A sink is a key of value 0 whose score is the logit s of its head: its weight in row i is
// p_i = exp(s - lse_i), and d s = - sum_i p_i D_i with D = rowsum(dO o O) - dlse, as for any other score
// (FlashAttention-2 (Dao 2023), Algorithm 2, with dP = 0).
//
// Loop order: one thread block per head; items, then rows in steps of THREADS, in increasing order, so
// that every run adds in the same order.
//
// Reads and writes, in bytes, once: lse, delta read B H Nq 4; sink_logits read H 4; dsink_logits write H 4.
//
// Limits: none.

constexpr int THREADS = 512;

#include "device.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
flash_sink_postprocess(Tensor3<const float> lse, Tensor3<const float> delta,
                       Tensor1<const float> sink_logits, Tensor1<float> dsink_logits, int batches,
                       int seqlen_q) {
    const int head = blockIdx.x;
    float* const scratch = reinterpret_cast<float*>(shared_memory());  // WARPS sums and the logit
    if (threadIdx.x == 0) st_shared(scratch + WARPS, ld_global(sink_logits.data + head));
    block_sync();
    const float sink = ld_shared(scratch + WARPS);
    float sum = 0.0f;
    for (int batch = 0; batch < batches; ++batch)
        for (int r = threadIdx.x; r < seqlen_q; r += THREADS) {
            // A logit of -inf has no weight, where a row sees nothing else either.
            const float past = sink - ld_global(lse.at(batch, head, r));
            const float weight = sink == neg_infinity() ? 0.0f : exp_approx(past);
            sum = fmaf(-weight, ld_global(delta.at(batch, head, r)), sum);
        }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) st_global(dsink_logits.data + head, sum);
}
