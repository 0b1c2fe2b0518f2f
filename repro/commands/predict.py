"""``python -m repro predict``: what a pass of an algorithm costs, by formula alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import typer

from analysis.algorithms import ALGORITHMS
from analysis.clocks import ceilings_of
from analysis.hardware import H200, Gpu, find_gpu
from analysis.problem import Problem
from analysis.shapes import ITEMSIZE, AttentionShape
from analysis.time_model import Ceilings
from repro.commands import completion, gpus, output, predict_peers, sweep
from repro.commands.options import choices, fields_of, with_options
from repro.commands.predict_tables import tables
from repro.measuring import machine
from repro.measuring.progress import say
from repro.prediction import AUTO, PASSES, Prediction, predict

BATCH, SEQLEN = "1", "4096"
L2_MODELS = ("simulated", "waves", "once")
#: More than these make a sweep whose L2 is not simulated unless it is asked for.
SIMULATED_POINTS = 60
NAMES = (AUTO, *ALGORITHMS)
#: Shown below the options.
EPILOG = "Algorithms:\n\n" + "\n\n".join(
    [f"{AUTO}: what repro.flash_attention runs on that GPU (kernels.dispatch)"]
    + [f"{each.name}: {each.summary}" for each in ALGORITHMS.values()]
)


@with_options
def command(
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            "-a",
            autocompletion=completion.of((*NAMES, "all")),
            help="auto, a name from the list below, several, or all",
        ),
    ] = AUTO,
    pass_: Annotated[
        str, typer.Option("--pass", autocompletion=completion.of((*PASSES, "all")), help="forward, backward or all")
    ] = "all",
    batch: Annotated[str, typer.Option(help="batch size")] = BATCH,
    heads: Annotated[str, typer.Option(help="query heads")] = "16",
    kv_heads: Annotated[str | None, typer.Option(help="key/value heads (default: as many as query heads)")] = None,
    seqlen: Annotated[str, typer.Option("--seqlen", "-n", help="query and key length, e.g. 512:16384:*2")] = SEQLEN,
    seqlen_k: Annotated[str | None, typer.Option(help="key length (default: the query length)")] = None,
    head_dim: Annotated[str, typer.Option("--head-dim", "-d", help="1 to 256")] = "128",
    dtype: Annotated[
        str, typer.Option(autocompletion=completion.of((*ITEMSIZE, "all")), help=", ".join(ITEMSIZE))
    ] = "bf16",
    tile: Annotated[str, typer.Option(help="block_m x block_n as 128x64, a list, all, or auto")] = "auto",
    gpu: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.of(gpus.names),
            metavar="NAME",
            help="e.g. H200, A100, L40S, 4090, all; a file.toml or module:NAME that "
            "describes another (default: this machine's, else H200)",
        ),
    ] = None,
    l2: Annotated[
        str,
        typer.Option(
            "--l2",
            autocompletion=completion.of(("auto", *L2_MODELS)),
            help="HBM bytes from a simulated L2, from whole waves of blocks, 100 times faster, or "
            f"each tensor once, the least; auto: simulated up to {SIMULATED_POINTS} points",
        ),
    ] = "auto",
    ceilings: Annotated[
        str,
        typer.Option(
            autocompletion=completion.of(("datasheet", "measured")),
            help="rates of the time bound: datasheet, or measured (on record)",
        ),
    ] = "datasheet",
    compare: Annotated[
        bool, typer.Option("--compare", help="also recorded times of other kernels, of that shape")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, bytes per tensor included")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV, a line per point")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="tables for Markdown")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="tables for LaTeX (booktabs)")] = False,
    **options: Any,
) -> None:
    """Predict FLOPs, bytes at both levels, memory and a time bound.

    Every field takes one value, a list (64,128) or a range (512:16384:*2, 64:256:+64); several
    make a sweep. A point that cannot be (a tile too large) is a row with its reason.
    """
    output.require_one_format(as_json, as_csv, markdown, latex)
    if ceilings not in ("datasheet", "measured"):
        raise ValueError(f"--ceilings {ceilings!r}: expected datasheet or measured")
    if l2 not in ("auto", *L2_MODELS):
        raise ValueError(f"--l2 {l2!r}: expected auto, {', '.join(L2_MODELS)}")
    if options["seqlens"] is not None:
        _refuse_beside_seqlens(batch, seqlen, seqlen_k, options["bias"], l2)
    algorithms = sweep.words(algorithm, "--algorithm", NAMES, every=tuple(ALGORITHMS))
    if options["deterministic"] and algorithms != [AUTO]:
        raise ValueError("--deterministic chooses with -a auto; other names are definite kernels")
    asked = choices(options)
    if pass_ == "all" and all(point["kv_dtype"] == "e4m3" for point in asked):
        pass_ = "forward"  # there is no other
    chosen: list[tuple[Any, ...]] = list(
        product(
            sweep.gpus(gpu) if gpu is not None else [here()],
            algorithms,
            asked,
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
    waves = l2 == "waves" or (l2 == "auto" and len(chosen) > SIMULATED_POINTS)
    rates = {g.name: rates_of(g, ceilings) for g, *_ in chosen}

    points: list[Prediction | dict[str, Any]] = []
    for g, name, point, kind, b, h, kv, d, n, nk, block, one_pass in chosen:
        fields = {"batch": b, "heads": h, "kv_heads": kv, "seqlen_q": n, "seqlen_k": nk or n}
        fields |= {"head_dim": d, "dtype": kind, **fields_of(point, b, h)}
        try:
            own = {field: value for field, value in fields.items() if hasattr(Problem, field)}
            shape = AttentionShape(**{field: value for field, value in fields.items() if field not in own})
            problem = Problem(shape, tile=block, **own)
            points.append(predict(name, problem, one_pass, g, ceilings=rates[g.name], waves=waves, once=l2 == "once"))
        except ValueError as error:
            if len(chosen) == 1:
                raise
            failed = {"algorithm": name, "pass": one_pass, "gpu": g.name, **labels_of(fields)}
            if block:
                failed |= {"block_m": block.block_m, "block_n": block.block_n}
            points.append(failed | {"error": str(error)})
    output.require_a_point(points)
    _show(points, as_json, as_csv, output.style_of(markdown, latex))
    if compare and not (as_json or as_csv):
        predict_peers.table(points, output.style_of(markdown, latex))


def labels_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of a problem that cannot be, from the fields that it would have."""
    same = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "dtype", "scale_block", "causal", "sinks", "order")
    left, right = fields["window"]
    return {
        **{name: fields.get(name) for name in same},
        "kv_heads": fields["kv_heads"] or fields["heads"],
        "kv_dtype": "e4m3" if fields.get("fp8") else fields["dtype"],
        "window_left": left,
        "window_right": right,
    }


