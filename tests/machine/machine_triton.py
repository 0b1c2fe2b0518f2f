"""Kernels in Triton: softmax, layer norm, product, attention, and whole numbers."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + c, mask=c < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + c, e / tl.sum(e, 0), mask=c < n)


@triton.jit
def layer_norm(x, w, b, y, n, eps, BLOCK: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + c, mask=c < n, other=0.0).to(tl.float32)
    d = tl.where(c < n, v - tl.sum(v, 0) / n, 0.0)
    scale = 1 / tl.sqrt(tl.sum(d * d, 0) / n + eps)
    tl.store(y + row * n + c, d * scale * tl.load(w + c, mask=c < n) + tl.load(b + c, mask=c < n), mask=c < n)


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns, k = (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.arange(0, BK),
    )
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, K, BK):
        x = tl.load(
            a + rows[:, None] * K + at + k[None, :], mask=(rows[:, None] < M) & (at + k[None, :] < K), other=0.0
        )
        y = tl.load(
            b + (at + k[:, None]) * N + columns[None, :], mask=(at + k[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(c + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def attention(q, k, v, out, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(q + rows[:, None] * D + d[None, :], mask=rows[:, None] < N, other=0.0)
    most, total, acc = (
        tl.full((BM,), -float("inf"), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM, D), tl.float32),
    )
    for at in range(0, N, BN):
        keys = at + tl.arange(0, BN)
        s = tl.dot(x, tl.load(k + keys[None, :] * D + d[:, None], mask=keys[None, :] < N, other=0.0)) * (
            scale * 1.44269504
        )
        s = tl.where(keys[None, :] < N, s, -float("inf"))
        now = tl.maximum(most, tl.max(s, 1))
        p, down = tl.exp2(s - now[:, None]), tl.exp2(most - now)
        y = tl.load(v + keys[:, None] * D + d[None, :], mask=keys[:, None] < N, other=0.0)
        acc = tl.dot(p.to(y.dtype), y, acc * down[:, None])
        total, most = total * down + tl.sum(p, 1), now
    tl.store(
        out + rows[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < N
    )


@triton.jit
def histogram(x, counts, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + c, mask=c < n, other=0), 1, mask=c < n)


@triton.jit
def scan(x, y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(y + c, tl.cumsum(tl.load(x + c, mask=c < n, other=0), 0), mask=c < n)


@triton.jit
def division(x, y, quotient, rest, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    a, b = tl.load(x + c, mask=c < n, other=1), tl.load(y + c, mask=c < n, other=1)
    tl.store(quotient + c, a // b, mask=c < n)
    tl.store(rest + c, a % b, mask=c < n)
