"""The study notes' faults F1 to F7: what they print, run beside the correct form, in float64.

A fault's claim is what the note prints, so "does not hold" is the finding; the measured column
shows by how much, and what the correct form gives on the same input. Tests hold both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from analysis.checkpointing.chain import uniform_chain
from analysis.checkpointing.heuristics import exponential, exponential_recursive, uniform
from repro.claims import NOT_MEASURED, OPEN, Claim, Source, claim

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]
TESTS = "make test"


def _attention(seed: int = 0) -> tuple[Floats, Floats, Floats, Floats]:
    """q, k, v, dout of (64, 16)."""
    random = np.random.default_rng(seed)
    q, k, v, dout = random.standard_normal((4, 64, 16))
    return q, k, v, dout


def _softmax(s: Floats) -> Floats:
    e = np.exp(s - s.max(-1, keepdims=True))
    result: Floats = e / e.sum(-1, keepdims=True)
    return result


def online(q: Floats, k: Floats, v: Floats, block: int, *, keep_old_sum: bool) -> Floats:
    """FlashAttention 2022, Alg. 1, output kept normalised; ``keep_old_sum=False`` is the note's."""
    rows = len(q)
    out, total = np.zeros_like(q), np.zeros((rows, 1))
    top = np.full((rows, 1), -np.inf)
    for first in range(0, len(k), block):
        s = q @ k[first : first + block].T / math.sqrt(q.shape[1])
        new_top = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp(s - new_top)
        shrink = np.exp(top - new_top)
        new_total = shrink * total + p.sum(-1, keepdims=True)
        old = total if keep_old_sum else 1.0
        out = (shrink * old * out + p @ v[first : first + block]) / new_total
        top, total = new_top, new_total
    return out


def f1(_: pandas.DataFrame) -> Claim:
    """The note's update of a normalised output against softmax."""
    q, k, v, _dout = _attention()
    exact = _softmax(q @ k.T / 4) @ v
    wrong = float(abs(online(q, k, v, 16, keep_old_sum=False) - exact).max())
    right = float(abs(online(q, k, v, 16, keep_old_sum=True) - exact).max())
    return _fault("F1", wrong, right, "O ← (l_old e^(m_old - m_new) O + P̃V) / l_new")


def f2(_: pandas.DataFrame) -> Claim:
    """dS with the row sum over one block against the softmax Jacobian."""
    q, k, v, dout = _attention()
    p = _softmax(q @ k.T / 4)
    dp = dout @ v.T
    exact = p * (dp - (p * dp).sum(-1, keepdims=True))
    block = np.concatenate(
        [p[:, i : i + 16] * (dp[:, i : i + 16]
         - (p[:, i : i + 16] * dp[:, i : i + 16]).sum(-1, keepdims=True))
         for i in range(0, 64, 16)], axis=1,
    )  # fmt: skip
    with_delta = p * (dp - (dout * (p @ v)).sum(-1, keepdims=True))
    wrong, right = float(abs(block - exact).max()), float(abs(with_delta - exact).max())
    return _fault("F2", wrong, right, "D = rowsum(dO ∘ O)")


def f3(_: pandas.DataFrame) -> Claim:
    """Gradient of the identity by differences against the note's rule, which replays 2 x."""
    x, step = 0.7, 1e-6
    slope = ((x + step) - (x - step)) / (2 * step)
    noted = 2.0
    return _fault("F3", abs(noted - slope), abs(1.0 - slope), "dx = dy", "gradient 2.0 for 1.0")


def f4(_: pandas.DataFrame) -> Claim:
    """Peak of 2^k spacing alone and split recursively, in units of one stage's state."""
    peaks: dict[str, list[float]] = {"alone": [], "recursive": []}
    lengths = (64, 256, 1024)
    for length in lengths:
        chain = uniform_chain(length)
        unit = max(stage.activation_bytes for stage in chain.stages)
        peaks["alone"].append(exponential(chain).peak_bytes / unit)
        peaks["recursive"].append(exponential_recursive(chain).peak_bytes / unit)
    growth = math.log(peaks["alone"][-1] / peaks["alone"][0]) / math.log(lengths[-1] / lengths[0])
    held = growth < 0.5
    return claim(
        "F4",
        predicted="the last segment has L/2 layers: O(L); split recursively O(log L)",
        measured=f"peak {', '.join(f'{p:.0f}' for p in peaks['alone'])} at L = "
        f"{', '.join(map(str, lengths))} (exponent {growth:.2f}); recursive "
        f"{', '.join(f'{p:.0f}' for p in peaks['recursive'])}",
        verdict="holds" if held else f"does not hold: exponent {growth:.2f} in L",
        command=TESTS,
    )


