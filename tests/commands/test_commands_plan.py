"""``plan``: named, imported and measured models; budgets, strategies, outputs, mistakes."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

import repro
from analysis.checkpointing import Action, Keep, Op, Value, greedy, simulate, smallest_budget, store_all
from analysis.checkpointing.modules import layers_of
from analysis.clocks import ceilings_of
from analysis.hardware import H200
from analysis.parallel_activations import LayerShape, saved_bytes
from repro.commands import plan
from repro.commands.chains import PRESETS, transformer_chain
from tests.support.command_support import run


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].kind == "gpt"])
def test_a_named_model_saves_what_the_paper_counts(name):
    """Korthikanti 2022, Eq. 1: sbh(34 + 5as/h) bytes a layer; selective leaves 34 sbh."""
    preset = PRESETS[name]
    shape = LayerShape(preset.seqlen, 2, preset.hidden, preset.heads)
    for attention, recompute in (("standard", "none"), ("flash", "selective")):
        chain = transformer_chain(preset, batch=2, gpu=H200, attention=attention)
        held = sum(s.activation_bytes + s.saved_bytes for s in chain.stages)
        if attention == "flash":  # and a row statistic, which the paper leaves out
            held -= 4 * preset.layers * preset.heads * preset.seqlen * 2
        # The first norm's input is the chain's; the last stage's output belongs to what follows.
        assert held == preset.layers * saved_bytes(shape, recompute=recompute)


def test_a_total_budget_leaves_what_weights_and_logits_do_not_take(capsys):
    small = ("plan", "llama3-8b", "--layers", "2", "--seqlen", "1024")
    decoder = replace(PRESETS["llama3-8b"], layers=2, seqlen=1024)
    held = 16 * decoder.parameters + 4 * 1024 * 128256
    status, out, _ = run(capsys, *small, "--total-budget", f"{held + 400_000_000}B", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["budget_bytes"] == 400_000_000
    assert found["parameters"] == decoder.parameters
    (stage,) = found["pipeline_stages"]
    assert sum(stage["parts"].values()) == held
    alone = run(capsys, *small, "--budget", "400MB", "--json")[1]
    assert found["plans"] == json.loads(alone)["plans"]
    status, out, _ = run(capsys, *small, "--total-budget", "40GB")
    assert "1.49 billion parameters at 16 bytes: parameters 2.974 GB, gradients 2.974 GB" in out
    for options, said in [
        (("--total-budget", "20GB"), f"take {held} bytes"),
        (("--total-budget", "40GB", "--budget", "1GB"), "give one"),
    ]:
        status, _, err = run(capsys, *small, *options)
        assert status == 1
        assert said in err
    status, _, err = run(capsys, "plan", "chain-8", "--total-budget", "1GB")
    assert (status, "whose weights are not known" in err) == (1, True)


def test_a_decoder_is_named_by_its_sizes(capsys):
    sizes = ("--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336")
    mine = ("plan", "llama", *sizes, "--layers", "2", "--seqlen", "512", "--csv")
    named = ("plan", "mistral-7b", "--layers", "2", "--seqlen", "512", "--csv")
    assert run(capsys, *mine)[1] == run(capsys, *named)[1]
    status, _, err = run(capsys, "plan", "llama", "--hidden", "4096")
    assert (status, err) == (1, "error: model 'llama' has the sizes that you give it: --layers, --heads\n")
    status, _, err = run(capsys, "plan", "chain-8", "--hidden", "64")
    assert (status, err) == (1, "error: model 'chain-8' has its own sizes, not --hidden 64\n")


def test_every_planner_is_compared_and_the_table_marks_the_front(capsys):
    status, out, err = run(capsys, "plan", "gpt2-small", "--csv")
    assert (status, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    peaks = [int(r["peak_bytes"]) for r in rows]
    assert peaks == sorted(peaks)
    assert {"store all", "exponential", "Chen's search"} <= {r["plan"] for r in rows}
    assert float(rows[-1]["overhead"]) == 0
    status, out, _ = run(capsys, "plan", "gpt2-small")
    assert "* no other plan here is as fast with less memory" in out


def action(text: str) -> Action:
    op, rest = text.split(" ", 1)
    stage, _, detail = rest.partition(" ")
    detail = detail.strip("()")
    return Action(
        Op(op),
        int(stage),
        keep=Keep(detail) if op == "forward" else None,
        value=Value(detail) if op in ("drop", "offload", "fetch") else None,
    )


@pytest.mark.parametrize("budget", ["15%", "200MB", "60%", "100%"])
def test_a_budget_is_kept_by_a_schedule_that_replays(capsys, budget):
    status, out, _ = run(capsys, "plan", "gpt2-small", "--budget", budget, "--batch", "2", "--json")
    assert status == 0
    found = json.loads(out)
    (chosen,) = [p for p in found["plans"] if "schedule" in p]
    assert all(p["peak_bytes"] <= found["budget_bytes"] for p in found["plans"])
    assert all(chosen["seconds"] <= p["seconds"] for p in found["plans"])
    chain = plan.chain_of("gpt2-small", batch=2)
    replay = simulate(chain, tuple(action(a) for a in chosen["schedule"]))
    assert replay.peak_bytes == chosen["peak_bytes"] <= found["budget_bytes"]
    assert replay.forwards == chosen["forwards"]
    if budget == "100%":
        assert replay.advances == 0


def test_a_budget_below_the_least_is_refused_and_the_least_is_named(capsys):
    status, out, err = run(capsys, "plan", "chain-16", "--budget", "1MiB")
    assert (status, out) == (1, "")
    least = int(err.split("smallest feasible budget is ")[1].split()[0])
    assert run(capsys, "plan", "chain-16", "--budget", str(least))[0] == 0
    assert run(capsys, "plan", "chain-16", "--budget", str(least - 1))[0] == 1


def test_a_strategy_tells_what_runs_twice_and_its_actions(capsys):
    status, out, _ = run(capsys, "plan", "chain-16", "--strategy", "sqrt", "--actions")
    assert status == 0
    assert "forward once: stages 13-16" in out
    assert "forward twice: stages 1-12" in out
    assert "backward 1 " in out


MODEL = """
from torch import nn, ones
from analysis.checkpointing import uniform_chain
chain = uniform_chain(8, activation_bytes=100)
def small():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), ones(16, 64)
class nested:
    model = nn.Sequential(nn.Linear(4, 4))
