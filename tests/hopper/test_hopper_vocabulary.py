"""Each function of the Hopper vocabulary on the host against its documented layout, in NumPy.

The layouts are written down here once more, from the PTX manual (Tensors, "Swizzling modes";
wgmma, "Register fragments" and "Matrix descriptor"), independently of the runtime's C++: a box in
shared memory is built by index arithmetic, and a product is held to the matrices it was built from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_support import (
    ROW,
    descriptor_fields,
    k_major_image,
    launch_vocabulary,
    mn_major_image,
    product_of,
    swizzled,
    to_bits,
    to_float,
)

from kernels.host import KernelError


def box_image(x: np.ndarray, row: int, rows: int) -> np.ndarray:
    """A (N, D) matrix of 16-bit words as TMA leaves rows row.. of it: slabs of 64 columns, rows of
    128 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8), zeros where there is no row."""
    columns = x.shape[1]
    image = np.zeros((columns // 64, rows, 8, 8), np.uint16)
    for slab in range(columns // 64):
        for r in range(rows):
            if 0 <= row + r < len(x):
                chunks = x[row + r, 64 * slab : 64 * slab + 64].reshape(8, 8)
                for c in range(8):
                    image[slab, r, c ^ r % 8] = chunks[c]
    return image.reshape(-1)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", [0, 64, 70, 99, 100, 128, -3])
def test_a_box_is_swizzled_and_zero_beyond_the_last_row(head_dim: int, row: int) -> None:
    rng = np.random.default_rng(row + 1000)
    # Heads and batches are strided views: rows of one head are 3 rows apart in memory.
    memory = rng.integers(1, 65536, (2, 100, 3, head_dim), dtype=np.uint16)
    x = memory.transpose(0, 2, 1, 3)
    for batch, head in ((0, 0), (1, 2)):
        done = launch_vocabulary(0, source=x, row=row, head=head, batch=batch)
        expected = box_image(x[batch, head], row, 64)
        np.testing.assert_array_equal(done.shared.view(np.uint16)[: len(expected)], expected)
        real = min(max(100 - max(row, 0), 0), 64 + min(row, 0))
        assert done.traffic.get(("source", "read"), 0) == real * head_dim * 2


@pytest.mark.parametrize(("batch", "head"), [(0, 3), (2, 0), (-1, 0)])
def test_a_box_of_no_head_is_zero(batch: int, head: int) -> None:
    x = np.full((2, 3, 100, 64), 7, np.uint16)
    done = launch_vocabulary(0, source=x, head=head, batch=batch)
    assert not done.shared.any()
    assert ("source", "read") not in done.traffic


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", [0, 40, 99, 128])
def test_storing_a_box_leaves_rows_beyond_alone(head_dim: int, row: int) -> None:
    rng = np.random.default_rng(row)
    rows = rng.integers(1, 65536, (64, head_dim), dtype=np.uint16)
    memory = np.zeros((2, 100, 3, head_dim + 8), np.uint16)
    target = memory.transpose(0, 2, 1, 3)[..., :head_dim]
    done = launch_vocabulary(1, target=target, words=box_image(rows, 0, 64), row=row, head=2, batch=1)
    expected = np.zeros_like(memory)
    real = max(min(64, 100 - row), 0)
    expected[1, row : row + real, 2, :head_dim] = rows[:real]
    np.testing.assert_array_equal(memory, expected)
    assert done.traffic.get(("target", "write"), 0) == real * head_dim * 2


def test_bulk_copy_and_addition() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(512).astype(np.float32)
    done = launch_vocabulary(2, words=values)
    np.testing.assert_array_equal(done.shared.view(np.float32)[:512], values)
    expected = np.ones(512, np.float32)
    expected[:256] += values[:256]
    expected += values
    np.testing.assert_array_equal(done.sums[:512], expected)
    # Sixteen threads each: 1, 2, 3 and their number.
    direct = np.tile(np.array([16, 32, 48, sum(range(16))], np.float32), 8)
    np.testing.assert_array_equal(done.sums[512:544], 1 + direct)
    assert (done.sums[544:] == 1).all()
    assert done.traffic["words", "read"] == 2048
    assert done.traffic["sums", "atomic"] == 1024 + 2048 + 128 * 16


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(transposed: bool) -> None:
    """PTX, stmatrix: lane l holds elements (l/4, 2(l%4)) and the next of each 8 x 8 matrix; lane
    8 m + i names row i of matrix m."""
    rng = np.random.default_rng(4)
    registers = rng.integers(0, 65536, (128, 4, 2), dtype=np.uint16)
    rows = rng.permutation(512)[:128]
    words = np.concatenate([registers.view(np.uint32).reshape(-1), rows.astype(np.uint32)])
    done = launch_vocabulary(4 if transposed else 3, words=words, clear_bytes=8192)
    expected = np.zeros((512, 8), np.uint16)
    for warp in range(4):
        for m in range(4):
            matrix = np.zeros((8, 8), np.uint16)
            for lane in range(32):
                pair = registers[32 * warp + lane, m]
                matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2] = pair
            if transposed:
                matrix = matrix.T
            for i in range(8):
                expected[rows[32 * warp + 8 * m + i]] = matrix[i]
    got = done.shared.view(np.uint16)[: 512 * 8].reshape(512, 8)
    np.testing.assert_array_equal(got[rows], expected[rows])


def test_descriptor_bits() -> None:
    """PTX, "Matrix descriptor": start in bits 0-13, leading offset 16-29, stride 32-45, all in
    units of 16 bytes; 1 in bits 62-63 is the 128-byte swizzle."""
    done = launch_vocabulary(5, a_at=0x4560, a_leading=0x2340, a_stride=1024)
    low, high, base_high = (int(x) for x in done.words_out[:3])
    bits = low | high << 32
    assert descriptor_fields(bits) == (0x4560, 0x2340, 1024, 0)
    assert base_high >> 30 == 1


@pytest.mark.parametrize("thread", [0, 31, 32, 77, 128])
def test_a_vote_is_a_warp_s(thread: int) -> None:
    done = launch_vocabulary(12, row=thread)
    np.testing.assert_array_equal(done.words_out[:128], np.arange(128) // 32 == thread // 32)


MODES = [
    # what, A is MN-major, B is MN-major
    pytest.param(6, False, False, id="A K-major, B K-major"),
    pytest.param(7, False, True, id="A K-major, B N-major"),
    pytest.param(8, True, False, id="A M-major, B K-major"),
    pytest.param(9, True, True, id="A M-major, B N-major"),
]


def operands(dtype: str, depth: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((64, depth)), rng.standard_normal((128, depth))
    return to_bits(a, dtype), to_bits(b, dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("what", "a_mn", "b_mn"), MODES)
@pytest.mark.parametrize("step", [0, 3, 5])
def test_product_of_described_operands(what: int, a_mn: bool, b_mn: bool, step: int, dtype: str) -> None:
    """Operands of depth 128; step 5 lies in the second slab of a K-major one."""
    a, b = operands(dtype, 128)
    words, fields = product_of(a, b, a_mn, b_mn, step)
    done = launch_vocabulary(what, words=words, dtype=dtype, **fields)
    depth = slice(16 * step, 16 * step + 16)
    af, bf = (to_float(x, dtype)[:, depth] for x in (a, b))
    exact = 2 * af @ bf.T
    bound = 40 * 2.0**-24 * 2 * (abs(af) @ abs(bf).T)
    assert (abs(done.accumulator() - exact) <= bound).all()


@pytest.mark.parametrize("field", ["a_at", "a_leading", "a_stride", "b_at", "b_leading", "b_stride"])
@pytest.mark.parametrize(("what", "a_mn", "b_mn"), MODES[1:3])
def test_a_wrong_descriptor_gives_another_result(what: int, a_mn: bool, b_mn: bool, field: str) -> None:
    a, b = operands("fp16", 128)
    words, fields = product_of(a, b, a_mn, b_mn, 3)
    right = launch_vocabulary(what, words=words, **fields).accumulator()
    fields[field] += 128
    ignored = not (a_mn if field[0] == "a" else b_mn) or field[0] == "a"
    try:
        wrong = launch_vocabulary(what, words=words, **fields).accumulator()
    except KernelError:  # it led outside
        return
    # The leading offset of a K-major operand means nothing under this swizzle; an MN-major one
    # needs it only beyond its first 64 columns, which the 64 rows of A do not reach.
    if field.endswith("leading") and ignored:
        np.testing.assert_array_equal(wrong, right)
    else:
        assert (wrong != right).any()


def test_a_from_registers() -> None:
    """PTX, "Register fragments" of A: (g, q), (g + 8, q), (g, q + 8), (g + 8, q + 8)."""
    a, b = operands("fp16", 64)
    words, fields = product_of(a, b, False, False, 0)
    fragments = np.zeros((128, 4, 2), np.uint16)
    for t in range(128):
        g, q = t // 32 * 16 + t % 32 // 4, 2 * (t % 4)
        for i, (r, c) in enumerate([(g, q), (g + 8, q), (g, q + 8), (g + 8, q + 8)]):
            fragments[t, i] = a.view(np.uint16)[r, c : c + 2]
    done = launch_vocabulary(
        10,
        words=np.concatenate([words.view(np.uint32), fragments.view(np.uint32).reshape(-1)]),
        count=words.nbytes // 4,
        **fields,
    )
    start = np.broadcast_to(np.arange(64.0), (128, 64))
    af, bf = (to_float(x, "fp16")[:, :16] for x in (a, b))
    exact = af @ bf.T + done.place(start)
    bound = 17 * 2.0**-24 * (abs(af) @ abs(bf).T + done.place(start))
    assert (abs(done.accumulator() - exact) <= bound).all()


def test_a_result_is_not_there_before_the_wait() -> None:
    a, b = operands("fp16", 64)
    words, fields = product_of(a, b, False, False, 0)
    done = launch_vocabulary(11, words=words, **fields)
    early, late = done.floats.reshape(128, 64)[:, 0], done.floats.reshape(128, 64)[:, 1:]
    assert not early.any()
    assert late.all()


def test_images_are_inverse_to_the_swizzle() -> None:
    """The two operand images used above agree with the box that TMA makes of the same matrix."""
    rng = np.random.default_rng(6)
    x = rng.integers(0, 65536, (64, 128), dtype=np.uint16)
    np.testing.assert_array_equal(k_major_image(x), box_image(x, 0, 64))
    # MN-major: the matrix is stored with its depth as rows.
    np.testing.assert_array_equal(mn_major_image(x), box_image(x.T.copy(), 0, 128))
    address = np.arange(4096)
    assert (swizzled(swizzled(address)) == address).all()
    assert ROW == 128


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"what": 6, "a_at": 60 * 1024}, "uninitialised", "never written"),
        ({"what": 6, "b_stride": 65536}, "out of bounds", "wgmma"),
    ],
)
def test_operands_outside(settings: dict[str, Any], kind: str, message: str) -> None:
    a, b = operands("fp16", 64)
    words, fields = product_of(a, b, False, False, 0)
    what = settings.pop("what")
    with pytest.raises(KernelError, match=message) as caught:
        launch_vocabulary(what, words=words, **{**fields, **settings})
    assert caught.value.kind == kind
