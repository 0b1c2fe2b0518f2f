"""Standard attention and FlashAttention 2022 on the host backend: values, gradients, bytes.

Every run is held to float64 and, to the byte, to ``analysis.traffic``.
"""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import BOUNDS, Problem, check, largest_error, reference
from ladder_support import Run, execute, predicted

from analysis.shapes import Tile
from analysis.tiles import paper_tile
from kernels.ladder import ALGORITHMS

FLASH1 = ("flash1-literal", "flash1-skip-first", "flash1-released")

#: (algorithm, dtype, head_dim, tile): every algorithm in every type, head dimensions that fill a
#: 16-byte access oddly, tiles that divide nothing, and the paper's own rule.
VARIANTS = [
    ("standard", "fp16", 64, Tile(64, 64)),
    ("standard", "bf16", 128, Tile(16, 32)),
    ("standard", "fp32", 40, Tile(13, 24)),
    ("flash1-literal", "fp16", 64, Tile(16, 64)),
    ("flash1-literal", "fp32", 8, paper_tile(8, 800)),
    ("flash1-skip-first", "fp16", 64, Tile(16, 64)),
    ("flash1-skip-first", "bf16", 128, Tile(64, 32)),
    ("flash1-skip-first", "fp32", 40, Tile(13, 27)),
    ("flash1-released", "fp16", 64, Tile(16, 64)),
    ("flash1-released", "bf16", 128, Tile(64, 32)),
    ("flash1-released", "fp32", 40, Tile(13, 27)),
]

#: Within a tile, at its edges, several.
SHAPES = [(1, 1), (15, 15), (17, 17), (2, 5), (5, 2), (1, 16), (63, 63), (64, 64), (65, 65), (129, 65), (65, 257)]


def hold(p: Problem, algorithm: str, tile: Tile, run: Run) -> None:
    """Values within the bounds, bytes equal."""
    named = {"out", "lse", "dq", "dk", "dv"}
    check(p, {name: value for name, value in run.values.items() if name in named})
    assert run.forward == predicted(p, algorithm, tile, "forward"), p
    if run.backward:
        assert run.backward == predicted(p, algorithm, tile, "backward"), p


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0]}-{v[1]}-d{v[2]}-{v[3].block_m}x{v[3].block_n}")
def test_values_and_bytes(variant: tuple[str, str, int, Tile], causal: bool) -> None:
    algorithm, dtype, head_dim, tile = variant
    for seqlen_q, seqlen_k in SHAPES:
        p = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype, causal=causal)
        hold(p, algorithm, tile, execute(p, algorithm, tile))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batch_heads_and_a_scale(algorithm: str) -> None:
    tile = Tile(64, 64) if algorithm == "standard" else Tile(16, 64)
    for p in (
        Problem(batch=2, heads=3, seqlen_q=33, seqlen_k=70, causal=True),
        Problem(seqlen_q=20, seqlen_k=30, scale=0.031),
    ):
        hold(p, algorithm, tile, execute(p, algorithm, tile))


#: The variants above in 16 and in 32 bits, one of each algorithm.
NARROW = {v[0]: v for v in VARIANTS if v[1] == "fp16"}
WIDE = {v[0]: v for v in VARIANTS if v[1] == "fp32"}


