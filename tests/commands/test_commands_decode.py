"""``decode``: the formulas' numbers, the kernels' own tiles and splits, and every way to get it
wrong."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from analysis.decode import DecodeShape
from analysis.hardware import A100_80GB, GPUS, H200
from kernels import decode
from kernels.launch import Array
from kernels.launching.plan import Recorder
from repro.commands.decode import row_of, theory
from tests.support.command_support import run


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Rows as JSON."""
    status, out, err = run(capsys, "decode", "--json", *arguments)
    assert status == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


def test_numbers_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = found(capsys, "--kv-heads", "8", "--gpu", "H200", "--page-size", "64")
    shape = DecodeShape(32, 8, 1, (4096,), 128, page_size=64, ragged=True)
    assert row["token_bytes"] == shape.token_bytes == 4096
    assert row["cache_bytes"] == 4096 * 4096
    assert row["compulsory_bytes"] == shape.compulsory_bytes
    assert row["time_bound_s"] == shape.compulsory_bytes / H200.hbm_bandwidth_bytes_per_s
    assert row["tokens_per_s_bound"] == 1 / row["time_bound_s"]
    assert row["bound_by"] == "HBM"
    read = sum(n for name, n in row["by_tensor"].items() if name.endswith("read"))
    assert read == row["sm_read_bytes"]
    assert row["by_tensor"]["block_table read"] == 4096 // 16 * 8 * 4


def launched(gpu: Any, heads: int, kv_heads: int, context: int) -> list[Any]:
    """What the driver launches on a card with these multiprocessors."""

    class Card:
        multiprocessors = gpu.sms

    recorder = Recorder(Card())
    shapes = {"q": (2, heads, 1, 128), "k": (2, kv_heads, context, 128)}
    arrays: dict[str, Array] = {
        name: recorder.empty(name, shapes["k" if name in "kv" else "q"], "bf16") for name in ("q", "k", "v", "out")
    }
    lse = recorder.empty("lse", (2, heads, 1), "fp32")
    limit = gpu.shared_bytes_per_block
    decode.forward(recorder, **arrays, lse=lse, scale=1.0, shared_limit_bytes=limit)
    return recorder.launches