def _refuse_beside_seqlens(batch: str, seqlen: str, seqlen_k: str | None, bias: str, l2: str) -> None:
    """ValueError naming an option that --seqlens stands in the place of, or does not go with."""
    for name, value, unset in (("--batch", batch, BATCH), ("--seqlen", seqlen, SEQLEN), ("--seqlen-k", seqlen_k, None)):
        if value != unset:
            raise ValueError(f"--seqlens stands in the place of {name} {value}")
    if bias != "none":
        raise ValueError(f"--bias {bias} does not go with --seqlens")
    if l2 in ("simulated", "waves"):
        raise ValueError(f"--l2 {l2} with --seqlens: no L2 is simulated for packed sequences")


def here() -> Gpu:
    """This machine's GPU where ``analysis.hardware`` knows it, else the H200 of our records, and a
    line on standard error if there is another one."""
    card = machine.gpu()
    found = None if card is None else find_gpu(card.name)
    if card is not None and found is None:
        say(f"{card.name} is none of the known GPUs: predicting for {H200.name}; --gpu file.toml describes another")
    return found or H200


def rates_of(gpu: Gpu, kind: str) -> Ceilings:
    """Ceilings from the datasheet, at the clock that is held under load, or as measured on this GPU
    where that is on record.

    Raises ValueError where nothing was measured.
    """
    sheet = ceilings_of(gpu)
    if kind == "datasheet":
        return sheet
    from repro.measuring.records import load

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
        raise ValueError(
            f"no ceiling of {gpu.name} is on record; use --ceilings datasheet, or on that machine: "
            "python -m repro measure gpu-ceilings"
        )
    names = ", ".join(name.split("_per_s")[0] for name in known)
    origin = f"measured on {rows[0].device}: {names}; datasheet: the rest"
    return replace(sheet, **known, origin=origin)


def _show(points: list[Prediction | dict[str, Any]], as_json: bool, as_csv: bool, style: str) -> None:
    rows = [p if isinstance(p, dict) else p.row() for p in points]
    if as_csv:
        output.print_csv(rows)
    elif as_json:
        full = []
        for point, row in zip(points, rows, strict=True):
            if isinstance(point, Prediction):
                row["reason"] = point.reason
                row["why_bound"] = point.why()
                row["bound_by_kernel"] = dict(point.time.bound_by)
                row["saved"] = {t.name: t.bytes for t in point.saved}
                row["peak"] = {t.name: t.bytes for t in point.peak}
                row["ceilings"] = point.ceilings.origin
                row["tensors"] = point.tensors()
                row["recorded"] = predict_peers.recorded(point)
            full.append(row)
        output.print_json(full)
    else:
        tables(points, rows, style)
