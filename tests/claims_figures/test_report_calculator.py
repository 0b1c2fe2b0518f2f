"""The calculator's JavaScript against Python: under Node and in headless Chromium, if present."""

from __future__ import annotations

import html
import inspect
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import sympy as sp

from analysis import symbolic_costs
from analysis.algorithms import Family, find
from analysis.hardware import GPUS
from analysis.shapes import AttentionShape, Tile
from figures.report import calculator, form, page
from kernels import hopper
from kernels.launch import DTYPE_CODE, Kernel
from kernels.timing import ampere_time, hopper_time
from repro.commands.predict import NAMES, bias_of, command, rates_of
from repro.prediction import Prediction, predict

HERE = Path(page.__file__).parent
CHROMIUM = next((n for n in ("chromium", "chromium-browser", "google-chrome") if shutil.which(n)),
                None)  # fmt: skip


def clocks_on_record(patch: pytest.MonkeyPatch) -> None:
    """Kernels have the clocks that were recorded for them whatever their source's state."""
    patch.setattr(hopper_time, "digest_of", recorded_digest)
    patch.setattr(ampere_time, "digest_of", recorded_digest_of_ampere)


@pytest.fixture(scope="module")
def printed() -> Iterator[str]:
    """The JavaScript, with the clocks on record."""
    with pytest.MonkeyPatch.context() as patch:
        clocks_on_record(patch)
        calculator.script.cache_clear()
        yield calculator.script() + (HERE / "calculator.js").read_text(encoding="utf-8")
    calculator.script.cache_clear()


def recorded_digest(
    form: hopper_time.Form, causal: bool, optimistic: bool = False, features: tuple[str, ...] = ()
) -> str:
    pass_ = "backward" if isinstance(form, hopper.BackwardForm) else "forward"
    name = hopper_time.name_of(form, optimistic, features)
    return hopper_time._recorded()[pass_, name, str(causal)]["digest"]


@cache
def digests_of_ampere() -> dict[tuple[str, tuple[tuple[str, int], ...]], str]:
    """Entry and macros of a default kernel -> the digest that its row has."""
    found = {}
    for digest, row in ampere_time._rows().items():
        causal = row["causal"] == "True"
        kernel = ampere_time.config_of(row["pass"], int(row["head_dim"]), causal).kernel()
        found[kernel.entry, kernel.macros] = digest
    return found


def recorded_digest_of_ampere(kernel: Kernel) -> str:
    macros = dict(kernel.macros)
    if macros["DTYPE"] == DTYPE_CODE["bf16"]:
        macros["DTYPE"] = DTYPE_CODE["fp16"]
    return digests_of_ampere().get((kernel.entry, tuple(macros.items())), "")


#: What a question has where nothing is asked for.
UNASKED: dict[str, Any] = {
    "softcap": False, "alibi": False, "bias": "none", "window_left": None, "window_right": None,
    "sinks": 0, "order": "rows", "ceilings": "datasheet",
}  # fmt: skip


