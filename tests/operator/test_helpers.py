"""What small helpers promise: the errors that they raise, and a few strong words."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.algorithms import check_order
from analysis.cache_model import Cache
from analysis.hardware import A100_80GB
from analysis.lower_bounds import matmul_accesses_rectangular
from analysis.parallel_activations import LayerShape, saved_by_tensor
from analysis.shapes import AttentionShape
from analysis.sums.copies import copies
from analysis.tiles import best_tile
from kernels.beside.probes import chain
from kernels.building import nvrtc
from kernels.building.cache import digest
from kernels.hopper_forms import forward_form
from kernels.sass import code as sass
from kernels.sass.listing import listing
from repro.attention.reference import max_error
from repro.attention.validation import resolve_order
from repro.checkpointing import stages_of
from repro.commands.chains import imported_chain
from repro.commands.explain import condition
from repro.commands.predict import rates_of
from repro.distributed import launch, transport
from repro.distributed.ring_attention import merge
from repro.experiments import Cell
from repro.experiments.run import pending
from repro.instruments import cachegrind, counted, inductor_bytes
from repro.instruments.counters import CounterError
from repro.instruments.timing import time_interleaved
from repro.measuring.records import require_folder

SHAPE = AttentionShape(1, 1, 64, 64, 64)
LAYER = LayerShape(seqlen=8, batch=1, hidden=8, heads=4)
TINY = replace(A100_80GB, name="tiny", shared_bytes_per_block=64, shared_bytes_per_sm=64)
CODE = sass.Code((sass.Instruction(16, "", "MOV", (), "R1, R2"),), {})
FRAME = pd.DataFrame({"n": [1]})
CELL = Cell(implementation="flash", seqlen_q=1)
CACHE = Cache(1024, 2, 64)
DEVICE: Any = None


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: check_order("flash", "forward", "columns"), ValueError, "order='columns'"),
        (lambda: check_order("standard", "forward", "sawtooth"), ValueError, "no order='sawtooth'"),
        (lambda: copies(SHAPE, "forward", ["dk"]), ValueError, "dk"),
        (lambda: saved_by_tensor(LAYER, ranks=3), ValueError, "heads 4 do not divide among 3"),
        (lambda: best_tile(SHAPE, TINY), ValueError, "no tile of head_dim=64 fits tiny"),
        (lambda: listing(CODE), ValueError, "no control fields at 0x10"),
        (lambda: stages_of(5), TypeError, "int"),
        (lambda: stages_of([]), ValueError, "0 stages"),
        (lambda: condition("n", FRAME), ValueError, "expected field=value"),
        (lambda: condition("colour=red", FRAME), ValueError, "no field 'colour'"),
        (lambda: imported_chain("json:dumps", 5, repeats=1), ValueError, "json:dumps"),
        (lambda: rates_of(TINY, "measured"), ValueError, "tiny"),
        (lambda: pending([CELL, CELL], [], "d"), ValueError, "cells listed twice"),
        (lambda: resolve_order(3), TypeError, "order"),  # type: ignore[arg-type]
        (lambda: resolve_order("columns"), ValueError, "columns"),
        (lambda: time_interleaved({}, DEVICE, min_repeats=3, max_repeats=2), ValueError, "=3 and"),
        (lambda: time_interleaved({}, DEVICE, budget_ms=0), ValueError, "budget_ms=0"),
        (lambda: require_folder("../x"), ValueError, "'../x' cannot be a folder"),
    ],
)
def test_errors_of_helpers(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_missing_tools_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    with pytest.raises(RuntimeError, match="nvdisasm"):
        sass.disassemble(b"", "entry")
    monkeypatch.setattr(cachegrind, "missing", lambda: "valgrind is not installed")
    with pytest.raises(RuntimeError, match="valgrind is not installed"):
        cachegrind.count_misses(8, 2, CACHE, CACHE)
    (tmp_path / "libnvrtc.so.13").touch()
    monkeypatch.setenv(nvrtc.SECOND, str(tmp_path))
    with pytest.raises(RuntimeError, match="0 files libnvrtc-builtins"):
        nvrtc.second_version()
    monkeypatch.setenv(nvrtc.SECOND, "")
    monkeypatch.setattr(nvrtc, "versions", lambda: ("13.0",))
    with pytest.raises(ValueError, match=r"NVRTC 12.9 is not at hand, only 13\.0"):
        nvrtc.second_library("12.9")
    monkeypatch.setattr(counted, "count_kernels", lambda *_, **__: [])
    with pytest.raises(CounterError, match="no cell launched a kernel"):
        counted.count_cells([{"implementation": "flash"}], timeout_s=1)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.raises(RuntimeError, match="reports no bytes"):
        inductor_bytes.compiled_bytes(torch.sin, torch.ones(2))
    monkeypatch.setattr(launch, "measured", lambda ranks: [])
    with pytest.raises(RuntimeError, match="2 ranks measured nothing for a"):
        launch.records_of("x", "a", 2, {})


def test_a_kernel_that_does_not_count_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        assert one.type == socket.SOCK_STREAM
        monkeypatch.setattr(transport, "_LENGTH", 1000)
        with pytest.raises(OSError, match="1000 are needed to count"):
            transport.moved_so_far()


def test_a_product_reads_its_operands_at_least() -> None:
    for rows, columns, inner, memory in ((1, 1, 1, 1), (3, 5, 7, 10**9), (64, 64, 64, 16)):
        least = matmul_accesses_rectangular(rows, columns, inner, memory)
        assert least >= rows * inner + inner * columns
        assert least >= 2 * rows * columns * inner / memory**0.5 * (1 - 1e-12)


def test_no_two_lists_have_one_digest() -> None:
    lists = [("ab",), ("a", "b"), ("", "ab"), ("ab", ""), ("a", "", "b"), ("b", "a"), ()]
    assert len({digest(*parts) for parts in lists}) == len(lists)


def test_a_sawtooth_takes_one_block_a_tile() -> None:
    for head_dim in (64, 128, 256):
        for seqlen in (1, 4096, 16384):
            if head_dim != 256:
                assert not forward_form(head_dim, False, seqlen, sawtooth=True).persistent


def test_a_chase_has_one_cycle_without_a_pattern() -> None:
    links = chain(4096, 16)
    place, seen = 0, []
    for _ in range(4096 // 16):
        seen.append(place)
        place = int(links[place])
    assert place == 0
    assert sorted(seen) == list(range(0, 4096, 16))
    steps = [(b - a) % 4096 for a, b in pairwise(seen)]
    assert max(steps.count(step) for step in set(steps)) < 8


def test_nan_is_equal_to_nothing() -> None:
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert max_error(nan, nan) == max_error(nan, one) == max_error(one, nan) == math.inf
    assert max_error(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0


def test_merging_with_nothing_changes_nothing() -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    none = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge(out, lse, *none), merge(*none, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    merged = merge(*none, *none)
    assert torch.equal(merged[0], none[0])
    assert torch.equal(merged[1], none[1])
