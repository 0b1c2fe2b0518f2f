"""Every traffic sum against the algorithm walked step by step, adding up what each step moves.

The walks are written from the papers' pseudo-code and look at every tile pair; they share nothing
with the sums but the shapes.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic

Moves = Counter[tuple[str, str]]

shapes = st.builds(
    AttentionShape,
    batch=st.integers(1, 2),
    heads=st.sampled_from([2, 4]),
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    head_dim=st.sampled_from([8, 64]),
    kv_heads=st.none(),
    dtype=st.sampled_from(["fp16", "fp32"]),
    causal=st.booleans(),
)
grouped = st.builds(
    AttentionShape,
    batch=st.integers(1, 2),
    heads=st.just(4),
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    head_dim=st.sampled_from([8, 64]),
    kv_heads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["fp16", "fp32"]),
    causal=st.booleans(),
    window=st.tuples(*[st.none() | st.integers(0, 70)] * 2),
    sinks=st.sampled_from([0, 0, 1, 9, 40]),
)
tiles = st.builds(Tile, block_m=st.integers(4, 40), block_n=st.integers(4, 40))


class Walk:
    """Rows of each tile, which pairs are visible, and a running count of bytes moved."""

    def __init__(self, shape: AttentionShape, tile: Tile) -> None:
        self.shape, self.tile = shape, tile
        self.row = shape.head_dim * shape.itemsize
        self.rows_q = self._rows(shape.seqlen_q, tile.block_m)
        self.rows_k = self._rows(shape.seqlen_k, tile.block_n)
        self.moves: dict[str, Moves] = {}

    @staticmethod
    def _rows(n: int, block: int) -> list[int]:
        return [min(block, n - start) for start in range(0, n, block)]

    def move(self, kernel: str, direction: str, count: int, *tensors: str) -> None:
        for tensor in tensors:
            self.moves.setdefault(kernel, Counter())[tensor, direction] += count

    def visible(self, i: int, j: int) -> bool:
        """Whether any (query, key) pair of tiles i and j is visible."""
        rows = range(i * self.tile.block_m, i * self.tile.block_m + self.rows_q[i])
        keys = range(j * self.tile.block_n, j * self.tile.block_n + self.rows_k[j])
        return any(self.sees(query, key) for query in rows for key in keys)

    def sees(self, query: int, key: int) -> bool:
        """One pair, as the operator's docstring says it."""
        shape = self.shape
        diagonal = query + shape.seqlen_k - shape.seqlen_q
        left, right = shape.window
        inside = left is None or key >= diagonal - left
        inside = inside and (right is None or key <= diagonal + right)
        return (inside or key < shape.sinks) and (key <= diagonal or not shape.causal)

    def check(self, algorithm: str, pass_: str, **options: object) -> None:
        predicted = predict_traffic(algorithm, self.shape, self.tile, pass_, **options)
        walked = {kernel: +moves for kernel, moves in self.moves.items()}
        assert {kernel: dict(m) for kernel, m in predicted.kernels.items()} == walked


FORMS = st.sampled_from(("literal", "skip-first", "released"))


@given(shapes, tiles, FORMS)
@settings(deadline=None)
def test_flash1_forward(shape: AttentionShape, tile: Tile, form: str) -> None:
    """FlashAttention 2022, Alg. 1, and the form of its released code."""
    walk = Walk(shape, tile)
    main, wide = "flash1_forward", shape.head_dim * 4
    for _ in range(shape.batch * shape.heads):
        if form == "literal":
            for rows in walk.rows_q:
                walk.move("flash1_init", "write", rows * walk.row, "out")
                walk.move("flash1_init", "write", rows * 4, "l", "m")
        for j, keys in enumerate(walk.rows_k):
            walk.move(main, "read", keys * walk.row, "k", "v")
            for i, rows in enumerate(walk.rows_q):
                first = j == 0 and form != "literal"
                seen = walk.visible(i, j)
                if seen:
                    walk.move(main, "read", rows * walk.row, "q")
                if form == "released":
                    last = not any(walk.visible(i, n) for n in range(j + 1, len(walk.rows_k)))
                    if seen and not first:
                        walk.move(main, "read", rows * wide, "out_tmp")
                        walk.move(main, "read", rows * 4, "lse")
                    if seen and not last:
                        walk.move(main, "write", rows * wide, "out_tmp")
                    if (seen and last) or (first and not seen):
                        walk.move(main, "write", rows * walk.row, "out")
                    if seen or first:
                        walk.move(main, "write", rows * 4, "lse")
                    continue
                if seen and not first:
                    walk.move(main, "read", rows * walk.row, "out")
                    walk.move(main, "read", rows * 4, "l", "m")
                if seen or first:
                    walk.move(main, "write", rows * walk.row, "out")
                    walk.move(main, "write", rows * 4, "l", "m")
    walk.check(f"flash1-{form}", "forward")


