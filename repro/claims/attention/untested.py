"""Claims on attention of which nothing is on record here, with what a test would take."""

from __future__ import annotations

from repro.claims.register import untested
from repro.claims.works import FA1, FA2, FA3, FLASH_DECODING, RABE_STAATS, RING, TILING

H100 = "an H100 with FlashAttention-3"

untested(
    "FA-1 Proposition 3",
    "no exact algorithm has o(N² d² / M) accesses for all M in [d, Nd]",
    FA1,
    "section 3.2",
    "a proof: no run can bear out a lower bound over all algorithms",
)
untested(
    "FA-1 Tables 1 to 3",
    "BERT 15 % and GPT-2 3x faster to train, 2.4x on long-range arena",
    FA1,
    "section 4",
    "eight A100s for days, and the training sets",
)
untested("FA-2 training", "225 TFLOP/s a card in training, 72 % of peak", FA2, "Table 1", "eight A100s of 80 GB")
untested(
    "FA-3 Table 2",
    "661 TFLOP/s, 582 without pipelining, 570 without warp specialisation",
    FA3,
    "Table 2",
    f"{H100}; its own three forms are printed, and ours are not timed",
)
untested(
    "FA-3 throughput, NeurIPS",
    "up to 840 TFLOP/s in bf16, 85 % of an H100",
    FA3,
    "NeurIPS version",
    f"{H100}; the figures of that version are not on record",
)
untested(
    "Flash-Decoding, 8x",
    "generation up to 8x faster for long contexts",
    FLASH_DECODING,
    "benchmark on CodeLlama 34B",
    "four A100s and the model",
)
untested(
    "Rabe & Staats, speed",
    "13 % slower in inference and 35 % in training at n = 16384",
    RABE_STAATS,
    "Tables 2 and 3",
    "a TPU v3",
)
untested(
    "ring attention, overlap",
    "communication is hidden where a block has enough tokens",
    RING,
    "section 3",
    "several cards joined by links of known bandwidth, and a clock",
)
untested(
    "Note latencies",
    "1, about 10 and about 500 cycles for registers, shared memory and HBM",
    TILING,
    "section 1.1",
    "a card: `make measure EXPERIMENT=gpu-ceilings`",
)
