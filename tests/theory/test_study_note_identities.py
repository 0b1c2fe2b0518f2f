"""The lecture note's identities of automatic differentiation, and what autograd really keeps."""

from __future__ import annotations

import torch
from torch import Tensor


def saved(function, *leaves: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the storages that autograd keeps for the backward, leaves left out."""
    own = {leaf.untyped_storage()._cdata for leaf in leaves}
    kept: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own and tensor.numel() > 1:
            kept[tensor.untyped_storage()._cdata] = tuple(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*leaves)
    return sorted(kept.values())


def test_the_softmax_jacobian_is_diag_p_minus_p_p_transposed() -> None:
    """Note 003, 1.2: dp_i/ds_j = p_i (delta_ij - p_j), so ds = p o (dp - sum(p o dp))."""
    torch.manual_seed(0)
    s = torch.randn(9, dtype=torch.float64)
    p = torch.softmax(s, 0)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, 0), s)
    torch.testing.assert_close(jacobian, torch.diag(p) - torch.outer(p, p), rtol=1e-12, atol=1e-14)
    dp = torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(dp @ jacobian, p * (dp - (p * dp).sum()), rtol=1e-12, atol=1e-14)


def test_a_vector_jacobian_product_of_attention_needs_no_row_of_n() -> None:
    """dS = P o (dP - D) with D = rowsum(dO o O): the sum over a row of P o dP is a sum over d."""
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(17, 8, dtype=torch.float64) for _ in range(4))
    s = (q @ k.T).requires_grad_()
    p = torch.softmax(s, -1)
    out = p @ v
    (ds,) = torch.autograd.grad(out, s, dout)
    dp, delta = dout @ v.T, (dout * out).sum(-1, keepdim=True)
    torch.testing.assert_close(ds, p * (dp - delta), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close((p * dp).sum(-1, keepdim=True), delta, rtol=1e-11, atol=1e-13)


def test_autograd_keeps_p_and_not_s() -> None:
    """Note 000, 1.2 lists S and P; softmax's own backward needs its output alone."""
    n, d = 32, 8
    leaves = [torch.randn(n, d, requires_grad=True) for _ in range(3)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T, -1) @ v

    assert saved(attention, *leaves) == [(n, n)]


def test_autograd_keeps_what_each_operation_s_backward_reads() -> None:
    """A product its factors, relu its output, a sum nothing; a scale by a number nothing."""
    x, w = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    assert saved(lambda a, b: (a @ b).sum(), x, w) == []  # its factors are the leaves
    assert saved(lambda a, b: torch.relu(a @ b).sum(), x, w) == [(6, 6)]
    assert saved(lambda a, b: torch.relu(a @ b).exp().sum(), x, w) == [(6, 6), (6, 6)]
    assert saved(lambda a, b: ((a @ b) * 2 + 1).sum(), x, w) == []
