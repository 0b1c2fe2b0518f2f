"""``predict`` names the form of the Hopper kernels that runs, and its bytes are those counted.

The operator runs as on a Hopper GPU: the host backend says that it is one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_support import Problem, execute

import repro
from analysis import memory
from analysis.hardware import A100_40GB, H200
from analysis.shapes import AttentionShape, Tile
from kernels import attention, hopper
from kernels.hopper_forms import PERSISTENT_SEQLEN
from kernels.host import HostBackend
from repro import prediction
from repro.experiments import Cell, Context
from repro.experiments.bytes import deterministic_price
from repro.experiments.gpu import gpu_traffic
from repro.instruments.gpu_work import cell_work
from repro.prediction import predict, shared_per_tensor
from tests.support.command_support import run

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
#: Of deterministic-price, predicted and measured.
METRICS = ("traffic_bytes", "scratch_bytes")
Counted = dict[tuple[str, str, str], int]


@pytest.fixture
def hopper_host(monkeypatch: pytest.MonkeyPatch) -> list[HostBackend]:
    """The backends that launch something from here on, pretending to be Hopper GPUs."""
    used: list[HostBackend] = []
    launch = HostBackend.launch

    def noted(self: HostBackend, *args: Any, **options: Any) -> None:
        if self not in used:
            self.reset()
            used.append(self)
        launch(self, *args, **options)

    monkeypatch.setattr(HostBackend, "launch", noted)
    monkeypatch.setattr(HostBackend, "compute_capability", "90", raising=False)
    return used


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], Counted]:
    """Forms and bytes as the command prints them."""
    status, out, err = run(capsys, "predict", "--gpu", "H200", "--json", *arguments)
    assert (status, err) == (0, "")
    rows = json.loads(out)
    entries = [entry for row in rows for entry in row["tensors"]]
    bytes_ = {(e["kernel"], e["tensor"], e["direction"]): e["sm_bytes"] for e in entries}
    assert len(bytes_) == len(entries)
    return [row["form"] for row in rows], bytes_


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "causal"),
    [(64, False, False), (64, True, True), (128, False, True), (128, True, False)],
)
def test_what_the_operator_moves_is_what_the_command_predicts(
    head_dim: int, deterministic: bool, causal: bool, hopper_host: list[HostBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    size = {"q": (2, 2, 230, head_dim), "k": (2, 1, 300, head_dim), "v": (2, 1, 300, head_dim)}
    q, k, v = (torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in size.values())
    out = repro.flash_attention(q, k, v, causal=causal, deterministic=deterministic)
    out.backward(torch.ones_like(out))
    (backend,) = hopper_host
    counted = {(kernel, *key): value for kernel, entries in backend.traffic.items() for key, value in entries.items()}
    algorithm = hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM
    forms, bytes_ = predicted(
        capsys,
        *f"-a {algorithm} --batch 2 --heads 2 --kv-heads 1 -n 230 --seqlen-k 300 -d {head_dim}".split(),
        *("--mask", "causal" if causal else "none"),
    )
    assert counted == bytes_
    assert ["persistent" in form for form in forms] == [True, False]
    assert ("flash_forward_sm90_persistent", "tile_counter", "atomic") in counted


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [PERSISTENT_SEQLEN, PERSISTENT_SEQLEN + 1])
def test_both_sides_of_the_rule(seqlen_q: int, head_dim: int, capsys: pytest.CaptureFixture[str]) -> None:
    p = Problem(heads=1, seqlen_q=seqlen_q, seqlen_k=60, head_dim=head_dim, dtype="bf16")
    backend = HostBackend(checks=False)
    _, traffic = execute(p, algorithm=hopper.ALGORITHM, backward=False, backend=backend)
    counted = {(kernel, *key): n for kernel, entries in traffic.items() for key, n in entries.items()}
    forms, bytes_ = predicted(
        capsys, *f"-a {hopper.ALGORITHM} --heads 1 -n {seqlen_q} --seqlen-k 60 -d {head_dim} --pass forward".split()
    )
    assert counted == bytes_
    assert forms == [hopper.forward_form(head_dim, False, seqlen_q).name]
    persistent = seqlen_q <= PERSISTENT_SEQLEN and head_dim != 256
    assert ("flash_forward_sm90_persistent" in traffic) == persistent


def test_a_tile_that_is_asked_for_has_one_block_each() -> None:
    p = Problem(heads=1, seqlen_q=300, seqlen_k=300, head_dim=128, dtype="bf16")
    shape = p.shape
    found = predict(hopper.ALGORITHM, shape, "forward", H200, tile=Tile(128, 176))
    assert found.form == "d128 128x176, pingpong"
    _, traffic = execute(p, algorithm=hopper.ALGORITHM, tile=found.tile, backward=False)
    assert traffic == found.traffic.kernels
    with pytest.raises(ValueError, match=r"no tile \(64, 64\) at head_dim 128; known"):
        predict(hopper.ALGORITHM, shape, "forward", H200, tile=Tile(64, 64))
    with pytest.raises(ValueError, match=r"backward has no tile \(64, 64\)"):
        predict(hopper.ALGORITHM, shape, "backward", H200, tile=Tile(64, 64))


@pytest.mark.parametrize("algorithm", attention.HOPPER)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scratch_is_what_the_drivers_ask_for(algorithm: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, int] = {}
    empty = HostBackend.empty

    def noted(self: HostBackend, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        array = empty(self, name, shape, dtype)
        asked[name] = array.size * array.itemsize
        return array

    monkeypatch.setattr(HostBackend, "empty", noted)
    p = Problem(heads=2, kv_heads=1, seqlen_q=130, seqlen_k=90, head_dim=head_dim, dtype="bf16")
    execute(p, algorithm=algorithm)
    shape = p.shape
    tile = hopper.backward_form(head_dim, causal=False).tile
    turns = algorithm == hopper.DETERMINISTIC
    scratch = memory.flash_sm90_scratch(shape, tile, deterministic=turns)
    assert {t.name: t.bytes for t in scratch} == {
        name: bytes_ for name, bytes_ in asked.items() if name not in ("tile_counter", "flags")
    }
    forward, backward = (predict(algorithm, shape, p, H200) for p in prediction.PASSES)
    beside = asked["tile_counter"] + asked.get("flags", 0)
    assert forward.peak_bytes - forward.saved_bytes == beside
    operands = 4 * shape.query_bytes + 4 * shape.key_bytes + shape.row_bytes
    assert backward.peak_bytes == operands + memory.total(scratch)


def test_hbm_reads_of_the_persistent_form_are_those_of_the_other() -> None:
    """Tiles start in the same order; the counter is 4 bytes, fetched and written back."""
    shape = AttentionShape(4, 16, 4096, 4096, 128, dtype="bf16", causal=True)
    persistent = predict(hopper.ALGORITHM, shape, "forward", H200)
    one = predict(hopper.ALGORITHM, shape, "forward", H200, tile=persistent.tile)
    assert persistent.form == "d128 128x128, persistent, pingpong"
    assert one.form == "d128 128x128, pingpong"
    assert persistent.hbm.read_bytes == one.hbm.read_bytes + 4
    assert persistent.hbm.write_bytes == one.hbm.write_bytes + 8
    assert persistent.time.by_resource["tensor cores"] == one.time.by_resource["tensor cores"] > 0
    tiles = 4 * 16 * 4096 // 128
    assert persistent.traffic.total_bytes == one.traffic.total_bytes + 4 * tiles + 4


def test_turns_cross_to_hbm_once() -> None:
    shape = AttentionShape(1, 2, 1000, 1000, 64, dtype="bf16")
    plain, turns = (predict(a, shape, "backward", H200) for a in (hopper.ALGORITHM, hopper.DETERMINISTIC))
    query_tiles = 2 * 8
    main = "flash_backward_sm90"
    assert turns.compulsory.reads[main]["turns"] == 4 * query_tiles
    assert turns.compulsory.writes[main]["turns"] == 4 * query_tiles
    assert turns.traffic.kernels[main]["turns", "read"] == 4 * query_tiles * 8
    assert plain.traffic.total_bytes == turns.traffic.total_bytes - 4 * query_tiles * (2 * 8 + 1)


def test_the_table_says_which_form_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("predict", "-a", "flash-sm90", "--pass", "forward", "--gpu", "H200")
    _, out, _ = run(capsys, *arguments, "-n", "4096,8192")
    header = next(line for line in out.splitlines() if "SM read" in line)
    assert "form" in header.split()
    assert "d128 128x128, persistent, pingpong" in out
    assert "d128 128x176, pingpong " in out
    _, out, _ = run(capsys, *arguments, "-n", "4096")
    # Wrapped as the screen is.
    assert "form=d128 128x128, persistent, pingpong" in " ".join(out.split())
    _, out, _ = run(capsys, "predict", "-n", "4096")
    assert "form" not in out.split("ceilings")[0].replace("forward", "")


def test_the_sm_80_kernels_are_bound_by_shared_memory_on_hopper() -> None:
    """Backward, 64 x 128 at d = 128: 2.80 clocks for one of the tensor cores (test_sm_ceilings)."""
    shape = AttentionShape(1, 16, 16384, 16384, 128, dtype="bf16")
    tile = Tile(64, 128)
    found = predict("flash", shape, "backward", gpu=H200, tile=tile)
    assert found.time.binding == "shared memory"
    ratio = found.time.by_resource["shared memory"] / found.time.by_resource["tensor cores"]
    assert ratio == pytest.approx(2.8016, abs=1e-4)
    on_a100 = predict("flash", shape, "backward", gpu=A100_40GB, tile=tile).time.by_resource
    assert on_a100["shared memory"] / on_a100["tensor cores"] == pytest.approx(ratio / 2)
    # Not modelled: fp32, rows that warps share, tiles that only the theory has.
    narrow = Tile(32, 64)
    for change in ({"dtype": "fp32"}, {"head_dim": 256}):
        other = replace(shape, **change)
        assert shared_per_tensor("flash", other, narrow, "backward", H200) is None
    bare = predict("flash", replace(shape, dtype="fp32"), "backward", gpu=H200, tile=narrow)
    assert "shared memory" not in bare.time.by_resource
    assert shared_per_tensor("flash", shape, Tile(24, 24), "forward", H200) is None


@pytest.mark.parametrize(
    "cell",
    [c for c in gpu_traffic.cells() if str(c["implementation"]).startswith(hopper.ALGORITHM)],
    ids=lambda c: f"{c['implementation']} {c['pass']} {'causal' if c['causal'] else 'dense'}",
)
def test_cells_of_gpu_traffic_launch_what_is_predicted(cell: Cell, hopper_host: list[HostBackend]) -> None:
    """The work that a profiler counts, run on the host for one short head."""
    one = Cell(**{**cell, "batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 450, "seqlen_k": 450})
    work = cell_work(one, "cpu")
    for backend in hopper_host:  # a backward has run its forward
        backend.reset()
    work()
    (backend,) = hopper_host
    counted = {
        (kernel, way): sum(n for (_, how), n in entries.items() if (how == "read") == (way == "read"))
        for kernel, entries in backend.traffic.items()
        for way in ("read", "write")
    }
    rows = gpu_traffic.EXPERIMENT.predicted(one)
    assert counted == {(r.kernel, r.direction): r.value for r in rows if r.level == "sm"}


@CAUSAL
@pytest.mark.parametrize("algorithm", deterministic_price.HOPPER)
def test_the_price_of_turns_is_counted_as_it_is_predicted(algorithm: str, causal: bool) -> None:
    """Bytes of every tensor, the counters among them, and scratch."""
    one = deterministic_price.point(algorithm, 300, causal)
    keys = ("metric", "kernel", "tensor", "direction")
    want, got = (
        {tuple(getattr(r, key) for key in keys): r.value for r in rows if r.metric in METRICS}
        for rows in (
            deterministic_price.EXPERIMENT.predicted(one),
            deterministic_price.EXPERIMENT.measured(one, Context("host")),
        )
    )
    assert got == want
    turns = ("traffic_bytes", "flash_backward_sm90", "turns", "read")
    assert (turns in got) == (algorithm == hopper.DETERMINISTIC)
