"""``python -m repro decode MODEL``: a step of decoding of a whole model, on one GPU or several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from analysis.decoders import Decoder
from analysis.gpu import Gpu
from analysis.serving import Step, decoding_step
from repro.commands import output, sweep
from repro.commands.chains import decoder_of

_HEADERS = ("weights a GPU", "cache a GPU", "step ≥", "bound by", "tokens/s ≤", "sent a GPU")


def run(
    model: str,
    *,
    gpus: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    widths: Sequence[int],
    caches: Sequence[str],
    as_json: bool,
    as_csv: bool,
    style: str,
) -> None:
    """Print a line a point, and for a single point its parts."""
    decoder = decoder_of(model, {})
    points = [
        (count, gpu, cache, batch, width, context)
        for (count, gpu), cache, batch, width, context in product(groups_of(gpus), caches, batches, widths, contexts)
    ]
    rows, steps = [], []
    for count, gpu, cache, batch, width, context in points:
        step = decoding_step(
            decoder, gpu, context=context, batch=batch, width=width, ranks=count, fp8_cache=cache == "fp8"
        )
        steps.append(step)
        rows.append(
            {
                "model": model,
                "gpu": gpu.name,
                "gpus": count,
                "cache": cache,
                "batch": batch,
                "width": width,
                "context": context,
            }
            | row_of(step)
        )
    if as_json:
        output.print_json(rows)
    elif as_csv:
        output.print_csv([{k: v for k, v in row.items() if k != "parts"} for row in rows])
    else:
        _print(decoder, rows, steps, style)


def groups_of(text: str) -> list[tuple[int, Gpu]]:
    """ "2xH200,H100" as (number of GPUs, card). ValueError for an unknown card."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(.+)", part)
        count, name = (int(match[1]), match[2]) if match else (1, part)
        found += [(count, gpu) for gpu in sweep.gpus(name.strip())]
    return found


def row_of(step: Step) -> dict[str, Any]:
    """The numbers of a step, and its parts."""
    by_memory = step.hbm_seconds >= step.tensor_seconds
    return {
        "weight_bytes": step.weight_bytes,
        "cache_bytes": step.cache_bytes,
        "memory_bytes": step.gpu.memory_bytes,
        "fits": step.fits,
        "time_bound_s": step.bound_s,
        "bound_by": "HBM" if by_memory else "tensor cores",
        "tokens_per_s_bound": step.tokens / step.bound_s,
        "sent_bytes": step.sent_bytes,
        "parts": {part.name: part.hbm_bytes for part in step.parts},
    }


def _print(decoder: Decoder, rows: list[dict[str, Any]], steps: Sequence[Step], style: str) -> None:
    fields = ("model", "gpu", "gpus", "cache", "batch", "width", "context")
    varying = [field for field in fields if len({row[field] for row in rows}) > 1]
    common = {field: rows[0][field] for field in fields if field not in varying}
    output.print_text(", ".join(f"{name}={value}" for name, value in common.items()))
    output.print_text(
        f"{decoder.layers} layers, {decoder.parameters / 1e9:.3g} billion weights in 16 bits; "
        "rates of the datasheet; bounds, not times\n"
    )
    if len(rows) == 1:
        lines = [
            [
                part.name,
                output.of_bytes(int(part.hbm_bytes)),
                output.of_seconds(part.hbm_bytes / steps[0].gpu.hbm_bandwidth_bytes_per_s),
                output.of_seconds(part.flops / steps[0].gpu.fp16_tensor_flops),
            ]
            for part in steps[0].parts
        ]
        headers = ["part", "bytes a step", "at HBM", "at tensor cores"]
        output.print_table(headers, lines, style=style, keys=1)
        output.print_text("")
    points: list[list[Any]] = [
        [
            *(row[field] for field in varying),
            output.of_bytes(int(row["weight_bytes"])),
            output.of_bytes(int(row["cache_bytes"])),
            output.of_seconds(row["time_bound_s"]) if row["fits"] else None,
            row["bound_by"] if row["fits"] else "does not fit",
            f"{row['tokens_per_s_bound']:.4g}" if row["fits"] else None,
            output.of_bytes(int(row["sent_bytes"])),
        ]
        for row in rows
    ]
    output.print_table([*varying, *_HEADERS], points, style=style, keys=len(varying))
    if not all(row["fits"] for row in rows):
        memory = {row["gpu"]: output.of_bytes(row["memory_bytes"]) for row in rows}
        listed = ", ".join(f"{name} {size}" for name, size in memory.items())
        output.print_text(f"does not fit: weights and cache need more than the memory ({listed})")
