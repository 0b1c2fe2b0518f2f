"""``python -m repro decode``: what a step of decoding costs, by formula alone."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import typer

from analysis import decode
from analysis.decode import DecodeShape
from analysis.gpu import Gpu
from analysis.shapes import ITEMSIZE
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from kernels import dispatch
from kernels.decode import QUERIES_MAX, default_splits
from kernels.decode_config import PAGE_UNIT, WIDE, WIDE_VALUES, configure
from kernels.flash_config import HEAD_DIMS
from repro.commands import completion, decode_model, gpus, output, sweep
from repro.commands.predict import here

CACHES = ("same", "fp8")
_FIELDS = (
    "gpu",
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "cache",
    "scale_block",
    "latent",
    "value_dim",
    "page_size",
    "width",
    "context",
    "block_m",
    "block_n",
    "splits",
)
_HEADERS = ("cache a token", "cache", "SM read", "SM write", "HBM ≥", "step ≥", "bound by", "tokens/s ≤")


def command(
    model: Annotated[
        str | None, typer.Argument(help="a whole model instead of one layer, e.g. llama3-70b (as for plan)")
    ] = None,
    batch: Annotated[str, typer.Option(help="sequences")] = "1",
    heads: Annotated[str | None, typer.Option(help="query heads (default: 32)")] = None,
    kv_heads: Annotated[str | None, typer.Option(help="key/value heads (default: as many as query heads)")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", "-d", help="columns of a head (default: 128)")] = None,
    context: Annotated[str, typer.Option("--context", "-n", help="keys of a sequence, e.g. 4k:128k:*2")] = "4096",
    width: Annotated[str, typer.Option(help="queries a step: 1, or the tokens of a draft, e.g. 1:8:1")] = "1",
    dtype: Annotated[
        str, typer.Option(autocompletion=completion.of(tuple(ITEMSIZE)), help=", ".join(ITEMSIZE))
    ] = "bf16",
    cache: Annotated[
        str,
        typer.Option(
            autocompletion=completion.of((*CACHES, "all")),
            help="type of the cache: the same as of q, fp8, or both as same,fp8",
        ),
    ] = "same",
    scale_block: Annotated[
        int | None, typer.Option(help="keys that share a scale of fp8, a multiple of 16 (default: all)")
    ] = None,
    latent: Annotated[bool, typer.Option("--latent", help="one tensor is keys and values, as with MLA")] = False,
    value_dim: Annotated[
        int | None, typer.Option(help="columns of a latent that are values, e.g. 512 of 576 (default: all)")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="keys of a page (default: contiguous)")] = None,
    splits: Annotated[str | None, typer.Option(help="parts of a sequence's keys (default: the rule)")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.of(gpus.names),
            metavar="NAME",
            help="as for predict (default: this machine's, else H200); of a model also 2xH200",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, with bytes by tensor")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV, a line a point")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="a table for Markdown")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="a table for LaTeX (booktabs)")] = False,
) -> None:
    """Predict a step of decoding: the cache, bytes by tensor, splits, a time bound, one layer or a
    whole model.

    Every field takes one value, a list or a range, as for predict. What no kernel of ours runs
    (1024 columns, a GPU before Ampere) has its lower bounds alone; a point that cannot be is a row
    with its reason.
    """
    output.require_one_format(as_json, as_csv, markdown, latex)
    if model is not None:
        of_a_layer = {
            "--heads": heads,
            "--kv-heads": kv_heads,
            "--head-dim": head_dim,
            "--latent": latent,
            "--value-dim": value_dim,
            "--page-size": page_size,
            "--splits": splits,
            "--scale-block": scale_block,
        }
        given = [name for name, value in of_a_layer.items() if value]
        if given:
            raise ValueError(f"{', '.join(given)} with the model {model}: it has its own sizes")
        decode_model.run(
            model,
            gpus=gpu or here().name,
            contexts=sweep.numbers(context, "--context"),
            batches=sweep.numbers(batch, "--batch"),
            widths=sweep.numbers(width, "--width"),
            caches=sweep.words(cache, "--cache", CACHES),
            as_json=as_json,
            as_csv=as_csv,
            style=output.style_of(markdown, latex),
        )
        return
    if page_size is not None and (page_size < PAGE_UNIT or page_size % PAGE_UNIT):
        raise ValueError(f"--page-size {page_size}: expected a multiple of {PAGE_UNIT}")
    if value_dim is not None and not latent:
        raise ValueError(f"--value-dim {value_dim} without --latent: the values are a tensor")
    if scale_block is not None and cache == "same":
        raise ValueError(f"--scale-block {scale_block} with --cache {cache}: fp8 has scales")
    chosen: list[tuple[Any, ...]] = list(
        product(
            sweep.gpus(gpu) if gpu is not None else [here()],
            sweep.words(dtype, "--dtype", tuple(ITEMSIZE)),
            sweep.words(cache, "--cache", CACHES),
            sweep.numbers(batch, "--batch"),
            sweep.numbers(heads or "32", "--heads"),
            sweep.numbers(kv_heads, "--kv-heads") if kv_heads is not None else [None],
            sweep.numbers(head_dim or "128", "--head-dim"),
            sweep.numbers(width, "--width"),
            sweep.numbers(context, "--context"),
            sweep.numbers(splits, "--splits") if splits is not None else [None],
        )
    )
    if len(chosen) > sweep.LIMIT:
        raise ValueError(f"{len(chosen)} points are more than {sweep.LIMIT}; sweep fewer fields")
    rows: list[dict[str, Any]] = []
    for g, kind, kept, b, h, kv, d, w, n, parts in chosen:
        block = scale_block if kept == "fp8" else None
        try:
            shape = DecodeShape(
                h,
                kv or h,
                w,
                (n,) * b,
                d,
                kind,
                kept == "fp8",
                latent,
                page_size,
                ragged=page_size is not None,
                scale_block=block,
                value_dim=value_dim,
            )
            rows.append(row_of(shape, g, parts))
        except ValueError as error:
            if len(chosen) == 1:
                raise
            asked = (g.name, b, h, kv or h, d, kind, kept, block, latent, value_dim, page_size, w, n, None, None, parts)
            rows.append(dict(zip(_FIELDS, asked, strict=True)) | {"error": str(error)})
    output.require_a_point(rows)
    if as_json:
        output.print_json(rows)
    elif as_csv:
        output.print_csv([{k: v for k, v in row.items() if k != "by_tensor"} for row in rows])
    else:
        _table(rows, output.style_of(markdown, latex))


def row_of(shape: DecodeShape, gpu: Gpu, splits: int | None = None) -> dict[str, Any]:
    """One point: what is read and written, and the roofline. Without a kernel, its ``theory`` says
    why, and the columns of the kernel are None. ValueError for a type that the card has not.
    """
    gpu.require_dtype(shape.dtype)
    context, tokens = shape.seqlens[0], shape.batch * shape.seqlen_q
    row: dict[str, Any] = {
        "gpu": gpu.name,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "cache": "fp8" if shape.fp8 else "same",
        "scale_block": shape.scale_block,
        "latent": shape.latent,
        "page_size": shape.page_size,
        "value_dim": shape.value_dim,
        "width": shape.seqlen_q,
        "context": context,
        "block_m": None,
        "block_n": None,
        "splits": splits,
    }
    traffic = None
    why = theory(shape, gpu)
    if why is None:
        config = configure(
            shape.dtype,
            shape.head_dim,
            shape.rows,
            limit=gpu.shared_bytes_per_block,
            seqlens=shape.ragged,
            paged=shape.page_size is not None,
            fp8=shape.fp8,
            scale_blocks=shape.scale_block is not None,
            latent=shape.latent,
        )
        blocks = shape.batch * shape.kv_heads * -(-shape.rows // config.tile.block_m)
        parts = splits or default_splits(config, blocks, context, shape.rows, gpu.sms, gpu.shared_bytes_per_block)
        traffic = Traffic(flash_decode(shape, config.tile, parts))
        row |= {"block_m": config.tile.block_m, "block_n": config.tile.block_n, "splits": parts}
    times = {"HBM": decode.hbm_seconds(shape, gpu), "tensor cores": decode.tensor_seconds(shape, gpu)}
    bound = decode.seconds(shape, gpu)
    return row | {
        "token_bytes": shape.token_bytes,
        "cache_bytes": shape.token_bytes * sum(shape.seqlens),
        "sm_read_bytes": None if traffic is None else traffic.read_bytes,
        "sm_write_bytes": None if traffic is None else traffic.write_bytes,
        "compulsory_bytes": shape.compulsory_bytes,
        "time_bound_s": bound,
        "bound_by": max(times, key=lambda name: times[name]),
        "tokens_per_s_bound": tokens / bound,
        "theory": why,
        "by_tensor": None
        if traffic is None
        else {f"{tensor} {way}": n for (tensor, way), n in traffic.by_tensor().items()},
    }


def theory(shape: DecodeShape, gpu: Gpu) -> str | None:
    """Why no kernel of ours runs this on that GPU; None where one does."""
    capability = gpu.compute_capability
    if capability is None or not dispatch.has_flash("".join(map(str, capability))):
        return f"{gpu.name} runs none of our kernels"
    if shape.head_dim > HEAD_DIMS[-1] and not (shape.latent and shape.head_dim <= WIDE):
        return f"head_dim={shape.head_dim} is above {WIDE if shape.latent else HEAD_DIMS[-1]}"
    if shape.head_dim > HEAD_DIMS[-1] and shape.dtype == "fp32":
        return f"head_dim={shape.head_dim} is of 16-bit q, which is fp32"
    said = shape.value_dim
    if shape.head_dim > HEAD_DIMS[-1] and (said is None or said > WIDE_VALUES or said % 8):
        return (
            f"a latent of {shape.head_dim} columns needs --value-dim, a multiple of 8 up to "
            f"{min(shape.head_dim, WIDE_VALUES)}, got {said}"
        )
    if shape.head_dim <= HEAD_DIMS[-1] and shape.value_dim is not None:
        return (
            f"--value-dim {shape.value_dim} is for latents of more than {HEAD_DIMS[-1]} columns, not {shape.head_dim}"
        )
    unit = 16 if shape.fp8 else 8
    if shape.head_dim % unit:
        return f"head_dim={shape.head_dim} is not a multiple of {unit}"
    if shape.seqlen_q > QUERIES_MAX:
        return f"width={shape.seqlen_q} is above {QUERIES_MAX}"
    if shape.fp8 and shape.dtype == "fp32":
        return "an fp8 cache is multiplied in 16 bits, q is fp32"
    return None


def _table(rows: list[dict[str, Any]], style: str) -> None:
    """What is common to all points on top, then a line a point."""
    varying = [f for f in _FIELDS if len({row[f] for row in rows}) > 1]
    common = {f: rows[0][f] for f in _FIELDS if f not in varying and rows[0][f] is not None}
    output.print_text(", ".join(f"{name}={value}" for name, value in common.items()))
    output.print_text("one layer; rates of the datasheet; HBM: each tensor once\n")

    def size(count: int | None) -> str | None:
        return None if count is None else output.of_bytes(count)

    errors = list(dict.fromkeys(row["error"] for row in rows if "error" in row))

    def cells(row: dict[str, Any]) -> list[Any]:
        if "error" in row:
            why = f"cannot be ({errors.index(row['error']) + 1})"
            return [why if name == "bound by" else None for name in _HEADERS]
        return [
            size(row["token_bytes"]),
            size(row["cache_bytes"]),
            size(row["sm_read_bytes"]),
            size(row["sm_write_bytes"]),
            size(row["compulsory_bytes"]),
            output.of_seconds(row["time_bound_s"]),
            row["bound_by"],
            f"{row['tokens_per_s_bound']:.3g}",
        ]

    lines = [[*(row[f] for f in varying), *cells(row)] for row in rows]
    output.print_table([*varying, *_HEADERS], lines, style=style, keys=len(varying))
    for i, reason in enumerate(errors, 1):
        output.print_text(f"({i}) {reason}")
    for reason in dict.fromkeys(row["theory"] for row in rows if row.get("theory")):
        output.print_text(f"lower bounds alone: {reason}")
