"""``python -m repro predict``: what a pass of an algorithm costs, by formula alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import typer

from analysis.hardware import H200, Gpu, find_gpu
from analysis.shapes import ITEMSIZE, AttentionShape
from analysis.time_model import Ceilings, datasheet_ceilings
from repro import machine
from repro.commands import output, sweep
from repro.prediction import ALGORITHMS, PASSES, Prediction, predict

MASKS = ("none", "causal")


def command(
    algorithm: Annotated[
        str, typer.Option("--algorithm", "-a", help=f"{', '.join(ALGORITHMS)}, a list, or all")
    ] = "flash",
    pass_: Annotated[str, typer.Option("--pass", help="forward, backward or all")] = "all",
    batch: Annotated[str, typer.Option(help="batch size")] = "1",
    heads: Annotated[str, typer.Option(help="query heads")] = "16",
    kv_heads: Annotated[
        str | None, typer.Option(help="key/value heads (default: as many as query heads)")
    ] = None,
    seqlen: Annotated[
        str, typer.Option("--seqlen", "-n", help="query and key length, e.g. 512:16384:*2")
    ] = "4096",
    seqlen_k: Annotated[
        str | None, typer.Option(help="key length (default: the query length)")
    ] = None,
    head_dim: Annotated[str, typer.Option("--head-dim", "-d")] = "128",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(ITEMSIZE)}")] = "bf16",
    mask: Annotated[str, typer.Option(help="none, causal, or both as none,causal")] = "none",
    causal: Annotated[bool, typer.Option("--causal", help="short for --mask causal")] = False,
    tile: Annotated[
        str, typer.Option(help="block_m x block_n as 128x64, a list, all, or auto")
    ] = "auto",
    gpu: Annotated[
        str | None, typer.Option(help="e.g. H200, A100 (default: this machine's, else H200)")
    ] = None,
    ceilings: Annotated[
        str, typer.Option(help="rates of the time bound: datasheet, or measured (on record)")
    ] = "datasheet",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, bytes per tensor included")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV, a line per point")] = False,
) -> None:
    """Predict FLOPs, bytes at both levels, memory and a time bound.

    Every field takes one value, a list (64,128) or a range (512:16384:*2, 64:256:+64); several
    make a sweep. A point that cannot be (a tile too large) is a row with its reason.
    """
    output.require_one_format(as_json, as_csv)
    if causal and mask not in ("none", "causal"):
        raise ValueError(f"--causal and --mask {mask} contradict each other")
    if ceilings not in ("datasheet", "measured"):
        raise ValueError(f"--ceilings {ceilings!r}: expected datasheet or measured")
    chosen: list[tuple[Any, ...]] = list(
        product(
            sweep.gpus(gpu) if gpu is not None else [here()],
            sweep.words(algorithm, "--algorithm", ALGORITHMS),
            sweep.words("causal" if causal else mask, "--mask", MASKS),
            sweep.words(dtype, "--dtype", tuple(ITEMSIZE)),
            sweep.numbers(batch, "--batch"),
            sweep.numbers(heads, "--heads"),
            sweep.numbers(kv_heads, "--kv-heads") if kv_heads is not None else [None],
            sweep.numbers(head_dim, "--head-dim"),
            sweep.numbers(seqlen, "--seqlen"),
            sweep.numbers(seqlen_k, "--seqlen-k") if seqlen_k is not None else [None],
            sweep.tiles(tile),
            sweep.words(pass_, "--pass", PASSES),
        )
    )
    if len(chosen) > sweep.LIMIT:
        raise ValueError(f"{len(chosen)} points are more than {sweep.LIMIT}; sweep fewer fields")
    rates = {g.name: rates_of(g, ceilings) for g, *_ in chosen}

    points: list[Prediction | dict[str, Any]] = []
    for g, name, visible, kind, b, h, kv, d, n, nk, shape_of_tile, one_pass in chosen:
        try:
            shape = AttentionShape(b, h, n, nk or n, d, kv, kind, visible == "causal")
            points.append(
                predict(name, shape, one_pass, g, tile=shape_of_tile, ceilings=rates[g.name])
            )
        except ValueError as error:
            if len(chosen) == 1:
                raise
            failed = {"algorithm": name, "pass": one_pass, "batch": b, "heads": h,
                      "kv_heads": kv or h, "seqlen_q": n, "seqlen_k": nk or n, "head_dim": d,
                      "dtype": kind, "causal": visible == "causal", "gpu": g.name}  # fmt: skip
            if shape_of_tile:
                failed |= {"block_m": shape_of_tile.block_m, "block_n": shape_of_tile.block_n}
            points.append(failed | {"error": str(error)})
    if all(isinstance(point, dict) for point in points):
        raise ValueError(f"none of {len(points)} points can be: {points[0]['error']}")  # type: ignore[index]
    _show(points, as_json, as_csv)


def here() -> Gpu:
    """This machine's GPU where ``analysis.hardware`` knows it, else the H200 of our records."""
    card = machine.gpu()
    return (find_gpu(card.name) if card else None) or H200


