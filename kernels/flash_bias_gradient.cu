// Around flash_backward.cu, which makes the gradient of a bias: zeroes where it is sent, and adds up
// what heads or items of a batch share.
//
// flash_bias_zero  x        write  all of it: the pairs that no tile visits have gradient 0, and
//                                  atomic additions need something to add to
// flash_bias_sum   accum    read   (items, heads, seqlen_q, seqlen_k) fp32
//                  dbias    write  its sum over the dimensions that the bias lacks, in the io type
//
// One thread block per row of the result; items first, then heads, in increasing order.
//
// Limits: rows of any length and alignment.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE   0 fp16, 1 bf16, 2 fp32: of x, of dbias

#include "device.cuh"

extern "C" __global__ void flash_bias_zero(Tensor4<io_t> x, int heads, int rows, int columns) {
    const int row = blockIdx.x % rows, head = blockIdx.x / rows % heads;
    io_t* const there = x.row(blockIdx.x / rows / heads, head, row);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) st_global(there + c, io_t{});
}

extern "C" __global__ void flash_bias_sum(Tensor4<const float> accum, Tensor4<io_t> dbias,
                                          int heads, int rows, int columns, int items_summed,
                                          int heads_summed) {
    const int row = blockIdx.x % rows, head = blockIdx.x / rows % heads;
    const int item = blockIdx.x / rows / heads;
    io_t* const there = dbias.row(item, head, row);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        float sum = 0.0f;
        for (int b = 0; b < items_summed; ++b)
            for (int h = 0; h < heads_summed; ++h)
                sum += ld_global(accum.row(item + b, head + h, row) + c);
        st_global(there + c, from_float<io_t>(sum));
    }
}
