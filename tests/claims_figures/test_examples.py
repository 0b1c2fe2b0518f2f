"""The examples run as a reader would run them, and what they show is true."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.checkpointing import simulate, uniform_chain
from analysis.hardware import A100_80GB
from analysis.shapes import AttentionShape
from analysis.time_model import datasheet_ceilings
from repro.attention.reference import attention_reference
from repro.commands import compare
from repro.measuring import records

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))


def load(name: str):
    return importlib.import_module(f"examples.{name}")


def test_every_kind_of_extension_has_its_example() -> None:
    assert EXAMPLES == [
        "add_algorithm",
        "add_claim",
        "add_experiment",
        "add_figure",
        "add_gpu",
        "add_peer",
        "add_planner",
        "attention_in_40_lines",
        "count_own_kernel",
        "decode_tiny_model",
        "plan_transformer",
    ]
    table = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({name}.py)" in table for name in EXAMPLES)


@pytest.mark.parametrize(
    "name", ["add_gpu", "add_planner", "attention_in_40_lines", "count_own_kernel", "decode_tiny_model"]
)
def test_an_example_is_a_program(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said
    assert said.isascii()  # every terminal can show it


def test_the_new_experiment_is_measured_once_and_judged_by_the_new_claim(tmp_path: Path) -> None:
    table = load("add_experiment").frame(tmp_path)
    bytes_of = table[table["metric"] == "traffic_bytes"].groupby(["source", "kv_heads"])["value"].sum()
    assert dict(bytes_of["measured"]) == dict(bytes_of["predicted"])
    assert table[table["metric"] == "max_abs_error"]["value"].max() < 2e-3
    record = tmp_path / "local" / "my-experiment.jsonl"
    before = record.read_bytes()
    # In a process of its own: the claim is registered where it is imported.
    command = [sys.executable, str(ROOT / "examples" / "add_claim.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert record.read_bytes() == before, "its cells are on record"
    assert [re.search(r": (\w+), (\S+) times", line)[0] for line in lines] == [
        ": reproduced, 1.00 times",
        ": refuted, 1.30 times",
        ": refuted, 0.77 times",
    ]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "tile"),
    [(1, 1, 1, (1, 1)), (5, 17, 8, (2, 16)), (70, 33, 16, (32, 64)), (64, 64, 32, (64, 64))],
)
def test_attention_in_40_lines_is_attention(seqlen_q, seqlen_k, head_dim, tile) -> None:
    example = load("attention_in_40_lines")
    random = np.random.default_rng(0)
    Q, dO = random.standard_normal((2, seqlen_q, head_dim))
    K, V = random.standard_normal((2, seqlen_k, head_dim))
    out, lse = example.forward(Q, K, V, *tile)
    grads = example.backward(Q, K, V, out, lse, dO, *tile)
    expected = attention_reference(
        *(torch.from_numpy(x)[None, None] for x in (Q, K, V)), dout=torch.from_numpy(dO)[None, None]
    )
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for name, value in found.items():
        right = getattr(expected, name)[0, 0].numpy()
        np.testing.assert_allclose(value, right, rtol=1e-12, atol=1e-12, err_msg=name)


def test_attention_in_40_lines_stores_tiles_only_and_has_40_lines() -> None:
    example = load("attention_in_40_lines")
    sources = [inspect.getsource(f) for f in (example.forward, example.backward)]
    assert sum(len([x for x in s.splitlines() if x.strip()]) for s in sources) <= 40
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, 2048, 2))
    tracemalloc.start()
    out, lse = example.forward(Q, K, V, 64, 64)
    example.backward(Q, K, V, out, lse, dO, 64, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2048 * 2048 * 8 / 20  # far below one (N, N) matrix of float64


@pytest.mark.parametrize("shape", [(1, 2, 33, 70, 64), (2, 1, 1, 1, 40), (1, 1, 5, 100, 128)])
def test_the_new_algorithm_moves_what_its_formula_says(shape, capsys) -> None:
    example = load("add_algorithm")
    attention = AttentionShape(*shape)
    counted, error = example.run(attention)
    assert counted == example.predicted(attention)
    assert error < 2e-3  # half an ulp of fp16 near 1, and the exponentials' rounding
    if shape[2] == 33:
        example.main()
        assert "times fewer bytes" in capsys.readouterr().out


def test_the_new_algorithm_compiles_for_gpus() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from kernels.building.compile import compile_cubin
    from kernels.launch import Kernel

    kernel = Kernel(load("add_algorithm").SOURCE, "two_pass", (("DTYPE", 0), ("HEAD_DIM", 64)), threads=32)
    for arch in ("sm_80", "sm_90"):
        assert compile_cubin(kernel, arch).spill_bytes == 0


def test_the_new_gpu_says_where_its_figures_are_from() -> None:
    card = load("add_gpu").A100_PCIE
    assert set(card.sources) == set(A100_80GB.sources)
    ours, theirs = datasheet_ceilings(card), datasheet_ceilings(A100_80GB)
    assert ours.hbm_bytes_per_s < theirs.hbm_bytes_per_s
    assert ours.tensor_flops == theirs.tensor_flops


def test_the_new_figure_is_the_same_bytes_twice(tmp_path: Path) -> None:
    example = load("add_figure")
    first, second = example.main(tmp_path / "1"), example.main(tmp_path / "2")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert {p.suffix for p in first} == {".svg", ".png", ".csv"}


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100])
def test_the_new_planner_replays_as_it_predicts(length: int) -> None:
    chain = uniform_chain(length, 3, 5)
    plan = load("add_planner").halving(chain)
    replay = simulate(chain, plan.schedule)
    assert (replay.peak_bytes, replay.forwards) == (plan.peak_bytes, plan.forwards)


def test_the_new_peer_leaves_records_that_compare_reads(tmp_path: Path, capsys) -> None:
    path = tmp_path / "me" / "example-peers.jsonl"
    load("add_peer").main(path, seqlen=64)
    assert "torch-sdpa" in capsys.readouterr().out
    rows = list(records.read(path))
    assert len(rows) == 2
    found = compare.measured(compare.files(str(path.parent)))
    assert all(r["ratio"] == 1 for r in compare.pairs(found, found))


def test_a_kernel_from_elsewhere_is_counted_and_right() -> None:
    example = load("count_own_kernel")
    for rows, columns in ((1, 1), (3, 100), (2, 257)):
        moved, x, y = example.counted(rows, columns)
        assert moved == example.predicted(rows, columns)
        e = np.exp(x - x.max(1, keepdims=True))
        np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-5)
    source = Path(inspect.getsourcefile(example) or "").read_text()
    assert len(source.splitlines()) <= 60


def test_the_page_on_own_kernels_says_what_the_example_changes() -> None:
    """Each pair of the page's table turns the example into an ordinary kernel, which the host
    refuses: with the shared array it does not compile, and plain pointers are errors."""
    from kernels.host import HostBackend, HostCompileError, KernelError
    from kernels.launch import Kernel, from_numpy

    example = load("count_own_kernel")
    page = (ROOT / "docs" / "pages" / "own_kernel.md").read_text()
    x, y = np.ones((3, 100), np.float32), np.zeros((3, 100), np.float32)

    def run(source: str) -> None:
        args = [from_numpy("x", x, "r"), from_numpy("y", y, "w"), np.int32(100)]
        HostBackend().launch(Kernel(source, "softmax_rows", (), 128), (3, 1, 1), 16, args)

    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", page, re.MULTILINE)
    changed = {was: now for was, now in rows if now in example.SOURCE}
    assert len(changed) == 3
    original = example.SOURCE
    for was, now in changed.items():
        original = original.replace(now, was, 1)
    with pytest.raises(HostCompileError, match="__shared__"):
        run(original)
    shared, here = next((was, now) for was, now in changed.items() if "__shared__" in was)
    with pytest.raises(KernelError) as caught:
        run(original.replace(shared, here, 1))
    assert " ".join(str(caught.value).split()) in " ".join(page.split())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_model_with_pages_says_what_it_says_without_a_cache(seed: int) -> None:
    example = load("decode_tiny_model")
    paged, whole, cache = example.decode(seed)
    assert torch.equal(paged, whole)
    assert len(set(paged.flatten().tolist())) > 10  # no model that repeats one token
    shared = example.PROMPT // example.PAGE_SIZE
    assert torch.equal(cache.table[0, :shared], cache.table[1, :shared])
    own = [
        set(row[shared : -(-int(n) // example.PAGE_SIZE)].tolist())
        for row, n in zip(cache.table, cache.lengths, strict=True)
    ]
    assert not own[0] & own[1]


def test_a_model_with_a_wrong_page_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above rests on: the pages matter."""
    example = load("decode_tiny_model")
    real = example.PagedCache.make_room

    def swapped(cache: object, sequence: int, tokens: int) -> None:
        real(cache, sequence, tokens)
        if sequence == 1:
            cache.table[1, 0] = cache.table[1, 1]  # type: ignore[attr-defined]

    monkeypatch.setattr(example.PagedCache, "make_room", swapped)
    paged, whole, _ = example.decode()
    assert torch.equal(paged[0], whole[0])
    assert not torch.equal(paged[1], whole[1])
