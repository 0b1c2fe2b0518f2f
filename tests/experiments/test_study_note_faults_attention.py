"""Two faults of the study notes' attention code, and the right forms, in float64 by blocks.

F1 (third note, §1.4): the online update of a *normalised* O forgets the old row sum.
F2 (first note, §4.3): the softmax gradient sums P∘dP over the one key block at hand.

Each test transcribes the note's lines, shows how far off they are, and runs the right form beside
them. The last test shows the kernels to be on the right side.
"""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, largest_error, reference
from ladder_support import execute

from analysis.shapes import Tile

N, D, BLOCK = 48, 8, 16
EXACT = 1e-12
BLOCKS = [slice(start, start + BLOCK) for start in range(0, N, BLOCK)]


@pytest.fixture
def inputs() -> tuple[np.ndarray, ...]:
    """q, k, v, dout, (N, D)."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((N, D)) for _ in range(4))


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """P, O, dQ, dK, dV with whole rows at once."""
    s = q @ k.T / np.sqrt(D)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return p, p @ v, ds @ k / np.sqrt(D), ds.T @ q / np.sqrt(D), p.T @ dout


def blockwise_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, old_row_sum: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O, row maximum and row sum by K/V blocks; without ``old_row_sum`` the note's update of O."""
    out = np.zeros((N, D))
    row_max, row_sum = np.full((N, 1), -np.inf), np.zeros((N, 1))
    for keys in BLOCKS:
        for rows in BLOCKS:
            s = q[rows] @ k[keys].T / np.sqrt(D)
            m_new = np.maximum(row_max[rows], s.max(axis=1, keepdims=True))
            p = np.exp(s - m_new)
            decay = np.exp(row_max[rows] - m_new)
            l_new = decay * row_sum[rows] + p.sum(axis=1, keepdims=True)
            weight = row_sum[rows] * decay if old_row_sum else decay
            out[rows] = (weight * out[rows] + p @ v[keys]) / l_new
            row_max[rows], row_sum[rows] = m_new, l_new
    return out, row_max, row_sum


def test_f1_a_normalised_output_must_be_weighted_by_its_old_row_sum(inputs: tuple[np.ndarray, ...]) -> None:
    q, k, v, dout = inputs
    _, want, *_ = dense(q, k, v, dout)
    right, *statistics = blockwise_forward(q, k, v, old_row_sum=True)
    wrong, *same = blockwise_forward(q, k, v, old_row_sum=False)
    np.testing.assert_allclose(right, want, atol=EXACT)
    assert np.abs(wrong - want).max() > 0.1 * np.abs(want).max()
    # The fault is in O alone: the statistics agree.
    np.testing.assert_array_equal(statistics, same)


def test_f1_shows_on_weights_one_can_count(inputs: tuple[np.ndarray, ...]) -> None:
    """All scores equal and v = 1: O must be 1; the note's first two blocks get 1/16 of a vote."""
    q, ones = np.zeros((N, D)), np.ones((N, D))
    right, *_ = blockwise_forward(q, q, ones, old_row_sum=True)
    wrong, *_ = blockwise_forward(q, q, ones, old_row_sum=False)
    np.testing.assert_allclose(right, 1.0, atol=EXACT)
    # (1 + 16) / 32 after two blocks, then (17/32 + 16) / 48.
    np.testing.assert_allclose(wrong, (17 / 32 + 16) / 48, atol=EXACT)


def test_f1_is_invisible_with_one_block(inputs: tuple[np.ndarray, ...]) -> None:
    """Nothing old to weigh: a test with N no longer than the block would pass."""
    q, k, v, dout = (x[:BLOCK] for x in inputs)
    s = q @ k.T / np.sqrt(D)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    only_block = (p @ v) / p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(only_block, dense(q, k, v, dout)[1], atol=EXACT)


def blockwise_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, *, whole_row: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK, dV by blocks. Without ``whole_row``: the note's softmax gradient."""
    out, row_max, row_sum = blockwise_forward(q, k, v, old_row_sum=True)
    d = (dout * out).sum(axis=1, keepdims=True)
    dq, dk, dv = np.zeros((N, D)), np.zeros((N, D)), np.zeros((N, D))
    for rows in BLOCKS:
        for keys in BLOCKS:
            p = np.exp(q[rows] @ k[keys].T / np.sqrt(D) - row_max[rows]) / row_sum[rows]
            dv[keys] += p.T @ dout[rows]
            dp = dout[rows] @ v[keys].T
            ds = p * (dp - (d[rows] if whole_row else (dp * p).sum(axis=1, keepdims=True)))
            dq[rows] += ds @ k[keys] / np.sqrt(D)
            dk[keys] += ds.T @ q[rows] / np.sqrt(D)
    return dq, dk, dv


def test_f2_the_softmax_gradient_needs_the_sum_over_the_whole_row(inputs: tuple[np.ndarray, ...]) -> None:
    _, _, *want = dense(*inputs)
    right = blockwise_backward(*inputs, whole_row=True)
    wrong = blockwise_backward(*inputs, whole_row=False)
    for name, r, w, expected in zip(("dq", "dk", "dv"), right, wrong, want, strict=True):
        np.testing.assert_allclose(r, expected, atol=EXACT, err_msg=name)
        if name == "dv":  # does not pass through the softmax
            np.testing.assert_allclose(w, expected, atol=EXACT)
        else:
            assert np.abs(w - expected).max() > 0.1 * np.abs(expected).max(), name


def test_f2_the_sum_is_a_product_of_rows_of_d_numbers(inputs: tuple[np.ndarray, ...]) -> None:
    """rowsum(P∘dP) = rowsum(dO∘O): the whole row's sum without walking the row."""
    q, k, v, dout = inputs
    p, out, *_ = dense(q, k, v, dout)
    dp = dout @ v.T
    np.testing.assert_allclose((p * dp).sum(axis=1), (dout * out).sum(axis=1), atol=EXACT)
    per_block = np.stack([(p * dp)[:, keys].sum(axis=1) for keys in BLOCKS])
    np.testing.assert_allclose(per_block.sum(axis=0), (dout * out).sum(axis=1), atol=EXACT)
    assert np.abs(per_block[0] - (dout * out).sum(axis=1)).max() > 0.1


@pytest.mark.parametrize(
    ("algorithm", "head_dim", "tile"), [("flash1-literal", 8, Tile(8, 25)), ("flash1-skip-first", 40, Tile(13, 27))]
)
def test_the_kernels_have_neither_fault(algorithm: str, head_dim: int, tile: Tile) -> None:
    """Three key tiles in fp32: either fault would be thousands of times the rounding."""
    p = Problem(seqlen_q=60, seqlen_k=60, head_dim=head_dim, dtype="fp32")
    got, want = execute(p, algorithm, tile).values, reference(p)
    for name in ("out", "dq", "dk", "dv"):
        assert largest_error(got[name], want[name]) < 1e-5, name