def inputs(count: int) -> list[dict[str, Any]]:
    """Every algorithm, GPU, type and option; half with the kernels' own tile; padded head
    dimensions; fewer keys than queries, causal or not."""
    chance = random.Random(7)
    found = []
    for _ in range(count):
        algorithm = chance.choice(("auto", "auto", "flash", *calculator.NAMES))
        kv_heads = chance.choice((1, 2, 3))
        group = chance.choice((1, 4)) if algorithm in calculator.GROUPED else 1
        tile = (None, None)
        if chance.random() < 0.4:
            tile = chance.choice((16, 48, 128, 192, 256)), chance.choice((16, 64, 96, 128))
        known = ("H200", "H100-SXM5-80GB", "H100-PCIe-80GB", "A100-SXM4-80GB", "A100-PCIe-80GB")
        asked = {
            "softcap": chance.random() < 0.25, "alibi": chance.random() < 0.25,
            "bias": chance.choice((*["none"] * 4, "full", "heads", "items", "one")),
            "window_left": chance.choice((None, None, 0, 1, 100, 5000)),
            "window_right": chance.choice((None, None, None, 0, 17)),
            "sinks": chance.choice((0, 0, 4, 300)),
            "order": chance.choice(("rows", "rows", "sawtooth")),
            "ceilings": chance.choice(("datasheet", "datasheet", "measured")),
        }  # fmt: skip
        keep = chance.choice((0.0, 0.3, 1.0))  # nothing, a few or all of them
        found.append({
            **{name: asked[name] if chance.random() < keep else UNASKED[name] for name in asked},
            "algorithm": algorithm, "pass": chance.choice(("forward", "backward")),
            "gpu": chance.choice(known if chance.random() < 0.6 else list(GPUS)),
            "dtype": chance.choice(("fp16", "bf16", "bf16", "fp32")),
            "batch": chance.choice((1, 1, 2, 5)), "heads": kv_heads * group, "kv_heads": kv_heads,
            "seqlen_q": chance.randint(1, 6000), "seqlen_k": chance.randint(1, 7000),
            "head_dim": chance.choice((40, 64, 64, 100, 128, 128, 256, 31, 257)),
            "block_m": tile[0], "block_n": tile[1], "causal": chance.random() < 0.5,
        })  # fmt: skip
    return found


def on_hopper(count: int) -> list[dict[str, Any]]:
    """Passes of the Hopper kernels with windows and sinks, some of them capped."""
    chance = random.Random(8)
    return [
        {
            **UNASKED, "algorithm": chance.choice(("auto", "flash-sm90")),
            "pass": chance.choice(("forward", "backward")),
            "gpu": "H200", "dtype": "bf16", "batch": 1, "heads": 4, "kv_heads": 2,
            "seqlen_q": chance.randint(1, 3000), "seqlen_k": chance.randint(1, 3000),
            "head_dim": chance.choice((64, 128, 256)), "block_m": None, "block_n": None,
            "causal": chance.random() < 0.5, "softcap": chance.random() < 0.5,
            "window_left": chance.choice((None, 0, 100, 1000)),
            "window_right": chance.choice((None, 0, 50, 700)), "sinks": chance.choice((0, 4, 300)),
        }
        for _ in range(count)
    ]  # fmt: skip


def python(given: dict[str, Any]) -> Prediction | str:
    """What ``predict`` says, or why it refuses."""
    try:
        shape = AttentionShape(
            given["batch"], given["heads"], given["seqlen_q"], given["seqlen_k"],
            given["head_dim"], given["kv_heads"], given["dtype"], given["causal"],
            (given["window_left"], given["window_right"]), given["sinks"],
        )  # fmt: skip
        tile = Tile(given["block_m"], given["block_n"]) if given["block_m"] else None
        return predict(
            given["algorithm"], shape, given["pass"], given["gpu"], tile=tile, once=True,
            ceilings=rates_of(GPUS[given["gpu"]], given["ceilings"]),
            softcap=given["softcap"], alibi=given["alibi"], order=given["order"],
            bias=bias_of(given["bias"], shape.batch, shape.heads),
            bias_gradient=given["bias"] != "none",
        )  # fmt: skip
    except ValueError as error:
        return str(error)


