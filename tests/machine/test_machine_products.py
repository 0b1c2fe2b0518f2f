"""Tensor cores to the bit: vectors that real A100, H100 and H200 cards computed.

``tensor_vectors.npz`` is from MATLAB-tensor-core (BSD 2-Clause, Faizan A. Khattak and Mantas
Mikaitis, 2025; arXiv 2512.07004): for a format and card the factors a and b of one block, c, and
the card's d. Its licence is in ``tensor_vectors.txt``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import Program, load

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

HERE = Path(__file__).resolve().parent
ROWS, COLUMNS, LANES = 16, 8, 32
CARDS = {"A100": "sm_80", "H100": "sm_90", "H200": "sm_90"}


@cache
def program(arch: str) -> Program:
    text = (HERE / "machine_mma.cu").read_text()
    return load(compile_cubin(Kernel(text, "mma_f16", (), 32), arch).cubin)


def multiply(arch: str, form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + sum of a b for each row, eight of them on the diagonal of a product."""
    count, terms = a.shape
    depth = 8 if form == "tf32" else 16
    tiles = -(-count // COLUMNS)
    left = np.zeros((tiles, ROWS, depth), a.dtype)
    right = np.zeros((tiles, COLUMNS, depth), a.dtype)
    start = np.zeros((tiles, ROWS, COLUMNS), np.uint32)
    where = np.arange(count)
    left[where // COLUMNS, where % COLUMNS, :terms] = a
    right[where // COLUMNS, where % COLUMNS, :terms] = b
    start[where // COLUMNS, where % COLUMNS, where % COLUMNS] = c
    lane = np.arange(LANES)
    row, quad = lane // 4, lane % 4
    words = [x.view(np.uint32) if form != "tf32" else x for x in (left, right)]
    half = words[0].shape[2] // 2
    fragments_a = np.stack([words[0][:, row + 8 * (k % 2), quad + half * (k // 2)] for k in range(4)], axis=2)
    fragments_b = np.stack([words[1][:, row, quad + half * k] for k in range(2)], axis=2)
    places = [(row + 8 * (k // 2), 2 * quad + k % 2) for k in range(4)]
    fragments_c = np.stack([start[:, r, s] for r, s in places], axis=2)
    out = np.zeros_like(fragments_c)
    arrays = [np.ascontiguousarray(x).reshape(-1) for x in (fragments_a, fragments_b, fragments_c)]
    entry = {"fp16": "mma_f16", "bf16": "mma_bf16", "tf32": "mma_tf32"}[form]
    flat = out.reshape(-1)
    program(arch).launch(entry, (tiles, 1, 1), LANES, args=[*arrays, flat])
    results = np.zeros((tiles, ROWS, COLUMNS), np.uint32)
    for k, (r, s) in enumerate(places):
        results[:, r, s] = flat.reshape(fragments_c.shape)[:, :, k]
    return results[where // COLUMNS, where % COLUMNS, where % COLUMNS]


@pytest.mark.parametrize("form", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("card", CARDS)
def test_every_vector_of_a_card(card: str, form: str) -> None:
    with np.load(HERE / "tensor_vectors.npz") as kept:
        a, b, c, d = (kept[f"{card}_{form}_{x}"] for x in "abcd")
    found = multiply(CARDS[card], form, a, b, c)
    assert (found == d).sum() == len(d)