def rates_of(gpu: Gpu, kind: str) -> Ceilings:
    """Ceilings from the datasheet, or as measured on this GPU where that is on record.

    Raises ValueError where nothing was measured.
    """
    sheet = datasheet_ceilings(gpu)
    if kind == "datasheet":
        return sheet
    from repro.records import load

    rows = [r for r in load(["ceiling", "gpu-ceilings"]) if r.value and r.source == "measured"]
    rows = [r for r in rows if r.device and find_gpu(r.device) == gpu]
    best: dict[str, float] = {}
    for row in rows:
        assert row.value is not None
        best[row.implementation] = max(row.value * 1e12, best.get(row.implementation, 0.0))
    measured = {
        "tensor_flops": best.get("matmul") or best.get("matmul-bf16-8192"),
        "exp_per_s": best.get("exp2"),
        "sm_boundary_bytes_per_s": best.get("sm-boundary-read"),
        "hbm_bytes_per_s": best.get("hbm-copy") or best.get("copy"),
    }
    known = {name: rate for name, rate in measured.items() if rate}
    if not known:
        raise ValueError(f"no ceiling of {gpu.name} is on record; use --ceilings datasheet")
    names = ", ".join(name.split("_per_s")[0] for name in known)
    origin = f"measured on {rows[0].device}: {names}; datasheet: the rest"
    return replace(sheet, **known, origin=origin)


def _show(points: list[Prediction | dict[str, Any]], as_json: bool, as_csv: bool) -> None:
    rows = [p if isinstance(p, dict) else p.row() for p in points]
    if as_csv:
        output.print_csv(rows)
    elif as_json:
        full = []
        for point, row in zip(points, rows, strict=True):
            if isinstance(point, Prediction):
                row["bound_by_kernel"] = dict(point.time.bound_by)
                row["saved"] = {t.name: t.bytes for t in point.saved}
                row["peak"] = {t.name: t.bytes for t in point.peak}
                row["ceilings"] = point.ceilings.origin
                row["tensors"] = point.tensors()
            full.append(row)
        output.print_json(full)
    else:
        _tables(points, rows)


_FIELDS = (
    "gpu", "algorithm", "pass", "causal", "dtype", "batch", "heads", "kv_heads", "seqlen_q",
    "seqlen_k", "head_dim", "form", "block_m", "block_n",
)  # fmt: skip


def _tables(points: list[Prediction | dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """What is common to all points on top, then a line per point; few points also by tensor."""
    varying = [f for f in _FIELDS if len({row.get(f) for row in rows}) > 1]
    for follower, leader in (("seqlen_k", "seqlen_q"), ("kv_heads", "heads")):
        if follower in varying and all(row[follower] == row[leader] for row in rows):
            varying.remove(follower)
    common = {f: rows[0].get(f) for f in _FIELDS if len({row.get(f) for row in rows}) == 1}
    if common.get("form") is None:  # of kernels that come in one form
        common.pop("form", None)
    print(", ".join(f"{name}={value}" for name, value in common.items()))
    good = [p for p in points if isinstance(p, Prediction)]
    print(f"ceilings: {'; '.join(sorted({p.ceilings.origin for p in good}))}\n")
    headers = [
        *varying, "FLOPs", "SM read", "SM write", "HBM read", "HBM write", "saved", "peak",
        "time ≥", "bound by",
    ]  # fmt: skip
    lines = []
    for row in rows:
        line: list[object] = [row.get(f) for f in varying]
        if "error" in row:
            line += [None] * 8 + [f"cannot be: {row['error']}"]
        else:
            line.append(output.of_flops(row["useful_flops"]))
            line += [
                output.of_bytes(row[name])
                for name in ("sm_read_bytes", "sm_write_bytes", "hbm_read_bytes",
                             "hbm_write_bytes", "saved_bytes", "peak_bytes")
            ]  # fmt: skip
            over = "" if row["fits_memory"] else " (more than the GPU has)"
            line[-1] = f"{line[-1]}{over}"
            line += [output.of_seconds(row["time_bound_s"]), row["bound_by"]]
        lines.append(line)
    output.print_table(headers, lines)
    if len(rows) > 2:
        return
    for point in good:
        form = f"form {point.form}, " if point.form else ""
        print(f"\n{point.algorithm} {point.pass_}, {form}tile {point.tile.block_m} x "
              f"{point.tile.block_n}, {point.blocks_per_sm} blocks per SM")  # fmt: skip
        output.print_table(
            ["kernel", "tensor", "direction", "SM boundary", "HBM read", "HBM write"],
            [
                [t["kernel"], t["tensor"], t["direction"], output.of_bytes(t["sm_bytes"]),
                 output.of_bytes(t["hbm_read_bytes"]), output.of_bytes(t["hbm_write_bytes"])]
                for t in point.tensors()
            ],
        )  # fmt: skip
        times = ", ".join(
            f"{resource} {output.of_seconds(seconds)}"
            for resource, seconds in point.time.by_resource.items() if seconds
        )  # fmt: skip
        print(f"time at each ceiling: {times}")
        saved = " + ".join(f"{t.name} {output.of_bytes(t.bytes)}" for t in point.saved)
        print(f"saved for backward: {saved}")