def check(want: Prediction, found: dict[str, Any]) -> None:
    """Bytes, blocks and names are equal; seconds but for the order of a sum."""
    assert found["algorithm"] == want.algorithm
    assert (found["form"], found["reason"]) == (want.form, "" if want.theory else want.reason or "")
    assert (found["block_m"], found["block_n"]) == (want.tile.block_m, want.tile.block_n)
    assert (found["head_dim"], found["columns"]) == (want.padded.head_dim, want.columns)
    assert (found["blocks_per_sm"], found["spills"]) == (want.blocks_per_sm, bool(want.warning))
    if find(want.algorithm).family is not Family.STANDARD:
        assert (found["blocks"], found["idle_sms"]) == (want.blocks, want.idle_sms)
    moved = {f"{t} {way}": n for (t, way), n in want.traffic.by_tensor().items()}
    assert {f"{t} {way}": n for t, way, n in found["traffic"]} == moved
    assert found["sm_bytes"] == want.traffic.total_bytes
    assert found["copy_bytes"] == want.copy_bytes
    assert found["hbm_read_bytes"] == want.hbm.read_bytes
    assert found["hbm_write_bytes"] == want.hbm.write_bytes
    assert found["saved_bytes"] == want.saved_bytes
    assert (found["peak_bytes"], found["fits"]) == (want.peak_bytes, want.fits)
    assert found["flops"] == want.useful_flops
    assert found["times"] == pytest.approx(dict(want.time.by_resource), rel=1e-12)
    assert found["seconds"] == pytest.approx(want.time.seconds, rel=1e-12)
    assert found["ceilings"] == want.ceilings.origin
    assert found["predicted"] == (want.predicted_s and pytest.approx(want.predicted_s, rel=1e-12))


