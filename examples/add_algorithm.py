"""A new algorithm: its kernel, its formula, and the proof that they agree.

Two-pass attention. The first pass over K finds a row's maximum and sum, the second recomputes the
scores and weighs V, so K is read twice and nothing is rescaled. One warp takes one query row.

The source uses the package's device vocabulary (``ld_global``, ``st_shared``, ...), so the same
text compiles for a GPU and runs here, on the CPU, where every byte is counted.
"""

from __future__ import annotations

import numpy as np

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import Traffic, predict_traffic
from kernels.host import HostBackend
from kernels.launch import Kernel, from_numpy

SOURCE = r"""
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(32)
two_pass(Tensor4<io_t> q, Tensor4<io_t> k, Tensor4<io_t> v, Tensor4<io_t> out, int heads,
         int seqlen_q, int seqlen_k, float scale) {
    const int64 block = blockIdx.x;
    const int64 row = block % seqlen_q, head = block / seqlen_q % heads;
    const int64 batch = block / seqlen_q / heads;
    const int lane = threadIdx.x;

    float* query = reinterpret_cast<float*>(shared_memory());
    for (int c = lane; c < HEAD_DIM; c += 32)
        st_shared(query + c, to_float(ld_global(q.row(batch, head, row) + c)));
    block_sync();
    auto score = [&](int j) {  // times log2(e), for exp2
        float sum = 0.0f;
        for (int c = 0; c < HEAD_DIM; ++c)
            sum += ld_shared(query + c) * to_float(ld_global(k.row(batch, head, j) + c));
        return sum * scale * 1.4426950408889634f;
    };

    float top = -1e30f, total = 0.0f;  // of this lane's keys: lane, lane + 32, ...
    for (int j = lane; j < seqlen_k; j += 32) {
        const float s = score(j), larger = s > top ? s : top;
        total = total * exp2_approx(top - larger) + exp2_approx(s - larger);
        top = larger;
    }
    for (int step = 16; step > 0; step /= 2) {
        const float other_top = shfl_xor(top, step), other_total = shfl_xor(total, step);
        const float larger = other_top > top ? other_top : top;
        total = total * exp2_approx(top - larger) + other_total * exp2_approx(other_top - larger);
        top = larger;
    }

    float sum[HEAD_DIM];
    for (int c = 0; c < HEAD_DIM; ++c) sum[c] = 0.0f;
    for (int j = lane; j < seqlen_k; j += 32) {
        const float p = exp2_approx(score(j) - top) / total;
        for (int c = 0; c < HEAD_DIM; ++c)
            sum[c] += p * to_float(ld_global(v.row(batch, head, j) + c));
    }
    for (int c = 0; c < HEAD_DIM; ++c) {
        for (int step = 16; step > 0; step /= 2) sum[c] += shfl_xor(sum[c], step);
        if (lane == c % 32) st_global(out.row(batch, head, row) + c, from_float<io_t>(sum[c]));
    }
}
"""


def predicted(shape: AttentionShape) -> Traffic:
    """Bytes at the SM boundary: per query row q and out once, K twice, V once."""
    rows = shape.batch * shape.heads * shape.seqlen_q
    row_bytes = shape.head_dim * shape.itemsize
    return Traffic(
        {
            "two_pass": {
                ("q", "read"): rows * row_bytes,
                ("k", "read"): 2 * rows * shape.seqlen_k * row_bytes,
                ("v", "read"): rows * shape.seqlen_k * row_bytes,
                ("out", "write"): rows * row_bytes,
            }
        }
    )


def run(shape: AttentionShape) -> tuple[Traffic, float]:
    """Execute the kernel on N(0, 1) inputs; the counted bytes and the error against float64."""
    random = np.random.default_rng(0)
    query = (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
    key = (shape.batch, shape.heads, shape.seqlen_k, shape.head_dim)
    q, k, v = (random.standard_normal(size).astype(np.float16) for size in (query, key, key))
    out = np.empty_like(q)
    scale = shape.head_dim**-0.5
    backend = HostBackend()
    kernel = Kernel(SOURCE, "two_pass", (("DTYPE", 0), ("HEAD_DIM", shape.head_dim)), threads=32)
    backend.launch(
        kernel,
        (shape.batch * shape.heads * shape.seqlen_q, 1, 1),
        4 * shape.head_dim,
        [
            from_numpy("q", q, "r"),
            from_numpy("k", k, "r"),
            from_numpy("v", v, "r"),
            from_numpy("out", out, "w"),
            np.int32(shape.heads),
            np.int32(shape.seqlen_q),
            np.int32(shape.seqlen_k),
            np.float32(scale),
        ],
    )
    scores = scale * q.astype(float) @ k.astype(float).swapaxes(2, 3)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    right = weights / weights.sum(axis=3, keepdims=True) @ v.astype(float)
    return Traffic(backend.traffic), float(np.abs(out - right).max())


def main() -> None:
    """Prediction beside count, and what tiles would have saved."""
    shape = AttentionShape(1, 2, 100, 130, 64)
    counted, error = run(shape)
    formula = predicted(shape)
    print(f"{'tensor':14}{'predicted':>12}{'counted':>12}")
    for (tensor, direction), count in formula.by_tensor().items():
        got = counted.by_tensor()[tensor, direction]
        print(f"{tensor + ' ' + direction:14}{count:12}{got:12}")
    assert counted == formula
    flash = predict_traffic("flash", shape, Tile(64, 64), "forward").total_bytes
    print(
        f"largest error {error:.1e}; with tiles of 64 x 64 it would be "
        f"{formula.total_bytes / flash:.0f} times fewer bytes"
    )


if __name__ == "__main__":
    main()
