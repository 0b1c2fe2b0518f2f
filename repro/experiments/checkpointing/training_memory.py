"""Three ways to train in less memory: small micro-batches, 16-bit activations, states on the host.

"accumulation": peak of tensors above parameters and gradients against the number of micro-batches.
"mixed-precision": bytes a transformer layer saves in fp32, under autocast and in 16 bits.
"host-optimizer": bytes on the device, on the host and on the link, and seconds of an update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from analysis.mixed_precision import POLICIES, saved_under
from analysis.model_states import host_optimizer_step
from analysis.parallel_activations import LayerShape
from repro.experiments import Cell, Context, Experiment, Row, row

#: accumulation: an MLP of DEPTH linear + tanh layers of GPT-2 small's width, BATCH rows.
WIDTH, DEPTH, BATCH = 768, 12, 2048
PIECES = (1, 2, 4, 8, 16)
#: mixed precision: seqlen x batch tokens of one layer of GPT-2 small.
HIDDEN, HEADS, SEQLEN = 768, 12, 128
BATCHES = (1, 2, 4, 8, 16)
#: host optimiser.
PARAMETERS = 1 << 24


def cells() -> list[Cell]:
    """All three parts."""
    return [
        *(Cell(implementation="accumulation", pieces=n, rows=BATCH, width=WIDTH, depth=DEPTH) for n in PIECES),
        *(
            Cell(implementation="mixed-precision", policy=policy, batch=b, seqlen_q=SEQLEN, hidden=HIDDEN, heads=HEADS)
            for policy in POLICIES
            for b in BATCHES
        ),
        Cell(implementation="host-optimizer", parameters=PARAMETERS),
    ]


def accumulation_peak(pieces: int) -> int:
    """Peak bytes above parameters, gradients and the batch.

    When the backward starts, the DEPTH results of tanh are saved (products are freed after their
    tanh). The gradient of the loss' square, g (2 x¹), makes three tensors of that size at once. In
    the last layer's backward the gradients of its product and input are there beside DEPTH - 1
    results, and the gradient of its weight, which no micro-batch makes smaller.
    """
    one = BATCH // pieces * WIDTH
    return 4 * max(one * (DEPTH + 3), one * (DEPTH + 1) + WIDTH * WIDTH)


def predict(cell: Cell) -> Iterator[Row]:
    """The formulas of ``analysis``."""
    part = cell["implementation"]
    if part == "accumulation":
        pieces = int(cell["pieces"])
        yield row("peak_bytes", accumulation_peak(pieces))
        yield row("activation_bytes", 4 * BATCH // pieces * WIDTH * DEPTH)
    elif part == "mixed-precision":
        shape = LayerShape(SEQLEN, int(cell["batch"]), HIDDEN, HEADS)
        saved = float(sum(saved_under(shape, str(cell["policy"])).values()))
        yield row("saved_bytes", saved)
    else:
        step = host_optimizer_step(PARAMETERS, link_bytes_per_s=1, host_bytes_per_s=1)
        for name in ("device_bytes", "host_bytes", "bytes_out", "bytes_in"):
            yield row(name, getattr(step, name))


def measure(cell: Cell, context: Context) -> list[Row]:
    """Live tensor bytes, saved storages, link counters and clocks."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        part = {"accumulation": _accumulation, "mixed-precision": _mixed_precision, "host-optimizer": _host_optimizer}[
            str(cell["implementation"])
        ]
        return part(cell)
    finally:
        torch.set_num_threads(threads)


def _accumulation(cell: Cell) -> list[Row]:
    import torch
    from torch import nn

    from repro.training.accumulation import accumulate_gradients
    from repro.training.live_bytes import LiveBytes

    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    x = torch.randn(BATCH, WIDTH)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    known = [x, *net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)]
    after_forward: list[int] = []
    with LiveBytes(known) as live:

        def loss(batch: torch.Tensor) -> torch.Tensor:
            result = net(batch)
            after_forward.append(live.live_bytes)
            return result.square().sum()

        accumulate_gradients(list(x.chunk(int(cell["pieces"]))), loss, len)
    return [
        row("peak_bytes", live.peak_bytes, tool="live storages counted"),
        row("activation_bytes", after_forward[0], tool="live storages counted after a forward"),
    ]


def _mixed_precision(cell: Cell) -> list[Row]:
    import torch

    from repro.distributed.parallel_layer import ParallelTransformerLayer
    from repro.instruments.without_products import WithoutProducts
    from repro.training.saved import count_saved

    torch.manual_seed(0)
    policy = str(cell["policy"])
    layer = ParallelTransformerLayer(HIDDEN, HEADS)
    dtype = torch.bfloat16 if policy == "16-bit" else torch.float32
    layer.to(dtype)
    x = torch.randn(SEQLEN, int(cell["batch"]), HIDDEN, dtype=dtype, requires_grad=True)
    with (
        WithoutProducts(),
        torch.autocast("cpu", torch.bfloat16, enabled=policy == "autocast"),
        count_saved(layer) as saved,
    ):
        out = layer(x)
    del out
    return [row("saved_bytes", saved.total_bytes, tool="saved storages counted")]


def _host_optimizer(cell: Cell) -> list[Row]:
    import torch

    from repro.training.host_optimizer import HostAdamW
    from repro.training.link import DirectLink

    def parameter() -> Any:
        return torch.nn.Parameter(torch.zeros(PARAMETERS // 4, dtype=torch.bfloat16))

    parameters = [parameter() for _ in range(4)]
    link = DirectLink()
    optimizer = HostAdamW(parameters, link=link)
    seconds = []
    for _ in range(4):
        for p in parameters:
            p.grad = torch.ones_like(p)
        held = sum(p.nbytes + p.grad.nbytes for p in parameters)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return [
        row("device_bytes", held, tool="storages counted"),
        row("host_bytes", optimizer.state_bytes, tool="pool"),
        row("bytes_out", link.bytes_out / 4, tool="link"),
        row("bytes_in", link.bytes_in / 4, tool="link"),
        row("step_s", min(seconds[1:]), tool="perf_counter, min of 3"),
        row("stream_bytes_per_s", stream_bandwidth(), unit="B/s", tool="y += x on fp32, min of 5"),
    ]


def stream_bandwidth() -> float:
    """Bytes per second that one core streams: two arrays read, one written, none of them cached."""
    import torch

    x, y = torch.ones(1 << 25), torch.zeros(1 << 25)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        y += x
        best = min(best, time.perf_counter() - start)
    return 3 * x.nbytes / best


EXPERIMENT = Experiment(
    "training-memory",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("repro/training", "repro/distributed/parallel_layer.py"),
    seconds=10,
    on_demand=True,
)