def f5(_: pandas.DataFrame) -> Claim:
    """Extra forwards of segment-wise recomputation, simulated, against 1/k."""
    length = 64
    extra = {}
    for segments in (2, 4, 8):
        plan = uniform(uniform_chain(length), segments)
        extra[segments] = plan.forwards / length - 1
    worst = min(value * segments for segments, value in extra.items())
    return claim(
        "F5",
        predicted="(k - 1)/k of a forward when the last segment is kept, not 1/k",
        measured=", ".join(f"k = {k}: {v:.3f} for {1 / k:.3f}" for k, v in extra.items()),
        verdict="holds" if abs(worst - 1) < 1e-9 and extra[8] <= 1 / 8 else
        "does not hold: the extra forward grows with the number of segments",
        command=TESTS,
    )  # fmt: skip


def f6(frame: pandas.DataFrame) -> Claim:
    """Saved bytes of both checkpoint modes, as measured for each block."""
    rows = frame[
        (frame["metric"] == "saved_bytes_per_layer")
        & (frame["source"] == "measured")
        & (frame["implementation"] == "each block")
    ]
    by_mode = rows.groupby("mode")["value"].max() if "mode" in rows and len(rows) else None
    if by_mode is None or len(by_mode) < 2:
        measured, verdict = NOT_MEASURED, OPEN
    else:
        measured = ", ".join(f"{mode}: {value:.0f} B a block" for mode, value in by_mode.items())
        same = by_mode.max() / by_mode.min() - 1 <= 0.05
        verdict = (
            "does not hold: both modes keep a block's input and nothing else" if same
            else "holds within limits: see the bytes"
        )  # fmt: skip
    return claim(
        "F6",
        predicted="both modes keep the inputs of a checkpointed part only",
        measured=measured,
        verdict=verdict,
        command="make figures/out/checkpoint_granularity.svg",
    )


def f7(_: pandas.DataFrame) -> Claim:
    """The notes' tile rule against the paper's, A100, fp16 tiles of d = 64 and 128."""
    sram = 192 * 1024
    noted, paper, raw = [], [], []
    for d in (64, 128):
        raw.append(math.sqrt(sram // (3 * d * 4)))
        noted.append(int(math.sqrt(sram // (3 * d * 4))) // 32 * 32)
        columns = -(-(sram // 2) // (4 * d))  # M in fp16 elements
        paper.append((min(columns, d), columns))
    verdict = "holds"
    if max(noted) < min(n for _, n in paper):
        exact = " and ".join(f"{r:.0f}" for r in raw)
        verdict = f"does not hold: it rounds {exact} down to a tile of {max(noted)}"
    return claim(
        "F7",
        predicted="Bc = M/4d, Br = min(Bc, d), M in elements: "
        + ", ".join(f"{m} x {n}" for m, n in paper),
        measured=f"the note's code gives {' and '.join(map(str, noted))} for d = 64 and 128 (A100)",
        verdict=verdict,
        command="make figures/out/tile_rules.svg",
    )


def _fault(name: str, wrong: float, right: float, form: str, shown: str | None = None) -> Claim:
    """A numerical fault: the note's error and the correct form's."""
    # The last bits differ from processor to processor, and the table must not.
    rounding = "below 1e-12" if right < 1e-12 else f"{right:.0e}"
    return claim(
        name,
        predicted=f"correct: {form}",
        measured=f"{shown or f'error {wrong:.2g}'}; correct form {rounding}",
        verdict=f"does not hold (error {wrong:.2g})"
        if wrong > 1e-3 and right < 1e-9 else "holds" if wrong <= 1e-3 else
        f"does not hold, and neither does our form ({right:.1e})",
        tolerance="1e-3 for the note, 1e-9 for ours",
        command=TESTS,
    )  # fmt: skip


SOURCES = (
    Source("F1", (), f1),
    Source("F2", (), f2),
    Source("F3", (), f3),
    Source("F4", (), f4),
    Source("F5", (), f5),
    Source("F6", ("checkpoint-granularity",), f6),
    Source("F7", (), f7),
)
