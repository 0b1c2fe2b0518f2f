"""Claims on attention of which nothing is on record here, with what a test would take."""

from __future__ import annotations

from repro.claims.register import untested
from repro.claims.works import FA1, FA2, FA3, FLASH_DECODING, MILAKOV, RABE_STAATS, RING, TILING

A100 = "an A100 with FlashAttention 1 (2022), the run of the paper"
H100 = "an H100 with FlashAttention-3"
_ROWS = (
    (
        "FA-1 Theorem 1",
        "exact attention in O(N² d) operations with O(N) memory beyond inputs and output",
        FA1,
        "section 3.1",
        "the memory of every kernel over N: rows `variants` and `accuracy` have its two halves at some lengths",
    ),
    (
        "FA-1 Proposition 3",
        "no exact algorithm has o(N² d² / M) accesses for all M in [d, Nd]",
        FA1,
        "section 3.2",
        "a proof: no run can bear out a lower bound over all algorithms",
    ),
    (
        "FA-1 Theorem 5",
        "accesses of the backward grow as N² d² / M",
        FA1,
        "section B.4",
        "the backward executed over M, as traffic-scaling does with the forward",
    ),
    ("FA-1 Fig. 2 left, run time", "41.7 ms by standard attention, 7.3 ms by FlashAttention", FA1, "Fig. 2 left", A100),
    ("FA-1 Fig. 6", "up to 3x faster with a causal mask at d = 128", FA1, "section E.5", A100),
    (
        "FA-1 Fig. 8",
        "less gain on a T4, whose shared memory is smaller",
        FA1,
        "section E.5",
        "a T4; the plot of the forward that was released repeats another card's",
    ),
    (
        "FA-1 Tables 1 to 3",
        "BERT 15 % and GPT-2 3x faster to train, 2.4x on long-range arena",
        FA1,
        "section 4",
        "eight A100s for days, and the training sets",
    ),
    ("FA-2 training", "225 TFLOP/s a card in training, 72 % of peak", FA2, "Table 1", "eight A100s of 80 GB"),
    (
        "FA-3 Table 2",
        "661 TFLOP/s, 582 without pipelining, 570 without warp specialisation",
        FA3,
        "Table 2",
        f"{H100}; its own three forms are printed, and ours are not timed",
    ),
    (
        "FA-3 throughput, NeurIPS",
        "up to 840 TFLOP/s in bf16, 85 % of an H100",
        FA3,
        "NeurIPS version",
        f"{H100}; the figures of that version are not on record",
    ),
    (
        "Flash-Decoding, 8x",
        "generation up to 8x faster for long contexts",
        FLASH_DECODING,
        "benchmark on CodeLlama 34B",
        "four A100s and the model",
    ),
    (
        "Rabe & Staats, O(√n)",
        "the practical algorithm needs O(√n) memory",
        RABE_STAATS,
        "section 3",
        "chunks of √n keys over n; ours are of 1024 and 4096 as in its Fig. 1",
    ),
    (
        "Rabe & Staats, speed",
        "13 % slower in inference and 35 % in training at n = 16384",
        RABE_STAATS,
        "Tables 2 and 3",
        "a TPU v3",
    ),
    (
        "ring attention, overlap",
        "communication is hidden where a block has enough tokens",
        RING,
        "section 3",
        "several cards joined by links of known bandwidth, and a clock",
    ),
    (
        "ring attention, memory",
        "memory of a rank does not depend on the length of all",
        RING,
        "section 3",
        "peaks of a rank at several lengths and as many ranks",
    ),
    (
        "Milakov accesses",
        "online softmax reads and writes 3 times an element instead of 4; with top-k 1 instead of 5",
        MILAKOV,
        "sections 3 and 4",
        "an experiment of `kernels/beside/online_softmax.cu`, whose bytes a test counts",
    ),
    (
        "Note latencies",
        "1, about 10 and about 500 cycles for registers, shared memory and HBM",
        TILING,
        "section 1.1",
        "a card: `make measure EXPERIMENT=gpu-ceilings`",
    ),
    (
        "K6, every k layers",
        "a checkpoint every k layers needs O(L / k) memory",
        TILING,
        "section 2.1",
        "peaks of uniform plans over L at a fixed k",
    ),
)

for row in _ROWS:
    untested(*row)
