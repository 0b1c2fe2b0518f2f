"""What is predicted is what runs: the tile, the padding, the copies; the rest is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_support import Problem, execute

import repro
from analysis.hardware import A100_40GB, GPUS, H200, T4, Gpu
from analysis.shapes import AttentionShape, Tile
from kernels import attention, audit, ladder
from kernels.flash_config import padded_head_dim
from kernels.host import HostBackend
from kernels.launch import Kernel
from kernels.launches import Device, launches_of
from repro.attention import engine, launcher
from repro.prediction import AUTO, PASSES, predict

RUNNABLE = [gpu for gpu in GPUS.values() if (gpu.compute_capability or (0, 0)) >= (8, 0)]
HEAD_DIMS = (1, 8, 40, 64, 97, 100, 128, 200, 256)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Recorded(HostBackend):
    """A backend that says it is a GPU, notes what it is asked to launch and runs nothing."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.compute_capability = "".join(map(str, gpu.compute_capability))
        self.shared_limit_bytes = gpu.shared_bytes_per_block
        self.multiprocessors = gpu.sms
        self.launched: list[Kernel] = []

    def launch(self, kernel: Kernel, *args: Any, **options: Any) -> None:
        self.launched.append(kernel)


def tiles(kernels: list[Kernel]) -> dict[str, tuple[int, int]]:
    """Entry -> tile of the kernels that walk tiles, read off their macros."""
    found = {}
    for kernel in kernels:
        macros = dict(kernel.macros)
        if re.search("process|_init|clear_counter", kernel.entry):
            continue
        if "CONSUMERS" in macros:  # Hopper, forward
            found[kernel.entry] = (64 * macros["CONSUMERS"], macros["BLOCK_N"])
        elif kernel.entry == "flash_backward_sm90":
            found[kernel.entry] = (macros["BLOCK_M"], 128)
        else:
            found[kernel.entry] = (macros["BLOCK_M"], macros["BLOCK_N"])
    return found


@pytest.fixture(autouse=True)
def first_calls() -> Iterator[None]:
    engine.forget()
    yield
    engine.forget()