@given(shapes, tiles, FORMS)
@settings(deadline=None)
def test_flash1_backward(shape: AttentionShape, tile: Tile, form: str) -> None:
    """FlashAttention 2022, Alg. 4, and the form of its released code."""
    walk = Walk(shape, tile)
    main, wide = "flash1_backward", shape.head_dim * 4
    for _ in range(shape.batch * shape.heads):
        if form == "literal":
            for rows in walk.rows_q:
                walk.move("flash1_backward_init", "write", rows * walk.row, "dq")
        for j, keys in enumerate(walk.rows_k):
            walk.move(main, "read", keys * walk.row, "k", "v")
            for i, rows in enumerate(walk.rows_q):
                first = j == 0 and form != "literal"
                seen = walk.visible(i, j)
                last = not any(walk.visible(i, n) for n in range(j + 1, len(walk.rows_k)))
                if seen:
                    walk.move(main, "read", rows * walk.row, "q", "dout")
                    for name in ("lse",) if form == "released" else ("l", "m"):
                        walk.move(main, "read", rows * 4, name)
                    if form == "literal":
                        walk.move(main, "read", rows * walk.row, "out", "dq")
                    elif first:
                        walk.move(main, "read", rows * walk.row, "out")
                        walk.move(main, "write", rows * 4, "delta")
                    else:
                        walk.move(main, "read", rows * 4, "delta")
                        if form == "released":
                            walk.move(main, "read", rows * wide, "dq_tmp")
                        else:
                            walk.move(main, "read", rows * walk.row, "dq")
                if form == "released":
                    if seen and not last:
                        walk.move(main, "write", rows * wide, "dq_tmp")
                    if (seen and last) or (first and not seen):
                        walk.move(main, "write", rows * walk.row, "dq")
                elif seen or first:
                    walk.move(main, "write", rows * walk.row, "dq")
            walk.move(main, "write", keys * walk.row, "dk", "dv")
    walk.check(f"flash1-{form}", "backward")


@given(shapes, tiles)
@settings(deadline=None)
def test_standard(shape: AttentionShape, tile: Tile) -> None:
    """FlashAttention 2022, Alg. 0 and Alg. 3: masks, but never skips a tile."""
    forward, backward = Walk(shape, tile), Walk(shape, tile)
    e = shape.itemsize
    for _ in range(shape.batch * shape.heads):
        for rows, keys in product(forward.rows_q, forward.rows_k):
            q, k, s = rows * forward.row, keys * forward.row, rows * keys * e
            forward.move("standard_scores", "read", q, "q")
            forward.move("standard_scores", "read", k, "k")
            forward.move("standard_scores", "write", s, "s")
            forward.move("standard_softmax", "read", s, "s")
            forward.move("standard_softmax", "write", s, "p")
            forward.move("standard_output", "read", s, "p")
            forward.move("standard_output", "read", k, "v")
            backward.move("standard_dv", "read", s, "p")
            backward.move("standard_dv", "read", q, "dout")
            backward.move("standard_dp", "read", q, "dout")
            backward.move("standard_dp", "read", k, "v")
            backward.move("standard_dp", "write", s, "dp")
            backward.move("standard_softmax_backward", "read", s, "p", "dp")
            backward.move("standard_softmax_backward", "write", s, "ds")
            backward.move("standard_dq", "read", s, "ds")
            backward.move("standard_dq", "read", k, "k")
            backward.move("standard_dk", "read", s, "ds")
            backward.move("standard_dk", "read", q, "q")
        for rows in forward.rows_q:
            forward.move("standard_output", "write", rows * forward.row, "out")
            backward.move("standard_dq", "write", rows * forward.row, "dq")
        for keys in forward.rows_k:
            backward.move("standard_dv", "write", keys * forward.row, "dv")
            backward.move("standard_dk", "write", keys * forward.row, "dk")
    forward.check("standard", "forward")
    backward.check("standard", "backward")


