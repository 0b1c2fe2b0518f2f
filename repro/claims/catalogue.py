"""What must be judged: every claim with its source, in three groups.

``conditions`` says how what we measure differs from the source's own run, and ``chosen`` which
coefficients were chosen after seeing the numbers they are compared with: such a claim is at most
consistent, whatever agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.claims.catalogue_notes import NOTES
from repro.claims.catalogue_papers import PAPERS
from repro.claims.protocol import Origin


@dataclass(frozen=True)
class Entry:
    """What is claimed, by whom, and how it is judged again."""

    statement: str
    source: str
    command: str
    origin: Origin
    conditions: str = ""
    chosen: str = ""


def recheck(name: str) -> str:
    """The command that judges again: a figure's, or an experiment's that no figure shows."""
    return f"make measure EXPERIMENT={name}" if "-" in name else f"make figures/out/{name}.svg"


OURS: dict[str, tuple[str, str, dict[str, str]]] = {
    "SM boundary": (
        "a forward's reads across the SM boundary are Q + (N/128)(K + V), N = 32k to 256k",
        "two_levels",
        {"conditions": "FlashAttention-2 of PyTorch 2.11, bf16, d = 128, one head, H200"},
    ),
    "HBM behind L2": (
        "HBM reads behind L2: K and V once while L2 holds them, then what a simulated L2 misses",
        "two_levels",
        {
            "conditions": "one kernel, one card: another form of reading would show elsewhere",
            "chosen": "even hash, copies in both partitions, LRU, equal shares: none published",
        },
    ),
    "SM ceilings": (
        "Hopper backward: a round needs more clocks of shared memory than of the tensor cores",
        "sm_ceilings",
        {
            "conditions": "clocks by datasheet from executed bytes; that this sets the pace was "
            "not timed"
        },
    ),
    "standard attention, passes": (
        "standard attention moves its kernels' passes over whole tensors through HBM",
        "fa1_fig2_left",
        {"conditions": "PyTorch 2.11's eager kernels on an H200"},
    ),
    "peak memory, lists": (
        "peak memory of attention is the sum of the tensors alive: 4 N² + 6 Nd; 12 Nd + 2 rows",
        "fa1_fig3_memory",
        {"conditions": "the matrix library's workspace is taken off"},
    ),
    "Hopper forward": (
        "the Hopper forward is as fast as the best peer, over all shapes",
        "distance_from_bound",
        {"conditions": "to be timed on one card, in turns with the peers"},
    ),
    "Hopper backward": (
        "the Hopper backward is as fast as the best peer, over all shapes",
        "distance_from_bound",
        {"conditions": "to be timed on one card, in turns with the peers"},
    ),
    "accuracy": (
        "RMSE of out, dq, dk, dv is at most twice that of eager attention, in every type and "
        "kind of input tried",
        "accuracy",
        {"conditions": "the sm_80 kernels, executed on the host"},
    ),
    "variants": (
        "bytes kept and at the peak are as listed, for every variant with a formula",
        "attention_variants",
        {"conditions": "PyTorch on a CPU, by its hooks and allocation trace"},
    ),
    "checkpointed attention": (
        "a checkpoint around one standard attention lowers what is kept, and not the peak",
        "attention_variants",
        {"conditions": "PyTorch on a CPU, by its hooks and allocation trace"},
    ),
    "checkpoint peak": (
        "the simulator's peak is the measured peak within 1 % or 64 KiB, whichever is more",
        "checkpoint_depth",
        {"conditions": "PyTorch on a CPU, by its allocation trace"},
    ),
    "optimal plans": (
        "within a budget no heuristic is faster; no plan exceeds its budget by more than 64 KiB",
        "checkpoint_pareto",
        {"conditions": "speed by the simulator, on a chain of formulas; memory measured on a CPU"},
    ),
    "granularity": (
        "bytes a layer keeps, for eight places to put a checkpoint, are the formula's",
        "checkpoint_granularity",
        {"conditions": "PyTorch on a CPU, by its hooks"},
    ),
    "checkpoint around flash": (
        "a checkpoint around flash attention adds the bytes of one more forward",
        "checkpoint_attention",
        {
            "conditions": "passes and the step under torch's checkpoint executed and counted on "
            "the host, at the SM boundary"
        },
    ),
    "determinism": (
        "what determinism costs in bytes: an ordered workspace, a pass for dQ, additions in turns",
        "deterministic_price",
        {"conditions": "bytes at the SM boundary, executed on the host; the time is not measured"},
    ),
    "decoding": (
        "a step of decoding reads the cache once for the heads of a group; a split adds fp32 parts",
        "decode_bytes",
        {"conditions": "executed on the host; no time and no card's counter yet"},
    ),
    "sliding window": (
        "a window of w keys loads only the tiles that it touches, 1 + Br / w times its pairs",
        "sliding_window",
        {"conditions": "executed on the host; no time and no card's counter yet"},
    ),
    "packed sequences": (
        "packed sequences move the sum of what each moves alone, and their tables; 16 of "
        "Wikipedia's, padded to the longest, move twice to three times that",
        "packed_sequences",
        {
            "conditions": "executed on the host; no time and no card's counter yet",
            "chosen": "the range of two to three times",
        },
    ),
    "decode time": (
        "a step of decoding takes the time that HBM needs for the cache, within a tenth",
        "decode_bytes",
        {"conditions": "the bandwidth to be measured on the same card"},
    ),
    "stored bias": (
        "a stored bias moves N² elements a head in each pass, ALiBi 4 bytes a tile instead",
        "bias_bytes",
        {"conditions": "executed on the host; no time and no card's counter yet"},
    ),
    "fusion of longer chains": (
        "bias, GELU, dropout, residual: 9 passes become 3; layer norm: 6 become 2",
        "fusion_passes",
        {"conditions": "executed on the host; no counter of a card"},
    ),
    "fusion by torch.compile": (
        "the compiler reaches the fused passes by itself",
        "fusion_passes",
        {"conditions": "bytes by Inductor's own estimate of the code it makes, not by a counter"},
    ),
    "offload crossover": (
        "offloading beats recomputing above a link bandwidth of bytes / 2f; times by replay",
        "offload_crossover",
        {"conditions": "an emulated link on a CPU"},
    ),
    "optimistic softmax": (
        "optimistic softmax errs no more than the exact one, at every drift of the scores tried",
        "optimistic_softmax",
        {"conditions": "executed on the host; the time is not measured"},
    ),
    "mixed precision": (
        "16-bit activations: a layer saves sbh (34 + 5as/h) bytes",
        "training_memory",
        {"conditions": "PyTorch on a CPU, by its hooks"},
    ),
    "optimiser on the host, time": (
        "an optimiser step on the host takes the time of its bytes at the memory's bandwidth",
        "training_memory",
        {"conditions": "one core; the bandwidth is that of y += x on the same core"},
    ),
}


def _entries() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for origin, group in ((Origin.NOTE, NOTES), (Origin.PAPER, PAPERS)):
        for name, (statement, source, drawn, more) in group.items():
            found[name] = Entry(statement, source, recheck(drawn), origin, **more)
    for name, (statement, drawn, more) in OURS.items():
        found[name] = Entry(statement, "this package", recheck(drawn), Origin.OURS, **more)
    return found


CATALOGUE: dict[str, Entry] = _entries()
