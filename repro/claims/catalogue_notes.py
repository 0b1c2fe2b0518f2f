"""The study notes' claims K1 to K16 and faults F1 to F7, and the rest of what they state."""

from __future__ import annotations

RECOMPUTE = "study note on recomputation (000)"
FLASH = "study note on flash attention (001)"
TILING = "study note on tiling and recomputation (002)"
AUTODIFF = "lecture note on automatic differentiation (003)"
CODE = "note with training code (004)"
PLAIN = "a plain chain of equal layers"
H200 = "H200, PyTorch 2.11; no mask, no dropout"

#: Claim -> what it says, where it stands, the figure that shows it, and what else is to be said.
NOTES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "K1": (
        "flash keeps 4 Nd + 2 N elements for the backward, standard 2 N² more",
        f"{RECOMPUTE}, section 4.1", "saved_for_backward",
        {"conditions": "PyTorch on a CPU, by its hooks"},
    ),
    "K2": (
        "flash backward is only 30 to 50 % slower than standard, not 2x",
        f"{RECOMPUTE}, section 6.2", "fa1_fig3_runtime", {"conditions": H200},
    ),
    "K3, speed": (
        "flash attention is 2 to 4 times faster overall",
        f"{RECOMPUTE}, section 9.2", "fa1_fig5_8_speedup", {"conditions": H200},
    ),
    "K3, memory": (
        "flash attention takes 5 to 20 times less memory",
        f"{RECOMPUTE}, section 9.2", "fa1_fig3_memory", {"conditions": H200},
    ),
    "K4": (
        "recomputing attention pays from N > 2048; below 512 it may not be needed",
        f"{RECOMPUTE}, section 8.1", "fa1_fig3_runtime",
        {"conditions": f"{H200}; 'pays' is judged by time alone, of a checkpoint around attention: "
                       "the memory it frees may be worth the time"},
    ),
    "K5": (
        "tiling reduces accesses although each tile is loaded many times",
        f"{FLASH}, the reader's question", "traffic_attribution",
        {"conditions": "N = 1000, d = 64; standard attention is ours, in three and five kernels"},
    ),
    "K6": (
        "memory O(L), O(√L), O(1) for storing all, sqrt(L), recomputing all; the last O(L²) time",
        f"{TILING}, section 2.1", "checkpoint_depth", {"conditions": PLAIN},
    ),
    "K7": (
        "exponential spacing gives O(log L) memory and O(log L) compute",
        f"{TILING}, section 2.2", "checkpoint_depth", {"conditions": PLAIN},
    ),
    "K8": (
        "flash: 0.1x memory for 1.2x compute; aggressive checkpointing: 0.05x for 2.0x",
        f"{TILING}, section 3.2", "checkpoint_pareto",
        {"conditions": "flash attention on an H200; checkpointing on a CPU, its work as for K11"},
    ),
    "K9": (
        "the best tile is 128 to 256 on its longer side",
        f"{TILING}, section 4.1", "tile_rules",
        {"conditions": "other authors' tiles, not timed here"},
    ),
    "K10": (
        "checkpointing in k segments costs (1 + 1/k) forward",
        f"{AUTODIFF}, section 2.3", "checkpoint_time", {},
    ),
    "K11": (
        "+33 % compute buys 4 to 5 times less memory",
        f"{AUTODIFF}, section 4.2", "checkpoint_pareto",
        {"conditions": "four chains named beforehand: GPT by its time on a CPU; residual network, "
                       "LSTM and plain chain by the forwards that were run, a forward as a third "
                       "of a step"},
    ),
    "K12": (
        "a 1 x 4096 x 4096 bf16 activation is 32 MiB; at long context activations dominate a 7B "
        "model",
        f"{AUTODIFF}, section 3.1", "training_memory", {"conditions": "the 7B model is a formula"},
    ),
    "K13": (
        "unfused scale-and-bias moves twice the fused bytes",
        f"{AUTODIFF}, section 3.2", "fusion_passes", {},
    ),
    "K14": (
        "non-reentrant checkpoints need O(1) instead of O(N) memory, reentrant ones save less",
        f"{CODE}, section 1.2", "checkpoint_granularity", {},
    ),
    "K15": (
        "recomputation may change gradients slightly",
        FLASH, "tiny_lm", {"conditions": "deterministic operations on a CPU"},
    ),
    "K16": (
        "recomputing can be faster than storing when memory-bound",
        f"{RECOMPUTE}, section 2.2, and {AUTODIFF}, section 4.2", "fa1_fig3_runtime",
        {"conditions": H200},
    ),
    "F1": (
        "online softmax updates a normalised output without the old row sum",
        f"{TILING}, section 1.4", "study-note-faults", {},
    ),
    "F2": (
        "the softmax gradient sums dP∘P over one block only",
        f"{RECOMPUTE}, section 4.3", "study-note-faults", {},
    ),
    "F3": (
        "an offload function's backward runs input * 2 again; its forward is the identity",
        f"{CODE}, section 2.1", "study-note-faults", {},
    ),
    "F4": (
        "states kept at 2^k alone give O(log L) memory",
        f"{TILING}, section 2.2", "study-note-faults", {},
    ),
    "F5": (
        "segment-wise recomputation costs 1/k of a forward",
        f"{AUTODIFF}, section 2.3", "study-note-faults", {},
    ),
    "F6": (
        "reentrant checkpoints keep intermediate results, non-reentrant ones keep none",
        f"{CODE}, section 1", "checkpoint_granularity", {},
    ),
    "F7": (
        "tile <= sqrt(SRAM / (3 d 4 B)), rounded down to a multiple of 32",
        f"{TILING}, section 4.1", "study-note-faults", {},
    ),
    "checkpoint each operation": (
        "a checkpoint around each operation saves most memory",
        f"{RECOMPUTE}, section 5.1", "checkpoint_granularity", {},
    ),
    "Note hierarchy": (
        "SRAM 48 to 164 KB an SM at ~20 TB/s, HBM 40 to 80 GB at 1 to 2 TB/s",
        f"{TILING}, section 1.1", "memory_hierarchy",
        {"conditions": "datasheets of seven cards; the note names none, and is right for an A100"},
    ),
    "matrix product levels": (
        "a tile of side T divides global reads by T, a thread tile shared reads by its side",
        f"{TILING}, sections 1.2 and 1.3", "gemm_levels", {},
    ),
    "matrix product misses": (
        "tiling keeps a product's blocks in cache",
        f"{TILING}, section 1.2", "gemm_levels",
        {"conditions": "misses of another simulator (cachegrind) in small caches; the processor's "
                       "own counter is asked too; N = 96 is left out, whose rows of 384 bytes "
                       "meet in few sets"},
    ),
    "gradient accumulation": (
        "activation memory falls as 1/n with n micro-batches",
        f"{CODE}, section 3", "training_memory", {},
    ),
    "optimiser on the host": (
        "optimiser states leave the device: 4 bytes a parameter stay, 12 leave, 2 + 2 move a step",
        f"{CODE}, section 2.2", "training_memory", {},
    ),
}  # fmt: skip