@pytest.mark.parametrize("gpu", [A100_80GB, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("heads", [(32, 8), (16, 1), (64, 64)])
def test_tiles_and_splits_are_those_that_run(gpu: Any, heads: tuple[int, int]) -> None:
    row = row_of(DecodeShape(*heads, 1, (5000, 5000), 128), gpu)
    launches = launched(gpu, *heads, 5000)
    macros = dict(launches[0].kernel.macros)
    assert (row["block_m"], row["block_n"]) == (macros["BLOCK_M"], macros["BLOCK_N"])
    blocks = 2 * heads[1] * -(-heads[0] // heads[1] // macros["BLOCK_M"])
    assert launches[0].grid[0] == blocks * row["splits"]
    assert (len(launches) == 2) == (row["splits"] > 1)


def test_sweeps_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "decode", "--width", "1:8:1", "--cache", "all", "--csv")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 16
    assert [r["width"] for r in rows[:8]] == [str(n) for n in range(1, 9)]
    for same, fp8 in zip(rows[:8], rows[8:], strict=True):
        assert int(same["cache_bytes"]) == 2 * int(fp8["cache_bytes"])
    for style in ("--markdown", "--latex"):
        status, out, _ = run(capsys, "decode", "--context", "4k,8k", style)
        assert status == 0
        assert "8192" in out


def test_what_no_kernel_runs_has_its_bounds_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = found(capsys, "--kv-heads", "1", "-d", "1024", "--latent", "--gpu", "H100")
    assert row["theory"] == "head_dim=1024 is above 576"
    whole = ("--kv-heads", "1", "-d", "576", "--latent", "--gpu", "H100")
    (row,) = found(capsys, *whole)
    needs = "a latent of 576 columns needs --value-dim, a multiple of 8 up to 512, got "
    assert row["theory"] == needs + "None"
    narrow = DecodeShape(32, 1, 1, (4096,), 320, latent=True)
    assert theory(narrow, H200) == needs.replace("576", "320").replace("512", "320") + "None"
    odd = DecodeShape(32, 1, 1, (4096,), 576, latent=True, value_dim=12)
    assert theory(odd, H200) == needs + "12"  # as the operator refuses it
    (row,) = found(capsys, *whole, "--value-dim", "512")
    assert row["theory"] is None
    assert row["by_tensor"]["out write"] == 32 * 512 * 2
    (row,) = found(capsys, *whole, "--value-dim", "512", "--dtype", "fp32")
    assert row["theory"] == "head_dim=576 is of 16-bit q, which is fp32"
    (row,) = found(capsys, "-d", "128", "--latent", "--value-dim", "64", "--gpu", "H100")
    assert row["theory"] == "--value-dim 64 is for latents of more than 256 columns, not 128"
    (row,) = found(capsys, "--kv-heads", "1", "-d", "1024", "--latent", "--gpu", "H100")
    assert row["sm_read_bytes"] is row["by_tensor"] is row["splits"] is None
    assert row["token_bytes"] == 2048
    status, out, _ = run(capsys, "decode", "-d", "576", "--gpu", "H100")
    assert status == 0
    assert "lower bounds alone: head_dim=576 is above 256" in out
    one = DecodeShape(32, 8, 17, (4096,), 128)
    assert theory(one, H200) == "width=17 is above 16"
    assert theory(DecodeShape(32, 8, 1, (4096,), 100), H200) is not None
    assert theory(DecodeShape(32, 8, 1, (4096,), 24, fp8=True), H200) is not None
    assert theory(DecodeShape(32, 8, 1, (4096,), 128, "fp32", fp8=True), H200) is not None
    blocks = row_of(DecodeShape(32, 8, 1, (4096,), 128, fp8=True, scale_block=64), H200)
    assert blocks["by_tensor"]["k_scale read"] == 8 * 4096 // 16 * 4
    assert (
        blocks["compulsory_bytes"] - row_of(DecodeShape(32, 8, 1, (4096,), 128, fp8=True), H200)["compulsory_bytes"]
        == 2 * 8 * 4096 // 64 * 4
    )
    with pytest.raises(ValueError, match="T4 does not compute in bf16"):
        row_of(DecodeShape(32, 8, 1, (4096,), 128), GPUS["T4"])
    with pytest.raises(ValueError, match="T4 does not compute in bf16"):
        GPUS["T4"].require_dtype("bf16")
    half = DecodeShape(32, 8, 1, (4096,), 128, "fp16")
    assert row_of(half, GPUS["T4"])["theory"] == "T4 runs none of our kernels"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "5"], "heads=32 is not a multiple of kv_heads=5"),
        (["--page-size", "20"], "--page-size 20: expected a multiple of 16"),
        (["--width", "0"], "--width '0': 0 is below 1"),
        (["--cache", "int4"], "--cache 'int4': expected same, fp8 or all"),
        (["--gpu", "H2"], "no GPU 'H2'"),
        (["--gpu", "T4"], "T4 does not compute in bf16: use fp16 or fp32 (--dtype fp16)"),
        (["--value-dim", "64"], "--value-dim 64 without --latent"),
        (["--json", "--csv"], "exclude each other"),
        (["--context", "1:20001:1"], "more than 20000 values"),
        (["--context", "1:2000:1", "--width", "1:16:1"], "32000 points are more than 20000"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "decode", *arguments)
    assert status == 1
    assert not out
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_point_that_cannot_be_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """As for predict: it takes no other point with it, unless none can be."""
    status, out, _ = run(capsys, "decode", "--gpu", "T4,H200,MI300X", "--json")
    assert status == 0
    rows = json.loads(out)
    assert [row["gpu"] for row in rows] == ["T4", "H200", "MI300X"]
    assert ["T4 does not compute in bf16" in row.get("error", "") for row in rows] == [True, False, False]
    assert rows[2]["theory"] == "MI300X runs none of our kernels"
    status, out, _ = run(capsys, "decode", "--kv-heads", "7,8,9")
    assert status == 0
    assert "cannot be (2)" in out
    assert "(2) heads=32 is not a multiple of kv_heads=9" in out
    status, _, err = run(capsys, "decode", "--kv-heads", "7,9")
    assert status == 1
    assert "no point can be; the first: heads=32 is not a multiple of kv_heads=7" in err
