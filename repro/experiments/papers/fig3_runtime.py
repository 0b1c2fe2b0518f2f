"""FlashAttention 2022, Fig. 3 left: run time of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16. Published: Table 11 (A100, dropout and mask). Measured: PyTorch's
own attention on an H200. Predicted: rooflines, lower bounds of each set-up at the ceilings of its
card.
"""

from collections.abc import Callable, Iterator

from analysis.hardware import A100_40GB, H200, Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import EAGER, PAPER_MASKED_DROPOUT
from analysis.time_model import Ceilings, Work, attention_work, predict_time, standard_work
from repro.experiments import Cell, Context, Experiment
from repro.experiments.papers._roofline import a100, h200
from repro.experiments.shared.pytorch_runs import SOURCES, fig3_cells, timed
from repro.measuring.records import Record, record

NAME = "fig3-runtime"
SEQLENS = tuple(2**k for k in range(7, 17))
#: Tiles of the released kernels: 2022 and FlashAttention-2.
RELEASED = {"flash1-released": Tile(16, 256), "flash": Tile(128, 128)}


def also() -> Iterator[Record]:
    """Standard and fused attention on both cards, at every length."""
    for seqlen in SEQLENS:
        shape = AttentionShape(16, 8, seqlen, seqlen, 64)
        unfused = {"A100": standard_work(PAPER_MASKED_DROPOUT, shape)}
        unfused["H200"] = standard_work(EAGER, shape)
        for gpu, ceilings, fused in ((A100_40GB, a100(), "flash1-released"), (H200, h200(), "flash")):
            paper = gpu is A100_40GB
            yield row(
                shape,
                gpu,
                ceilings,
                "standard" if paper else "standard-eager",
                unfused["A100" if paper else "H200"],
                paper,
            )
            works: dict[str, Work] = {}
            for pass_ in ("forward", "backward"):
                # The authors' kernels of 2022 multiply on tensor cores, the ones here on FMA units.
                works |= attention_work(fused, shape, RELEASED[fused], pass_, gpu, 2, fma=False)
            yield row(shape, gpu, ceilings, "flash1" if paper else "sdpa-flash2", works, paper)


def row(
    shape: AttentionShape, gpu: Gpu, ceilings: Ceilings, implementation: str, works: dict[str, Work], masked: bool
) -> Record:
    """One predicted time, with the ceiling that sets most of it."""
    time = predict_time(works, ceilings)
    return record(
        {},
        experiment=NAME,
        implementation=implementation,
        pass_="forward+backward",
        source="predicted",
        batch=16,
        heads=8,
        kv_heads=8,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=64,
        dtype="fp16",
        causal=False,
        dropout=0.1 if masked else 0.0,
        key_mask=masked,
        metric="time_ms",
        unit="ms",
        value=time.seconds * 1e3,
        device=f"NVIDIA {gpu.name}",
        tool=f"roofline, {ceilings.origin}",
        note=f"bound by {time.binding}",
    )


def measure(one: Cell, context: Context) -> list[Record]:
    """Both passes apart and together, in turn; what has no backward of its own only together."""
    from repro.instruments.pytorch_attention import CHECKPOINTED, Attention

    attention = Attention(one)
    works: dict[str, Callable[[], object]] = {"forward": attention.forward, "forward+backward": attention.both}
    if one["implementation"] != CHECKPOINTED:
        out = attention.forward()
        works["backward"] = lambda: attention.backward(out)
    return timed(NAME, one, works)


EXPERIMENT = Experiment(
    name=NAME,
    title="run time against N",
    cells=fig3_cells,
    predict=lambda cell: list[Record](),
    measure=measure,
    device="cuda",
    also=also,
    sources=SOURCES,
    seconds=25,
)