@given(grouped, tiles, st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
@settings(deadline=None)
def test_flash_with_key_mask_and_block_mask(
    shape: AttentionShape, tile: Tile, seed: int, deterministic: bool, coarse: bool
) -> None:
    """FlashAttention-2, Alg. 1 and 2, with tiles switched off one by one in every head."""
    block = Tile(2 * tile.block_m, 3 * tile.block_n) if coarse else tile
    random = np.random.default_rng(seed)
    blocks = (-(-shape.seqlen_q // block.block_m), -(-shape.seqlen_k // block.block_n))
    mask = random.random((shape.batch, shape.heads, *blocks)) < 0.5
    forward, backward = Walk(shape, tile), Walk(shape, tile)
    row, d = forward.row, shape.head_dim

    def on(b: int, h: int, i: int, j: int) -> bool:
        position = (i * tile.block_m // block.block_m, j * tile.block_n // block.block_n)
        return bool(mask[(b, h, *position)])

    before, after = "flash_backward_preprocess", "flash_backward_postprocess"
    for b, h in product(range(shape.batch), range(shape.heads)):
        for i, rows in enumerate(forward.rows_q):
            looked = [j for j in range(len(forward.rows_k)) if forward.visible(i, j)]
            visited = [j for j in looked if on(b, h, i, j)]
            forward.move("flash_forward", "read", len(looked), "block_mask")
            if visited:
                forward.move("flash_forward", "read", rows * row, "q")
            for j in visited:
                forward.move("flash_forward", "read", forward.rows_k[j] * row, "k", "v")
                forward.move("flash_forward", "read", forward.rows_k[j], "key_mask")
            forward.move("flash_forward", "write", rows * row, "out")
            forward.move("flash_forward", "write", rows * 4, "lse")

            backward.move(before, "read", rows * row, "out", "dout")
            backward.move(before, "read", rows * 4, "dlse")
            backward.move(before, "write", rows * 4, "delta")
            backward.move(after, "write", rows * row, "dq")
            if deterministic:
                backward.move(after, "read", len(looked), "block_mask")
                backward.move(after, "read", len(visited) * rows * d * 4, "dq_accum")
            else:
                backward.move(before, "write", rows * d * 4, "dq_accum")
                backward.move(after, "read", rows * d * 4, "dq_accum")
    for b, kv in product(range(shape.batch), range(shape.kv_heads)):
        group = range(kv * shape.group, (kv + 1) * shape.group)
        for j, keys in enumerate(backward.rows_k):
            met = False
            for h, (i, rows) in product(group, enumerate(backward.rows_q)):
                if not backward.visible(i, j):
                    continue
                backward.move("flash_backward", "read", 1, "block_mask")
                if not on(b, h, i, j):
                    continue
                met = True
                backward.move("flash_backward", "read", rows * row, "q", "dout")
                backward.move("flash_backward", "read", rows * 4, "lse", "delta")
                way = "write" if deterministic else "atomic"
                backward.move("flash_backward", way, rows * d * 4, "dq_accum")
            if met:
                backward.move("flash_backward", "read", keys * row, "k", "v")
                backward.move("flash_backward", "read", keys, "key_mask")
            backward.move("flash_backward", "write", keys * row, "dk", "dv")

    options = {"key_mask": True, "block_mask": mask, "mask_block": block}
    forward.check("flash", "forward", **options)
    name = "flash-deterministic" if deterministic else "flash"
    backward.check(name, "backward", lse_gradient=True, **options)


def test_a_full_block_mask_only_adds_the_mask_itself() -> None:
    shape, tile = AttentionShape(2, 4, 100, 130, 64, kv_heads=2, causal=True), Tile(32, 16)
    for pass_ in ("forward", "backward"):
        plain = predict_traffic("flash", shape, tile, pass_).by_tensor()
        masked = predict_traffic("flash", shape, tile, pass_, block_mask=np.ones((1, 1, 4, 9), dtype=bool)).by_tensor()
        del masked["block_mask", "read"]
        assert masked == plain


def test_block_masks_that_do_not_fit_are_refused() -> None:
    shape, tile = AttentionShape(1, 2, 100, 100, 64), Tile(32, 32)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(1, 2, 4, 4\)"):
        predict_traffic("flash", shape, tile, "forward", block_mask=np.ones((3, 4), dtype=bool))
    with pytest.raises(ValueError, match="48 x 32"):
        predict_traffic(
            "flash", shape, tile, "forward", block_mask=np.ones((1, 1), dtype=bool), mask_block=Tile(48, 32)
        )
    with pytest.raises(ValueError, match="flash1-literal"):
        predict_traffic("flash1-skip-first", shape, tile, "forward", block_mask=np.ones((4, 4), dtype=bool))
