"""The calculator's JavaScript against Python: under Node and in headless Chromium, if present."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import sympy as sp

from analysis import symbolic_costs
from analysis.flops import useful_flops
from analysis.hardware import GPUS
from analysis.hbm import compulsory_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.time_model import datasheet_ceilings
from analysis.traffic import predict_traffic
from figures.report import calculator, page
from repro.prediction import predict

HERE = Path(page.__file__).parent
CHROMIUM = next((n for n in ("chromium", "chromium-browser", "google-chrome") if shutil.which(n)),
                None)  # fmt: skip


def inputs(count: int) -> list[dict[str, Any]]:
    chance = random.Random(7)
    found = []
    for _ in range(count):
        algorithm = chance.choice(symbolic_costs.ALGORITHMS)
        kv_heads = chance.choice((1, 2, 3))
        group = chance.choice((1, 4)) if algorithm in calculator.GROUPED else 1
        seqlen_q, causal = chance.randint(1, 5000), chance.random() < 0.5
        seqlen_k = chance.randint(seqlen_q if causal else 1, 6000)
        found.append({
            "algorithm": algorithm, "pass": chance.choice(("forward", "backward")),
            "gpu": chance.choice(list(GPUS)), "dtype": chance.choice(("fp16", "bf16", "fp32")),
            "batch": chance.randint(1, 8), "heads": kv_heads * group, "kv_heads": kv_heads,
            "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
            "head_dim": chance.choice((40, 64, 128, 256)),
            "block_m": chance.choice((16, 48, 128, 256)), "block_n": chance.choice((16, 64, 96)),
            "causal": causal,
        })  # fmt: skip
    return found


def refusal(given: dict[str, Any]) -> str | None:
    """Why ``predict`` refuses it, or None."""
    shape = AttentionShape(
        given["batch"], given["heads"], given["seqlen_q"], given["seqlen_k"], given["head_dim"],
        given["kv_heads"], given["dtype"], given["causal"],
    )  # fmt: skip
    tile = Tile(given["block_m"], given["block_n"])
    try:
        predict(given["algorithm"], shape, given["pass"], GPUS[given["gpu"]], tile=tile, waves=True)
    except ValueError as error:
        return str(error)
    return None


def expected(given: dict[str, Any]) -> dict[str, Any]:
    """By the integer sums of ``analysis``, which know nothing of SymPy."""
    shape = AttentionShape(
        given["batch"], given["heads"], given["seqlen_q"], given["seqlen_k"], given["head_dim"],
        given["kv_heads"], given["dtype"], given["causal"],
    )  # fmt: skip
    tile = Tile(given["block_m"], given["block_n"])
    traffic = predict_traffic(given["algorithm"], shape, tile, given["pass"])
    once = compulsory_hbm(traffic, shape)
    return {
        "traffic": {f"{t} {way}": n for (t, way), n in traffic.by_tensor().items()},
        "sm_bytes": traffic.total_bytes,
        "hbm_read_bytes": once.read_bytes,
        "hbm_write_bytes": once.write_bytes,
        "flops": useful_flops(shape, given["pass"], recompute=given["algorithm"] != "standard"),
        "hbm_s": (once.read_bytes + once.write_bytes)
        / datasheet_ceilings(GPUS[given["gpu"]]).hbm_bytes_per_s,
    }


def check(given: dict[str, Any], result: dict[str, Any]) -> None:
    want = expected(given)
    assert {f"{t} {way}": n for t, way, n in result["traffic"]} == want["traffic"]
    for name in ("sm_bytes", "hbm_read_bytes", "hbm_write_bytes", "flops"):
        assert result[name] == want[name], (name, given)
    assert result["times"]["HBM"] == pytest.approx(want["hbm_s"])
    assert result["seconds"] == max(result["times"].values())


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_numbers_are_pythons_under_node() -> None:
    questions = inputs(150)
    code = (
        calculator.script() + (HERE / "calculator.js").read_text()
        + "\nconst answer = (q) => { try { return calculate(q); } "
        + "catch (e) { return {refused: e.message}; } };"
        + f"\nconsole.log(JSON.stringify({json.dumps(questions)}.map(answer)));"
    )  # fmt: skip
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = 0
    for given, result in zip(questions, json.loads(done.stdout), strict=True):
        reason = refusal(given)
        assert (reason is None) == ("refused" not in result), (given, reason, result)
        if reason is None:
            check(given, result)
        else:
            refused += 1
    assert 5 < refused < 75


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"seqlen_q": 1.5}, "seqlen_q = 1.5"),
        ({"heads": 3, "kv_heads": 2}, "heads = 3 is not a multiple of kv_heads = 2"),
        ({"algorithm": "flash1-skip-first", "heads": 4, "kv_heads": 2}, "as many key/value heads"),
        ({"causal": True, "seqlen_k": 8}, "seqlen_k = 8 is below seqlen_q = 16"),
        ({"algorithm": "flash1", "seqlen_q": 10**9, "block_m": 1}, "ten million"),
        ({"gpu": "T4"}, "T4 does not compute in bf16: use fp16"),
        ({"head_dim": 257}, "head_dim = 257 is above 256"),
        ({"block_m": 13}, "multiples of 16"),
        (
            {"pass": "backward", "head_dim": 128, "block_m": 256, "block_n": 256, "dtype": "fp32"},
            "tile 256 x 256 does not fit the flash backward",
        ),
    ],
)
def test_what_cannot_be_is_said_in_words(change, message):
    given = {
        "algorithm": "flash", "pass": "forward", "gpu": "H200", "dtype": "bf16", "batch": 1,
        "heads": 2, "kv_heads": 2, "seqlen_q": 16, "seqlen_k": 16, "head_dim": 64,
        "block_m": 16, "block_n": 16, "causal": False, **change,
    }  # fmt: skip
    code = (
        calculator.script() + (HERE / "calculator.js").read_text()
        + f"\ntry {{ calculate({json.dumps(given)}); }} catch (e) {{ console.log(e.message); }}"
    )  # fmt: skip
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    assert message in done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_shows_pythons_numbers_in_a_browser(tmp_path: Path) -> None:
    sections = [
        ("verdicts", "Verdicts", page.verdict_section([])),
        ("calculator", "Calculator", page.calculator_section()),
    ]
    report = tmp_path / "report.html"
    report.write_text(page.page(sections), encoding="utf-8")
    for given in inputs(2):
        query = {name: value for name, value in given.items() if name != "causal"}
        query |= {"causal": 1} if given["causal"] else {}
        assert CHROMIUM is not None
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=3000", "--dump-dom",
             f"{report.as_uri()}#calculator?{urlencode(query)}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found = re.findall(r'<th scope="row">([^<]+)</th><td data-value="([^"]+)"', done.stdout)
        shown = {name: float(value) for name, value in found}
        want = expected(given)
        assert {n: shown[n] for n in want["traffic"]} == want["traffic"]
        assert shown["SM boundary"] == want["sm_bytes"]
        assert shown["useful work"] == want["flops"]
        assert shown["HBM read"] == want["hbm_read_bytes"]
        assert 'id="theme">Theme: auto' in done.stdout.replace(' hidden=""', "")


def test_memory_in_the_page_is_that_of_the_prediction() -> None:
    """Saved and peak bytes have their own lists in Python; the printed functions must agree."""
    shape = AttentionShape(2, 4, 1000, 1000, 64)
    for algorithm in symbolic_costs.ALGORITHMS:
        for pass_ in ("forward", "backward"):
            found = predict(algorithm, shape, pass_, GPUS["H200"])
            values = symbolic_costs.values_of(
                shape, found.tile.block_m, found.tile.block_n, (1, 1, 1, 1)
            )
            peak = symbolic_costs.peak_bytes(algorithm, pass_)
            assert symbolic_costs.evaluate(peak, values) == found.peak_bytes


def test_sums_are_printed_as_loops_and_powers_as_products() -> None:
    i, n = sp.symbols("i n")
    assert calculator.function(sp.Sum(i * n, (i, 0, n - 1))) == (
        "({n}) => (() => { let t = 0; for (let i = 0; i <= n - 1; i++) t += i*n; return t; })()"
    )
    assert calculator.function(n**2) == "({n}) => n*n"
    with pytest.raises(NotImplementedError):
        calculator.function(sp.Sum(i, (i, 0, n), (n, 0, 3)))