@pytest.mark.parametrize("variants", [NARROW, WIDE], ids=["fp16", "fp32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_single_key_is_copied_bit_for_bit(algorithm: str, variants: dict[str, tuple[str, str, int, Tile]]) -> None:
    """P is 1, not nearly 1: the backward pass must round the score as the forward pass did."""
    _, dtype, head_dim, tile = variants[algorithm]
    p = Problem(batch=5, heads=7, seqlen_q=1, seqlen_k=1, head_dim=head_dim, dtype=dtype)
    got = execute(p, algorithm, tile).values
    np.testing.assert_array_equal(got["out"], p.data["v"])
    np.testing.assert_array_equal(got["dv"], p.data["dout"])
    assert max(np.abs(got["dq"]).max(), np.abs(got["dk"]).max()) <= 1e-4
    if "l" in got:
        np.testing.assert_array_equal(got["l"], 1.0)
        scores = p.scale * (p.data["q"] * p.data["k"]).sum(axis=3)
        np.testing.assert_allclose(got["m"], scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_far_below_zero(algorithm: str) -> None:
    """Scores near -230: a padding column, whose score would be 0, must not enter by any way."""
    _, dtype, head_dim, tile = WIDE[algorithm]
    rng = np.random.default_rng(5)
    ones = np.ones((1, 1, 61, head_dim))
    data = {"q": 6.0 * ones, "k": -6.0 * ones + 0.01 * rng.standard_normal(ones.shape)}
    data = {name: x.astype(np.float32).astype(float) for name, x in data.items()}
    scale = 230.0 / (36.0 * head_dim)
    p = Problem(seqlen_q=61, seqlen_k=61, head_dim=head_dim, dtype=dtype, data=data, scale=scale)
    run = execute(p, algorithm, tile)
    # A score of 230 is rounded by 230 x 2^-24 = 1.4e-5, and with it each weight.
    named = {name: run.values[name] for name in ("out", "dq", "dk", "dv")}
    check(p, named, factor=4.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_without_a_key_are_zero(algorithm: str) -> None:
    """Causal with Nq = 5, Nk = 2: rows 0 to 2 see nothing, row 3 one key, row 4 both."""
    identity = np.zeros((1, 1, 2, 64))
    identity[0, 0, :, :2] = np.eye(2)
    zeros = {"q": np.zeros((1, 1, 5, 64)), "k": np.zeros((1, 1, 2, 64))}
    p = Problem(seqlen_q=5, seqlen_k=2, causal=True, data=zeros | {"v": identity, "dout": np.ones((1, 1, 5, 64))})
    tile = Tile(64, 64) if algorithm == "standard" else Tile(16, 64)
    got = execute(p, algorithm, tile).values
    np.testing.assert_array_equal(got["out"][0, 0, :, :2], [[0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(got["dq"], 0.0)
    np.testing.assert_array_equal(got["dv"][0, 0, :, 0], [1.5, 0.5])
    if "l" in got:
        np.testing.assert_array_equal(got["l"][0, 0], [0, 0, 0, 1, 2])
        np.testing.assert_array_equal(got["m"][0, 0], [-np.inf] * 3 + [0, 0])


@pytest.mark.parametrize("algorithm", FLASH1)
def test_whole_query_tiles_without_a_key(algorithm: str) -> None:
    """Nq much longer than Nk: the first 12 of 17 query tiles see nothing and cost only writes."""
    p = Problem(seqlen_q=257, seqlen_k=65, causal=True)
    tile = Tile(16, 64)
    run = execute(p, algorithm, tile)
    hold(p, algorithm, tile, run)
    np.testing.assert_array_equal(run.values["out"][0, 0, :192], 0.0)
    np.testing.assert_array_equal(run.values["dq"][0, 0, :192], 0.0)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[1] != "fp32"], ids=lambda v: f"{v[0]}-{v[1]}-d{v[2]}")
def test_products_beyond_the_range_of_fp16(variant: tuple[str, str, int, Tile]) -> None:
    """q·k of 131072 and more does not fit fp16; sums, scale and statistics are fp32."""
    algorithm, dtype, head_dim, tile = variant
    value = {128: 32.0, 64: 64.0}[head_dim]
    scale = head_dim**-0.5
    p = Problem(
        seqlen_q=1,
        seqlen_k=4,
        head_dim=head_dim,
        dtype=dtype,
        data={
            "q": np.full((1, 1, 1, head_dim), value),
            "k": np.full((1, 1, 4, head_dim), value),
            "v": np.repeat(np.arange(4.0)[:, None], head_dim, axis=1)[None, None],
            "dout": np.ones((1, 1, 1, head_dim)),
        },
    )
    got = execute(p, algorithm, tile).values
    np.testing.assert_array_equal(got["out"], 1.5)
    np.testing.assert_allclose(got["dv"], 0.25, rtol=1e-3)
    # dP = d (0, 1, 2, 3), its mean 1.5 d, P = 1/4.
    expected = scale * value * head_dim * np.array([-1.5, -0.5, 0.5, 1.5]) / 4
    np.testing.assert_allclose(got["dk"][0, 0, :, 0], expected, atol=0.5)
    assert np.abs(got["dq"]).max() <= 0.5
    if "lse" in got:
        score = scale * value * value * head_dim
        assert abs(got["lse"][0, 0, 0] - (score + np.log(4.0))) <= 0.01


def test_a_larger_key_tile_rounds_less() -> None:
    """O and dQ are rounded to the io type once per key tile, so fewer tiles err less."""
    p = Problem(seqlen_q=64, seqlen_k=512)
    want = reference(p)
    errors = {}
    for block_n in (64, 512):
        got = execute(p, "flash1-skip-first", Tile(16, block_n), backward=False).values["out"]
        errors[block_n] = largest_error(got, want["out"])
    assert errors[512] < errors[64] <= BOUNDS["fp16"][0]