"""


def test_models_come_by_import_path(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "mymodels.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "plan", "mymodels:chain", "--strategy", "recompute-all", "--json")
    assert status == 0
    assert json.loads(out)["plans"][0]["forwards"] == 8 * 9 // 2
    status, out, _ = run(capsys, "plan", "mymodels:small", "--strategy", "store-all", "--json", "--repeats", "0")
    assert status == 0
    found = json.loads(out)
    assert found["stages"] == 4
    # Four outputs and the input of 16 x 64 fp32, and the two gradients of the worst moment.
    assert found["plans"][0]["peak_bytes"] >= 5 * 16 * 64 * 4
    for path, message in [
        ("mymodels:nothing", "has no 'nothing'"),
        ("mymodels:nested.model", "a pair of a model and an input"),
        ("absent_module:x", "cannot import 'absent_module'"),
    ]:
        status, _, err = run(capsys, "plan", path)
        assert status == 1
        assert message in err


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plot_is_the_same_whatever_a_matplotlibrc_says(tmp_path, monkeypatch, capsys, ending):
    import matplotlib

    monkeypatch.delenv("DISPLAY", raising=False)
    users = {"text.usetex": True, "savefig.transparent": True, "savefig.dpi": 20.0, "svg.fonttype": "none"}
    images = []
    for settings in ({}, users):
        path = tmp_path / f"{len(images)}.{ending}"
        with matplotlib.rc_context(settings):
            assert run(capsys, "plan", "chain-8", "--plot", str(path))[0] == 0
            assert settings.items() <= matplotlib.rcParams.items(), "the user's settings are kept"
        images.append(path.read_bytes())
    assert images[0] == images[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt5",), "known: gpt2-small"),
        (("chain-0",), "at least 1 stage"),
        (("chain-99999999",), "chains of more than 4096 stages"),
        ((":",), "model ':': cannot import ''"),
        ((".x:y",), "model '.x:y': cannot import '.x'"),
        (("chain-8", "--strategy", "magic"), "no strategy 'magic'; known: store-all"),
        (("chain-8", "--strategy", "optimal"), "needs a --budget"),
        (("chain-8", "--strategy", "store-all", "--budget", "3MiB"), "the budget is 3145728"),
        (("chain-8", "--budget", "0%"), "above 0 %"),
        (("chain-8", "--budget", "lots"), "--budget 'lots'"),
        (("chain-8", "--actions"), "needs a --budget or a --strategy"),
        (("chain-8", "--plot", "x.doc"), ".svg, .png or .pdf"),
        (("chain-8", "--plot", "nowhere/x.svg"), "No such file"),
        (("gpt2-small", "--attention", "linear"), "'linear'"),
        (("gpt2-small", "--json", "--csv"), "exclude each other"),
        (("gpt", "--hidden", "1024", "--heads", "2", "--layers", "2"), "head_dim=512 is outside 1…256"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    status, out, err = run(capsys, "plan", *arguments)
    assert status == 1
    assert message in err
    assert len(err.splitlines()) == 1
    if "--actions" not in arguments:
        assert out == ""


def test_the_front_needs_less_time_for_more_memory():
    rows = [{"seconds": s} for s in (5.0, 4.0, 4.5, 4.0, 1.0)]
    assert plan.front(rows) == [True, True, False, False, True]


def test_a_counter_says_nothing_of_quick_work_and_a_line_of_slow_work(capsys: pytest.CaptureFixture[str]) -> None:
    from repro.measuring.progress import counter

    with counter("profiling m:x") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""
    with counter("profiling m:x", every_s=0) as progress:
        progress(1, 2)
    assert capsys.readouterr().err == "profiling m:x: 1/2 after 0 s\n"


@pytest.mark.parametrize(
    ("name", "gpu", "attention"),
    [
        ("gpt2-small", "H200", "flash"),
        ("llama3-8b", "A100", "flash"),
        ("gpt2-medium", "T4", "flash"),
        ("gpt2-small", "H200", "standard"),
    ],
)
def test_attention_takes_what_predict_says(capsys, name: str, gpu: str, attention: str) -> None:
    """Of a named model's stages: attention is the prediction, the products around it the ceilings
    of the same model; the command line prints the sum."""
    preset = PRESETS[name]
    chain = plan.chain_of(name, batch=2, gpu=gpu, attention=attention)
    heads = preset.heads if attention == "standard" else preset.groups
    shape = repro.AttentionShape(
        2,
        preset.heads,
        preset.seqlen,
        preset.seqlen,
        preset.hidden // preset.heads,
        heads,
        "fp16" if gpu == "T4" else "bf16",
        causal=True,
    )
    card = repro.gpu_named(gpu)
    tokens, h = 2 * preset.seqlen, preset.hidden
    products = 2 * tokens * h * (2 * h + 2 * preset.kv_width) / ceilings_of(card).tensor_flops
    first = chain.stages[0]
    algorithm = "standard" if attention == "standard" else "auto"
    for pass_, found, times in (("forward", first.forward_s, 1), ("backward", first.backward_s, 2)):
        whole = repro.predict(algorithm, shape, pass_, card).time.seconds
        assert found == pytest.approx(whole + times * products, rel=1e-12)
    mlp = preset.forward_flops(tokens, preset.seqlen)["mlp"] / ceilings_of(card).tensor_flops
    assert chain.stages[1].forward_s == pytest.approx(mlp, rel=1e-12)
    line = ("plan", name, "--batch", "2", "--gpu", gpu, "--attention", attention, "--json")
    rows = json.loads(run(capsys, *line, "--strategy", "store-all")[1])["plans"]
    assert rows[0]["seconds"] == pytest.approx(chain.forward_s + chain.backward_s)


@pytest.mark.parametrize(("model", "where"), [("gpt2-small", "transformer.h"), ("llama3-8b", "model.layers")])
def test_a_named_model_gets_the_names_of_its_layers_and_code_that_runs(capsys, model, where):
    from torch import nn

    chain = plan.chain_of(model, layers=4)
    layers = layers_of(chain, 2)
    budget = store_all(chain).peak_bytes
    assert store_all(layers).peak_bytes == budget
    status, out, _ = run(capsys, "plan", model, "--layers", "4", "--budget", f"{budget * 3 // 4}B")
    assert status == 0
    built = nn.Module()
    outer, inner = where.split(".")
    built.add_module(outer, nn.Module())
    built.get_submodule(outer).add_module(inner, nn.ModuleList(nn.Linear(2, 2) for _ in range(4)))
    exec(out[out.index("from torch.distributed") :], {"model": built})
    wrapped = [name for name, module in built.named_modules() if "Checkpoint" in type(module).__name__]
    fits = greedy(layers, budget * 3 // 4)
    again = {a.stage for a in fits.schedule if a.op is Op.FORWARD and a.keep is not Keep.ALL}
    assert wrapped == [f"{where}.{stage - 1}" for stage in sorted(again)]
    assert f"recompute {len(wrapped)} of 4" in out
    assert len(wrapped) in (1, 2, 3)
    with pytest.raises(ValueError, match="8 stages are no whole number of layers of 3"):
        layers_of(chain, 3)
    status, out, _ = run(capsys, "plan", model, "--layers", "4", "--budget", f"{smallest_budget(chain)}B")
    assert (status, "by whole layers it does not fit" in out) == (0, True)