def test_the_script_asks_for_nothing_from_outside(printed: str) -> None:
    assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest|import\(", printed)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_answers_are_those_of_predict_under_node(
    printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, its tile and form, every byte, the bound at each ceiling and the predicted time;
    what one refuses the other refuses."""
    clocks_on_record(monkeypatch)
    questions = [*inputs(1000), *on_hopper(60)]
    code = (
        printed
        + "\nconst answer = (q) => { try { return calculate(q); } "
        + "catch (e) { return {refused: e.message}; } };"
        + f"\nconsole.log(JSON.stringify({json.dumps(questions)}.map(answer)));"
    )
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: Counter[str] = Counter()
    for given, result in zip(questions, json.loads(done.stdout), strict=True):
        want = python(given)
        assert isinstance(want, str) == ("refused" in result), (given, want, result)
        if isinstance(want, str):
            seen["refused"] += 1
            continue
        check(want, result)
        seen[want.algorithm] += 1
        seen[f"predicted {want.pass_}"] += want.predicted_s is not None
        on_ampere = ampere_time.runs_on(want.gpu) and want.predicted_s is not None
        seen[f"predicted {want.pass_} on an A100"] += on_ampere
        seen["padded"] += want.copy_bytes > 0
        seen["shared memory binds"] += want.time.binding == "shared memory"
        seen["causal, fewer keys"] += given["causal"] and given["seqlen_k"] < given["seqlen_q"]
        seen["a window hides keys"] += want.shape.windowed
        timed = want.predicted_s is not None and want.algorithm == "flash-sm90"
        seen["predicted with a window on Hopper"] += timed and want.shape.windowed
        seen["predicted with a softcap on Hopper"] += timed and given["softcap"]
        for name, unasked in UNASKED.items():
            seen[name] += given[name] != unasked
        seen[f"bias {given['bias']} {want.pass_}"] += 1
    biases = (f"bias {b} {p}" for b in ("full", "one") for p in ("forward", "backward"))
    for what in ("flash", "flash-sm90", "standard", "flash1-released", "padded",
                 "predicted forward", "predicted backward", "predicted forward on an A100",
                 "predicted backward on an A100", "causal, fewer keys",
                 "a window hides keys", "predicted with a window on Hopper",
                 "predicted with a softcap on Hopper", *UNASKED, *biases):  # fmt: skip
        assert seen[what] >= 8, (what, seen)
    assert 150 < seen["refused"] < 600
    assert seen["shared memory binds"] >= 3


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"seqlen_q": 1.5}, "seqlen_q = 1.5"),
        ({"heads": 3, "kv_heads": 2}, "heads = 3 is not a multiple of kv_heads = 2"),
        ({"algorithm": "flash1-skip-first", "heads": 4, "kv_heads": 2}, "as many key/value heads"),
        ({"algorithm": "standard", "softcap": True}, "softcap"),
        ({"algorithm": "flash-sm90", "softcap": True, "pass": "backward"}, "at head_dim 64"),
        ({"algorithm": "flash1-released", "bias": "one"}, "bias"),
        ({"algorithm": "flash1-released", "window_left": 3}, "window"),
        ({"algorithm": "standard", "order": "sawtooth"}, "no order='sawtooth'"),
        ({"window_left": -1}, "window_left = -1"),
        ({"sinks": 0.5}, "sinks = 0.5"),
        ({"gpu": "L4", "ceilings": "measured"}, "no ceiling of L4"),
        ({"algorithm": "flash1-literal", "seqlen_q": 10**9, "block_m": 1}, "ten million"),
        ({"block_n": None}, "give both, or neither"),
        ({"algorithm": "flash-sm90", "gpu": "L4"}, "flash-sm90 needs compute capability 9.0"),
        (
            {"algorithm": "flash-sm90", "block_m": None, "block_n": None, "head_dim": 96},
            "head_dim = 96: the Hopper forward covers 64, 128, 256",
        ),
        ({"algorithm": "flash-sm90", "block_m": 16}, "no tile 16 x 16 at head_dim 64"),
        ({"gpu": "T4"}, "T4 does not compute in bf16: use fp16"),
        ({"head_dim": 257}, "head_dim = 257 is above 256"),
        ({"block_m": 13}, "multiples of 16"),
        (
            {"pass": "backward", "head_dim": 128, "block_m": 256, "block_n": 256, "dtype": "fp32"},
            "tile 256 x 256 does not fit the flash backward",
        ),
    ],
)
def test_what_cannot_be_is_said_in_words(printed, change, message):
    given = {
        "algorithm": "flash", "pass": "forward", "gpu": "H200", "dtype": "bf16", "batch": 1,
        "heads": 2, "kv_heads": 2, "seqlen_q": 16, "seqlen_k": 16, "head_dim": 64,
        "block_m": 16, "block_n": 16, "causal": False, **UNASKED, **change,
    }  # fmt: skip
    code = (
        f"{printed}\ntry {{ calculate({json.dumps(given)}); }} "
        "catch (e) { console.log(e.message); }"
    )
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    assert message in done.stdout


def test_each_option_of_the_command_is_in_the_form_or_named_as_missing() -> None:
    """A new option of ``predict`` has to be said in one of the two lists."""
    options = set(inspect.signature(command).parameters)
    assert options == set(form.COVERED) | set(form.NOT_COVERED)
    assert not set(form.COVERED) & set(form.NOT_COVERED)
    shown = form.section()
    fields = re.findall(r'name="(\w+)"', shown)
    assert sorted(fields) == sorted({f for each in form.COVERED.values() for f in each})
    assert {*fields} == {*inputs(1)[0]}
    for words in (*form.NOT_COVERED.values(), *form.VALUES_NOT_COVERED):
        assert html.escape(words) in shown
    assert {*calculator.NAMES, *form.ALGORITHMS_NOT_COVERED} == {*NAMES}


#: As much of a page as the calculator touches. FormData gives FIELDS.
STUB = """
class Element {
  constructor() { this.dataset = {}; this.children = []; this.elements = []; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  querySelector() { return this.body || (this.body = new Element()); }
  addEventListener() {}
}
const message = new Element();
globalThis.document = { createElement: () => new Element(), getElementById: () => message };
globalThis.location = { hash: "" };
globalThis.addEventListener = () => {};
globalThis.FormData = class {
  has(name) { return FIELDS.some(([field]) => field === name); }
  [Symbol.iterator]() { return FIELDS[Symbol.iterator](); }
};
const output = new Element();
attach(new Element(), output);
const rows = output.body.children.map((row) => row.children.map((cell) => cell.textContent));
console.log(JSON.stringify([message.textContent, rows]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_form_s_table_names_kernel_bound_and_predicted_time(
    printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty tile is the kernels' own; units and remarks beside the numbers."""
    clocks_on_record(monkeypatch)

    def shown(**change: Any) -> tuple[str, dict[str, list[str]]]:
        fields = {
            "algorithm": "auto", "pass": "backward", "gpu": "H200", "dtype": "bf16", "batch": 1,
            "heads": 2, "kv_heads": 2, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128,
            "block_m": "", "block_n": "", "window_left": "", "window_right": "", "sinks": 0,
            "bias": "none", "order": "rows", "ceilings": "datasheet", **change,
        }  # fmt: skip
        listed = json.dumps([[name, str(value)] for name, value in fields.items()])
        code = f"{printed}\nconst FIELDS = {listed};\n{STUB}"
        done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
        message, rows = json.loads(done.stdout)
        return message, {name: [value, note] for name, value, note in rows}

    shape = AttentionShape(1, 2, 4096, 4096, 128, dtype="bf16")
    want = predict("auto", shape, "backward", "H200", once=True)
    message, rows = shown()
    assert message == ""
    assert rows["kernel"] == [f"flash-sm90, {want.form}", "the Hopper kernels cover it"]
    assert rows["tile"] == ["80 x 128", f"64 blocks, 1 to an SM: {want.idle_sms} of 132 SMs idle"]
    rate = f"{want.row()['tflops_bound']:.3g}"
    bound = f"at most {float(rate):g} TFLOP/s; datasheet of H200"
    assert rows["time bound"][1] == bound
    assert "from machine code at 1.7 GHz" in rows["predicted time"][1]
    message, rows = shown(head_dim=100)
    assert rows["kernel"][0] == "flash"
    assert rows["useful work"][1] == "head_dim 100 is multiplied as 128 columns"
    assert rows["of which copies"][1] == "rows padded to 104"
    assert "predicted time" not in rows
    assert shown(gpu="T4") == ("T4 does not compute in bf16: use fp16 or fp32 (--dtype fp16)", {})


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_shows_pythons_numbers_in_a_browser(tmp_path: Path) -> None:
    sections = [
        ("figures", "Figures", page.figures_section({}, {})),
        ("verdicts", "Verdicts", page.verdict_section([])),
        ("calculator", "Calculator", form.section()),
    ]
    report = tmp_path / "report.html"
    report.write_text(page.page(sections), encoding="utf-8")
    for given in [q for q in inputs(20) if not isinstance(python(q), str)][:2]:
        query = {n: "" if v is None else v for n, v in given.items() if v is not False}
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
        want = python(given)
        assert isinstance(want, Prediction)
        moved = {f"{t} {way}": n for (t, way), n in want.traffic.by_tensor().items()}
        assert {n: shown[n] for n in moved} == moved
        assert shown["SM boundary"] == want.traffic.total_bytes
        assert shown["useful work"] == want.useful_flops
        assert shown["HBM read"] == want.hbm.read_bytes
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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_table_is_the_same_however_it_is_written(printed: str) -> None:
    """And the script stays small beside the figures, which take most of a page of 4 MB."""
    assert len(printed) < 350_000
    table = {f"{i} {j}": [i, 0.1] for i in range(3) for j in range(40)}
    written = calculator.written(table)
    assert len(written) < len(json.dumps(table)) / 1.4
    code = f"{printed}\nconsole.log(JSON.stringify({written}));"
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == table
    assert calculator.written({"a": 1}) == '{"a": 1}'


def test_sums_are_printed_as_loops_and_powers_as_products() -> None:
    i, n = sp.symbols("i n")
    assert calculator.function(sp.Sum(i * n, (i, 0, n - 1))) == (
        "({n}) => (() => { let t = 0; for (let i = 0; i <= n - 1; i++) t += i*n; return t; })()"
    )
    assert calculator.function(n**2) == "({n}) => n*n"
    with pytest.raises(NotImplementedError):
        calculator.function(sp.Sum(i, (i, 0, n), (n, 0, 3)))
