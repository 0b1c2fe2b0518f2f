"""Every way to compute exact attention: time, memory kept and at the peak, and error, against N.

Memory is what torch allocates on the CPU for one forward and backward, counted storage by storage
(``repro.training.live_bytes``); temporaries inside one framework operation are not seen, on a GPU
they are. Ours adds the scratch its kernels ask for; its
deterministic form makes dQ in a pass of its own. The time of ours is left out here: on a CPU
its kernels are emulated. Which back end really ran is asked of the dispatcher and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from analysis import memory
from repro.experiments import Cell, Context, Experiment, Row, row, spread
from repro.experiments.shared.attention import cell, shape_of

LENGTHS = (256, 512, 1024, 2048, 4096)
#: The float64 reference of a longer problem takes longer than all the variants.
LONGEST_JUDGED = 1024
#: Ours runs emulated on a CPU: the longer lengths would take minutes.
EMULATED, LONGEST_EMULATED = ("flash", "flash-deterministic"), 1024
VARIANTS = ("standard", "standard-checkpointed", "chunked", "sdpa-math", "sdpa-flash", "flash", "flash-deterministic")
HEAD_DIM, REPEATS = 64, 3


def point(implementation: str, seqlen: int) -> Cell:
    """Both passes of one head."""
    return cell(implementation, "forward+backward", seqlen=seqlen, head_dim=HEAD_DIM, dtype="fp32")


def cells() -> list[Cell]:
    """Variant × sequence length."""
    return [point(name, n) for name in VARIANTS for n in LENGTHS if name not in EMULATED or n <= LONGEST_EMULATED]


def predict(one: Cell) -> Iterator[Row]:
    """Lists of live tensors, as in ``analysis.memory``; none for the framework's chunking."""
    implementation = str(one["implementation"])
    shape = shape_of(one)
    if implementation in EMULATED:
        saved = memory.total(memory.saved_for_backward("flash", shape))
        peak = memory.flash_backward_peak(shape)
        if implementation == "flash-deterministic":  # dQ has a pass of its own
            peak = [t for t in peak if t.name != "dq_accum"]
    elif implementation in ("standard", "standard-checkpointed"):
        kept = "standard" if implementation == "standard" else "inputs"
        tensors = memory.saved_for_backward("standard", shape)
        saved = memory.total([t for t in tensors if kept == "standard" or t.name != "p"])
        # Softmax's own temporary lives inside one operation, where the count does not look.
        peak = [t for t in memory.standard_backward_peak(shape) if t.name != "dp * p"]
    else:
        return
    for metric, value in (("saved_bytes", saved), ("peak_bytes", memory.total(peak))):
        yield row(metric, value, tool="list of live tensors")


def also() -> Iterator[Cell]:
    """Ours at the lengths where it is not executed."""
    for name in EMULATED:
        for seqlen in LENGTHS:
            if seqlen > LONGEST_EMULATED:
                yield point(name, seqlen)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """One forward and backward: bytes, error against float64, and the median time."""
    import torch

    from repro.attention import launcher
    from repro.attention.reference import attention_reference, max_error
    from repro.attention.variants import VARIANTS as ALL
    from repro.attention.variants import ran_backend
    from repro.training.live_bytes import LiveBytes
    from repro.training.saved import count_saved

    implementation = str(one["implementation"])
    variant = ALL[implementation]
    shape = (int(one["batch"]), int(one["heads"]), int(one["seqlen_q"]), int(one["head_dim"]))
    generator = torch.Generator().manual_seed(0)
    with LiveBytes() as live:
        q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        live.reset_peak()
        with count_saved([]) as saved:
            out = variant(*leaves)
        out.backward(dout)
    peak = live.peak_bytes
    if implementation in EMULATED:  # the latest call was the backward
        peak += launcher.scratch_bytes()
    note = f"ran {ran_backend(implementation, *leaves)}"
    yield row("saved_bytes", saved.total_bytes, tool="saved-tensor hooks", note=note)
    yield row("peak_bytes", peak, tool="storages seen by the dispatcher, and our scratch", note=note)
    if shape[2] <= LONGEST_JUDGED:
        expected = attention_reference(q, k, v, dout)
        for name, tensor in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            assert tensor is not None
            error = max_error(tensor, getattr(expected, name))
            yield row("max_abs_error", error, tool="against float64", tensor=name, note=note)
    if implementation in EMULATED:
        return
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        torch.autograd.grad(variant(*leaves), leaves, dout)
        times.append(time.perf_counter() - start)
    times = times[1:]  # the first is the warm-up
    yield row(
        "time_s", median(times), tool=f"wall clock, {torch.get_num_threads()} threads", note=note, **spread(times)
    )


EXPERIMENT = Experiment(
    "attention-variants",
    cells,
    predict,
    measure,
    device="cpu",
    also=also,
    sources=("kernels", "repro/attention", "repro/experiments/bytes/attention_variants.py"),
    seconds=40,
    on_demand=True,
)