@pytest.mark.parametrize("gpu", RUNNABLE, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tile_that_is_predicted_is_the_tile_the_operator_launches(
    gpu: Gpu, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head_dim in HEAD_DIMS:
        for causal, deterministic in ((False, False), (True, False), (False, True)):
            backend = Recorded(gpu)
            monkeypatch.setattr("repro.attention.launcher._host", lambda _, b=backend: b)
            q, k, v = (torch.zeros(1, 1, 70, head_dim, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3))
            out = repro.flash_attention(q, k, v, causal=causal, deterministic=deterministic)
            out.backward(torch.zeros_like(out))
            shape = AttentionShape(1, 1, 70, 70, head_dim, dtype=dtype, causal=causal)
            predicted: dict[str, tuple[int, int]] = {}
            for pass_ in PASSES:
                found = predict(AUTO, shape, pass_, gpu, deterministic=deterministic)
                assert found.theory is None
                main, *second = [
                    name for name in found.traffic.kernels if not re.search("process|clear_counter|copy", name)
                ]
                predicted[main] = (found.tile.block_m, found.tile.block_n)
                if second:
                    assert found.dq_tile is not None
                    predicted[second[0]] = (found.dq_tile.block_m, found.dq_tile.block_n)
            assert tiles(backend.launched) == predicted


@pytest.mark.parametrize("algorithm", attention.ALGORITHMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tile_that_is_predicted_is_the_tile_of_the_driver(algorithm: str, head_dim: int) -> None:
    """Every algorithm by name, also those that dispatch never picks."""
    gpu = H200
    backend = Recorded(gpu)
    if algorithm in ladder.ALGORITHMS:
        for pass_ in PASSES:
            shape = AttentionShape(1, 1, 70, 70, head_dim, dtype="bf16")
            known = ladder.default_tile(algorithm, head_dim, "bf16", pass_)
            assert predict(algorithm, shape, pass_, gpu).tile == known
        return
    p = Problem(seqlen_q=70, seqlen_k=70, head_dim=head_dim, dtype="bf16")
    execute(p, algorithm=algorithm, backend=backend)
    launched = tiles(backend.launched)
    shape = AttentionShape(1, 1, 70, 70, head_dim, dtype="bf16")
    for pass_ in PASSES:
        found = predict(algorithm, shape, pass_, gpu)
        assert {k.entry for k in backend.launched} >= set(found.traffic.kernels)
        walking = [name for name in found.traffic.kernels if name in launched]
        for name, tile in zip(walking, (found.tile, found.dq_tile or found.tile), strict=False):
            assert launched[name] == (tile.block_m, tile.block_n)


def test_the_backward_that_was_predicted_with_another_tile() -> None:
    """d = 128, N = 4096, 16 heads on an A100: 64 x 128 runs and moves 2.35 GB."""
    shape = AttentionShape(1, 16, 4096, 4096, 128, dtype="bf16")
    found = predict(AUTO, shape, "backward", A100_40GB)
    assert (found.algorithm, found.tile) == ("flash", Tile(64, 128))
    assert found.traffic.total_bytes == 2_349_072_384
    wide = AttentionShape(1, 16, 4096, 4096, 256, dtype="bf16")
    assert predict(AUTO, wide, "backward", A100_40GB).tile == Tile(32, 64)


@pytest.mark.parametrize("head_dim", [1, 97, 100])
def test_padding_and_its_copies_are_predicted_and_counted(head_dim: int) -> None:
    shape = AttentionShape(1, 2, 300, 300, head_dim)
    backend = launcher.backend_of(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, head_dim, generator=generator).half().requires_grad_() for _ in range(3))
    for pass_ in PASSES:
        backend.reset()
        if pass_ == "forward":
            out = repro.flash_attention(q, k, v)
        else:
            out.backward(torch.ones_like(out))
        found = predict(AUTO, shape, pass_, launcher.HOST_GPU)
        assert backend.traffic == {k: dict(e) for k, e in found.traffic.kernels.items()}
        assert found.copy_bytes == sum(backend.traffic["copy"].values()) > 0
        if (head_dim, pass_) == (100, "forward"):
            kernel = sum(found.traffic.kernels["flash_forward"].values())
            assert kernel == 1_000_800
            # q, k, v: 100 columns in, 104 out; out: 100 in, 100 out
            assert found.copy_bytes == 2 * 2 * 300 * (3 * (100 + 104) + 2 * 100)


def test_padding_costs_time_and_memory() -> None:
    """Tiles are 128 columns wide from head_dim 65 on, and all of them are multiplied."""
    found = {
        d: predict("flash", AttentionShape(1, 16, 4096, 4096, d), "forward", A100_40GB) for d in (96, 100, 104, 128)
    }
    assert {f.columns for f in found.values()} == {128}
    assert len({f.executed_flops for f in found.values()}) == 1
    assert found[100].useful_flops * 104 == found[104].useful_flops * 100
    seconds = [f.time.seconds for f in found.values()]
    assert seconds[0] <= seconds[2] <= seconds[1] <= 1.2 * seconds[3]
    both = found[100].peak_bytes
    row = found[100].shape.row_bytes
    assert both == found[104].peak_bytes + found[100].saved_bytes - row


@pytest.mark.parametrize(
    ("gpu", "changes", "options", "message"),
    [
        (H200, {"head_dim": 257}, {}, r"head_dim=257 is outside 1…256"),
        (H200, {}, {"tile": Tile(13, 13)}, r"block_m=13 is not a multiple of 16"),
        (H200, {"dtype": "fp32"}, {"tile": Tile(128, 128)}, r"needs \d+ bytes of shared memory, the limit is 232448"),
        (T4, {"dtype": "bf16"}, {}, r"T4 does not compute in bf16: use fp16"),
        (A100_40GB, {}, {"algorithm": "flash-sm90"}, r"needs compute capability 9\.0, A"),
        (H200, {"dtype": "fp32"}, {"algorithm": "flash-sm90"}, r"do not cover dtype fp32"),
        (H200, {}, {"algorithm": "flash9"}, r"algorithm='flash9' is not one of auto, flash"),
        (H200, {}, {"key_mask": True, "algorithm": "standard"}, r"does not take key_mask"),
        (H200, {}, {"copied": ("o",)}, r"copied=\['o'\]: the forward has q, k, v, out"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    gpu: Gpu, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    shape = AttentionShape(**{"batch": 1, "heads": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 128, **changes})
    algorithm = options.pop("algorithm", AUTO)
    with pytest.raises(ValueError, match=message):
        predict(algorithm, shape, "forward", gpu, **options)


def test_registers_that_will_be_spilled_are_warned_of() -> None:
    shape = AttentionShape(1, 2, 64, 64, 128, dtype="bf16")
    found = predict("flash", shape, "forward", H200, tile=Tile(256, 256))
    assert found.warning is not None
    assert "more than 128 registers a thread" in found.warning
    assert predict("flash", shape, "forward", H200).warning is None
    # 384 threads: what the compiler may give them comes in steps of 8 registers.
    wide = replace(shape, head_dim=256)
    assert predict("flash", wide, "backward", A100_40GB, tile=Tile(48, 96)).blocks_per_sm == 1


def test_theory_is_called_theory() -> None:
    shape = AttentionShape(1, 2, 64, 64, 256)
    found = predict("standard", shape, "forward", H200)
    assert found.theory is not None
    assert "128" in found.theory
    assert predict("standard", AttentionShape(1, 2, 64, 64, 128), "forward", H200).theory is None
    old = predict(AUTO, shape, "forward", T4)
    assert old.theory == "our flash kernels need compute capability 8.0 or newer, T4 has 7.5"


def test_blocks_per_sm_are_those_of_the_audit() -> None:
    """docs/kernel-audit.csv has what the compiler made; the prediction has an estimate."""
    _, rows = audit.read(audit.TABLE.read_text(encoding="utf-8"))
    lines = {}
    for row in (dict(zip(audit.HEADER, each, strict=True)) for each in rows):
        named = re.fullmatch(r"flash (forward|backward)( in turn)? bf16 (\d+) full", row["kernel"])
        if named and row["arch"] == "sm_80":  # the form of an A100 stands behind the others
            lines[named[1], int(named[3])] = row["threads"], row["blocks an SM"]
    assert len(lines) == 8
    for (pass_, head_dim), (threads, blocks) in lines.items():
        shape = AttentionShape(1, 1, 512, 512, head_dim, dtype="bf16")
        assert padded_head_dim(head_dim) == head_dim
        launched = launches_of("flash", shape, pass_, Device("80", 163 * 1024, 108))
        assert launched.main.kernel.threads == int(threads)
        assert predict("flash", shape, pass_, A100_40GB).blocks_per_sm == int(blocks)


def test_gradients_that_nobody_asks_for_cost_nothing() -> None:
    """dq alone takes three products, dk and dv four, all three by separate passes seven."""
    shape = AttentionShape(1, 4, 512, 512, 128, dtype="bf16")
    product = 2 * 4 * 512 * 512 * 128
    for gradients, kernels, products in (
        (("dq",), {"flash_backward_dq"}, 3),
        (("dk", "dv"), {"flash_backward"}, 4),
        (("dv",), {"flash_backward"}, 4),
        (("dq", "dk", "dv"), {"flash_backward", "flash_backward_dq"}, 7),
    ):
        found = predict(AUTO, shape, "backward", A100_40GB, gradients=gradients, deterministic=True)
        assert set(found.traffic.kernels) == kernels | {"flash_backward_preprocess"}
        assert found.executed_flops == products * product
        assert found.useful_flops == min(products, 5) * product
