"""Bytes of one step of decoding: how queries share K and V, drafts, splits, fp8.

Five ways to share, all with 32 query heads: every head its own K and V (MHA), groups of four (GQA),
one K and V for all (MQA), the same groups in fp8, and one latent that is keys and values of all
heads (MLA): of 256 columns, and of the 576 of DeepSeek-V2, 512 of them values. Counted: the
decoding kernels executed on the host backend, one sequence, random numbers; the error against
float64 beside it, so that what is counted is right. Caches lie in pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from analysis.decode import DecodeShape
from analysis.shapes import AttentionShape, Tile
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, traffic_rows

HEADS, PAGE_SIZE, DTYPE = 32, 64, "bf16"


@dataclass(frozen=True)
class Sharing:
    """How the query heads share K and V; ``latent``, ``fp8`` and the rest as in DecodeShape."""

    kv_heads: int
    head_dim: int
    latent: bool = False
    fp8: bool = False
    value_dim: int | None = None
    scale_block: int | None = None

    def step(self, seqlen_q: int, seqlens: tuple[int, ...]) -> DecodeShape:
        """The step of these queries and keys, caches in pages."""
        return DecodeShape(
            HEADS,
            self.kv_heads,
            seqlen_q,
            seqlens,
            self.head_dim,
            DTYPE,
            self.fp8,
            self.latent,
            PAGE_SIZE,
            ragged=True,
            scale_block=self.scale_block,
            value_dim=self.value_dim,
        )

    def cell(self, batch: int, context: int, width: int = 1, **more: Any) -> Cell:
        """The cell of a step of sequences as long as each other; width: queries of each."""
        step = AttentionShape(batch, HEADS, width, context, self.head_dim, self.kv_heads, DTYPE, True)
        return cell_of(step, "flash-decode", "forward", page_size=PAGE_SIZE, **more)


SHARING = {
    "mha": Sharing(32, 128),
    "gqa": Sharing(8, 128),
    "gqa-fp8": Sharing(8, 128, fp8=True),
    "mqa": Sharing(1, 128),
    "latent-256": Sharing(1, 256, latent=True),
    "latent-576": Sharing(1, 576, latent=True, value_dim=512),
}
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
LONGER = (32768, 65536, 131072)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
DRAFT_CONTEXT = 1024
SPLITS = (1, 2, 4, 8, 16, 32)


def _cell(sharing: str, context: int, width: int = 1, splits: int = 1) -> Cell:
    way = SHARING[sharing]
    return way.cell(1, context, width, sharing=sharing, splits=splits)


def cells() -> list[Cell]:
    """Every way over the context; over the width of a draft; over the number of splits (GQA)."""
    found = [_cell(sharing, context) for sharing in SHARING for context in CONTEXTS]
    found += [_cell(s, DRAFT_CONTEXT, width) for s in SHARING for width in WIDTHS if width > 1]
    found += [_cell("gqa", DRAFT_CONTEXT, splits=splits) for splits in SPLITS if splits > 1]
    return found


def shape_of(cell: Cell) -> DecodeShape:
    """The step that a cell names."""
    way = SHARING[str(cell["sharing"])]
    return way.step(int(cell["seqlen_q"]), (int(cell["seqlen_k"]),))


def tile_of(cell: Cell) -> Tile:
    """The tile that the driver takes."""
    from kernels.decode_config import configure

    one = shape_of(cell)
    return configure(one.dtype, one.head_dim, one.rows, latent=one.latent).tile


def predict(cell: Cell) -> Iterator[Row]:
    """The exact sums, and the lower bound."""
    one = shape_of(cell)
    traffic = Traffic(flash_decode(one, tile_of(cell), int(cell["splits"])))
    yield from traffic_rows(traffic.kernels)
    yield row("compulsory_bytes", one.compulsory_bytes, tool="each tensor once")


def also() -> Iterator[Cell]:
    """Contexts too long to execute."""
    for sharing in SHARING:
        for context in LONGER:
            yield _cell(sharing, context)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Execute the kernels: bytes by tensor, and the largest error."""
    from repro.instruments.decode_work import DecodeOperands

    operands = DecodeOperands(shape_of(cell), "cpu")
    backend = context.host()
    operands.launch(backend, int(cell["splits"]))
    counted = Traffic({kernel: dict(entries) for kernel, entries in backend.traffic.items()})
    yield from traffic_rows(counted.kernels, tool="host backend: executed, bytes counted")
    errors = [operands.error(0, head) for head in range(operands.shape.kv_heads)]
    yield row("max_abs_error", max(errors), tensor="out", tool="against float64 on the same rounded inputs")


EXPERIMENT = Experiment(
    "decode-bytes",
    cells,
    predict,
    measure,
    device="host",
    also=also,
    sources=(
        "kernels/flash_decode.cu",
        "kernels/flash_decode_merge.cu",
        "kernels/decode.py",
        "kernels/decode_config.py",
        "kernels/include",
        "kernels/host",
        "repro/instruments/decode_work.py",
        "repro/experiments/bytes/decode_bytes.py",
    ),
    seconds=60,
    on_demand=True,
)
