# ruff: noqa: E741 (the papers' names O and l)
"""FlashAttention in 40 lines of NumPy, forward and backward: one head, no mask, the papers' names.

    python examples/attention_in_40_lines.py

Read this file first. The kernels are these two loops, made fast. The loop order is that of
FlashAttention-2 (Dao 2023, Algorithms 1 and 2): queries outside in the forward pass, keys outside
in the backward pass. No array of the two functions has Nq x Nk elements. A tile of scores is made,
used and dropped; the backward pass makes it again from L instead of reading it back.

    Q, O, dO, dQ (Nq, d)     K, V, dK, dV (Nk, d)     L, D (Nq,)
    Br, Bc: rows of a query tile and of a key tile
    S = Q Kᵀ / sqrt(d),      P = softmax(S) by rows,  O = P V
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def forward(Q: Matrix, K: Matrix, V: Matrix, Br: int, Bc: int) -> tuple[Matrix, Matrix]:
    """O and L = log(rowsum(exp(S))). With L the backward pass makes P again: P = exp(S - L)."""
    O, L = np.empty_like(Q), np.empty(len(Q))
    for i in range(0, len(Q), Br):
        Qi = Q[i : i + Br]
        m = np.full(len(Qi), -np.inf)  # row maximum of the scores so far
        l = np.zeros(len(Qi))  # row sum of exp(S - m) so far
        acc = np.zeros_like(Qi)  # sum of exp(S - m) V so far: O times l
        for j in range(0, len(K), Bc):
            S = Qi @ K[j : j + Bc].T / np.sqrt(Q.shape[1])
            m_new = np.maximum(m, S.max(axis=1))
            P = np.exp(S - m_new[:, None])
            rescale = np.exp(m - m_new)  # what was summed up under the old maximum
            l = rescale * l + P.sum(axis=1)
            acc = rescale[:, None] * acc + P @ V[j : j + Bc]
            m = m_new
        O[i : i + Br] = acc / l[:, None]
        L[i : i + Br] = m + np.log(l)
    return O, L


def backward(
    Q: Matrix, K: Matrix, V: Matrix, O: Matrix, L: Matrix, dO: Matrix, Br: int, Bc: int
) -> tuple[Matrix, Matrix, Matrix]:
    """dQ, dK, dV of a loss whose gradient with respect to O is dO."""
    scale = 1 / np.sqrt(Q.shape[1])
    D = (dO * O).sum(axis=1)  # rowsum(P * dP), over the whole row, without P or dP
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for j in range(0, len(K), Bc):
        Kj, Vj = K[j : j + Bc], V[j : j + Bc]
        for i in range(0, len(Q), Br):
            Qi, dOi = Q[i : i + Br], dO[i : i + Br]
            P = np.exp(scale * Qi @ Kj.T - L[i : i + Br, None])  # recomputed, never stored
            dV[j : j + Bc] += P.T @ dOi
            dP = dOi @ Vj.T
            dS = P * (dP - D[i : i + Br, None])  # the Jacobian of softmax, applied to dP
            dQ[i : i + Br] += scale * dS @ Kj
            dK[j : j + Bc] += scale * dS.T @ Qi
    return dQ, dK, dV


def main() -> None:
    """Compare with attention that stores S and P, and count what each keeps for its backward."""
    N, d, Br, Bc = 1000, 64, 128, 64
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, N, d))
    O, L = forward(Q, K, V, Br, Bc)
    S = Q @ K.T / np.sqrt(d)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    print(f"largest difference of O from softmax(Q K^T / sqrt(d)) V: {abs(O - P @ V).max():.1e}")
    dQ, dK, dV = backward(Q, K, V, O, L, dO, Br, Bc)
    dP = dO @ V.T
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    worst = max(abs(dQ - dS @ K / np.sqrt(d)).max(), abs(dK - dS.T @ Q / np.sqrt(d)).max(), abs(dV - P.T @ dO).max())
    print(f"largest difference of a gradient: {worst:.1e}")
    print(f"kept for the backward beside Q, K, V, O: {L.size:,} elements instead of {P.size:,}")


if __name__ == "__main__":
    main()
