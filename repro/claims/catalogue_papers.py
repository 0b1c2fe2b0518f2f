"""The papers' claims: table or figure, and what differs from the run behind it."""

from __future__ import annotations

FA1 = "FlashAttention (Dao et al. 2022)"
FA2 = "FlashAttention-2 (Dao 2023)"
FA3 = "FlashAttention-3 (Shah et al. 2024)"
CHEN = "Sublinear memory cost (Chen et al. 2016)"
KORTHIKANTI = "Reducing activation recomputation (Korthikanti et al. 2022)"
ZERO = "ZeRO (Rajbhandari et al. 2020)"
TODAY = "H200, PyTorch 2.11; FlashAttention-2; no mask, no dropout"
RANKS = "2 and 4 gloo ranks of a CPU"

#: Claim -> what it says, where it stands, the figure that shows it, and what else is to be said.
PAPERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "FA-1 Fig. 1 right": (
        "one fused kernel is 7.6x faster than five", f"{FA1}, Fig. 1 right", "fa1_fig1_right",
        {"conditions": "H200, PyTorch 2.11; the caption names neither batch, heads nor card. The "
                       "predicted ratio is of the kernel as released; docs/pages/l2.md says why it "
                       "was 10.4 and 10.7 before"},
    ),
    "FA-1 Fig. 2 left, standard": (
        "standard attention moves 40.3 GB, forward + backward", f"{FA1}, Fig. 2 left",
        "fa1_fig2_left",
        {"conditions": "like for like but for the software: PyTorch 2.11 splits scale, mask and "
                       "softmax into kernels of their own; without mask and dropout it moves "
                       "40.36 GB, which is another list of kernels",
         "chosen": "18 N² + 12 Nd: an integer list chosen to match"},
    ),
    "FA-1 Fig. 2 left, flash": (
        "FlashAttention moves 4.4 GB, forward + backward", f"{FA1}, Fig. 2 left", "fa1_fig2_left",
        {"conditions": "an A100's counter; ours is a count at the SM boundary",
         "chosen": "33 Nd: integers chosen to match; no mechanism is identified"},
    ),
    "FA-1 Fig. 2 left, GFLOPs": (
        "66.6 and 75.2 GFLOPs, forward + backward, at batch 64 with 16 heads",
        f"{FA1}, Fig. 2 left", "fa1_fig2_left",
        {"conditions": "nothing was run: printed numbers against products; 75.2 is seven products "
                       "of 80 heads (5 x 16), so the batch named may be the error (a "
                       "hypothesis)"},
    ),
    "FA-1 Fig. 2 middle": (
        "forward accesses fall as 1/Bc: 6.56, 3.37, 1.75, 0.95 GB for Bc = 64 to 512",
        f"{FA1}, Fig. 2 middle", "fa1_fig2_middle",
        {"conditions": "an A100's counter; ours is a count at the SM boundary",
         "chosen": "3 Tc + 1: integers chosen to match; no mechanism is identified"},
    ),
    "Flash-Decoding": (
        "decoding takes about the same time for 64k tokens, whatever sequences they belong to",
        "Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), micro-benchmarks", "decode_published",
        {"conditions": "an A100, 40 or 80 GB is not said; nothing of it was run here"},
    ),
    "FA-1 9x accesses": (
        "up to 9x fewer HBM accesses", f"{FA1}, section 1 and Fig. 2", "fa1_fig2_left",
        {"conditions": TODAY},
    ),
    "FA-1 Fig. 2 right": (
        "run time of block-sparse attention is affine in the share s of blocks, as its traffic is",
        f"{FA1}, Fig. 2 right", "block_sparse", {"conditions": "batch, heads and card not named"},
    ),
    "FA-1 Fig. 3 left": (
        "up to 3x faster than standard attention for N up to 2K",
        f"{FA1}, section 4.3, Fig. 3 left", "fa1_fig3_runtime", {"conditions": TODAY},
    ),
    "FA-1 Fig. 3 right": (
        "peak memory of standard attention and of FlashAttention, 16 printed points",
        f"{FA1}, Table 21", "fa1_fig3_memory",
        {"conditions": "H200, PyTorch 2.11, whose standard attention keeps 4 Nd less"},
    ),
    "FA-1 20x memory": (
        "up to 20x less memory than standard attention (N = 4096)", f"{FA1}, section 4.3",
        "fa1_fig3_memory", {"conditions": "H200, PyTorch 2.11; workspace taken off"},
    ),
    "FA-1 Theorem 2": (
        "accesses grow as N² d² / M: exponents 2, 2, -1 in N, d, M", f"{FA1}, Theorem 2",
        "traffic_scaling",
        {"conditions": "our kernels of its Algorithm 1, executed and counted on the host up to "
                       "N = 1024: what the algorithm moves, not the lower bound of Proposition 3"},
    ),
    "FA-1 Prop. 4": (
        "accesses of block-sparse attention are affine in the share s of blocks",
        f"{FA1}, Proposition 4", "block_sparse",
        {"conditions": "our kernels, executed and counted on the host at N = 1024"},
    ),
    "FA-2 throughput": (
        "up to 230 TFLOP/s, 73 % of an A100", f"{FA2}, section 4 and figures", "throughput",
        {"conditions": "text against its own figure; no A100 here"},
    ),
    "FA-3 throughput": (
        "up to 740 TFLOP/s in fp16, 75 % of an H100", f"{FA3}, abstract and Fig. 5", "throughput",
        {"conditions": "text against its own figure; its kernels were not run here"},
    ),
    "FA-3 Table 3": (
        "in fp16 with outliers flash errs 1.7x less than standard attention", f"{FA3}, Table 3",
        "accuracy", {"conditions": "another length and head dimension; ours on the host backend"},
    ),
    "Rabe & Staats": (
        "chunked attention: 59x less overhead in inference and 32x in training at N = 16384",
        "Self-attention does not need O(n²) memory (Rabe, Staats 2021), Tables 2 and 3",
        "rabe-staats",
        {"conditions": "theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32"},
    ),
    "Chen Fig. 5": (
        "a 1,000-layer ResNet trains in 7 GB instead of 48 GB", f"{CHEN}, abstract and Fig. 5",
        "chen-resnet",
        {"conditions": "the network of the authors' example, in PyTorch: what autograd keeps, "
                       "counted without data; the plan executed, its peak with weights and "
                       "gradients; theirs are of the whole GPU under MXNet's in-place and sharing",
         "chosen": "330 bottlenecks, middle groups in the example's proportion 2:3, activation "
                   "last as in the example: the paper prints neither"},
    ),
    "Chen Fig. 7": (
        "the sublinear plan costs about 30 % more time", f"{CHEN}, Fig. 7", "checkpoint_time",
        {"conditions": "the released ResNet of 200 layers with 2 images instead of 32, the LSTM "
                       "at its shortest; one CPU core, in turns with autograd"},
    ),
    "Korthikanti Eq. 1": (
        "a layer saves sbh(34 + 5as/h) bytes, 34 sbh with selective recomputation",
        f"{KORTHIKANTI}, Eq. 1", "checkpoint_layer_bytes",
        {"conditions": "one layer in PyTorch on a CPU"},
    ),
    "Korthikanti Table 2": (
        "bytes a layer saves by parallelism and recomputation", f"{KORTHIKANTI}, Table 2",
        "parallel_layer", {"conditions": RANKS},
    ),
    "Korthikanti collectives": (
        "sequence parallelism sends what tensor parallelism does in the forward, and gathers its "
        "inputs once more in the backward", f"{KORTHIKANTI}, section 4.2.2", "parallel_layer",
        {"conditions": RANKS},
    ),
    "Korthikanti 5x": (
        "sequence parallelism and selective recomputation save 5x", f"{KORTHIKANTI}, Fig. 7",
        "parallel_layer", {"conditions": "the four models are formulas; no bar is printed"},
    ),
    "Korthikanti 4 %": (
        "and cost 4 % of time instead of 39 %", f"{KORTHIKANTI}, Table 4", "parallel_layer",
        {"conditions": "no machine with eight GPUs here"},
    ),
    "ZeRO Table 1": (
        "model states by stage and number of ranks, 54 entries", f"{ZERO}, Table 1",
        "sharded_states", {"conditions": "the table's models are formulas"},
    ),
    "ZeRO states": (
        "a rank holds 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N bytes (P_os, P_os+g, P_os+g+p)",
        f"{ZERO}, Fig. 1", "sharded_states", {"conditions": f"{RANKS}, engines of PyTorch"},
    ),
    "ZeRO volume": (
        "a step moves 2Ψ elements, 3Ψ with sharded parameters", f"{ZERO}, section 7",
        "sharded_states", {"conditions": f"{RANKS}, engines of PyTorch"},
    ),
    "ZeRO volume, torch P_os": (
        "torch's P_os (ZeroRedundancyOptimizer) moves what ZeRO says of P_os, 2Ψ",
        f"{ZERO}, section 7", "sharded_states",
        {"conditions": "says nothing of ZeRO's own code: torch's optimiser under DDP all-reduces "
                       "every gradient before its owners broadcast; gloo ranks of a CPU"},
    ),
    "ring attention": (
        "exact attention over P ranks; a rank sends K and V P - 1 times",
        "Ring attention (Liu et al. 2023)", "parallel_layer", {"conditions": RANKS},
    ),
}  # fmt: skip
