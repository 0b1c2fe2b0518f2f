"""Whether the Hopper kernels pay: their predicted times beside the sm_80 kernels', on an H200.

Dispatch takes the Hopper kernels wherever they can run, and no card has timed either. Both are
predicted from their machine code, as if nothing waited for HBM: ``kernels.timing.hopper_time`` and
``kernels.timing.sm80_time``. ``python -m repro.timing tables choice`` writes the table of
``docs/pages/hopper-code.md``; the experiment ``gpu-features`` times both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tabulate import tabulate

from analysis.hardware import H200
from analysis.shapes import AttentionShape
from kernels import hopper
from kernels.timing import hopper_time, sm80_time
from kernels.timing.followed_blocks import dtype_of
from kernels.timing.hopper_time import FEATURES_ON_RECORD, Features, options_of
from kernels.timing.sm80_time import PASSES

SEQLENS = (512, 1024, 4096, 16384)
TOKENS, HIDDEN = 16384, 2048
LEFT = 256
"""Of windows: a narrow one, whose few rounds are the least that a Hopper form can gain in."""
MARGIN = 0.092
"""Median error of the model on kernels of others on this card (``repro.timing.peers``): times that
are closer to each other decide nothing."""


@dataclass(frozen=True)
class Case:
    """A pass with some options. A window is (left, 0), ``causal`` or not."""

    pass_: str
    head_dim: int
    causal: bool
    features: Features
    left: int = LEFT

    def shape(self, seqlen: int) -> AttentionShape:
        """``TOKENS`` tokens in sequences of ``seqlen``, ``HIDDEN`` columns of heads."""
        return AttentionShape(
            TOKENS // seqlen,
            HIDDEN // self.head_dim,
            seqlen,
            seqlen,
            self.head_dim,
            dtype=dtype_of(self.features),
            causal=self.causal,
            window=(self.left, 0) if "window" in self.features else (None, None),
        )

    def form(self, seqlen: int) -> hopper_time.Form:
        """The Hopper form that runs it."""
        featured = bool(self.features)
        if self.pass_ == "forward":
            return hopper.forward_form(self.head_dim, self.causal, seqlen, featured=featured)
        return hopper.backward_form(self.head_dim, self.causal, featured=featured)

    def seconds(self, seqlen: int) -> tuple[float, float]:
        """Predicted, of the Hopper and of the sm_80 kernels."""
        shape = self.shape(seqlen)
        hopper_s = hopper_time.seconds(
            self.form(seqlen),
            shape,
            sms=H200.sms,
            hbm_bytes_per_s=H200.hbm_bandwidth_bytes_per_s,
            features=self.features,
        )
        return hopper_s, sm80_time.on_h200(shape, self.pass_, self.features)


UNSETTLED = Case("forward", 64, True, ("window", "softcap", "fp16"))
"""Where the model favours the sm_80 kernels, and dispatch does not follow: in narrow windows alone,
and dispatch does not know how wide one is."""


def cases() -> Iterator[Case]:
    """All that both kernels run and that has clocks on record."""
    covered = set(hopper_time.featured())
    for pass_ in PASSES:
        for head_dim in hopper.HEAD_DIMS[pass_]:
            for features in ((), *FEATURES_ON_RECORD):
                for causal in (False, True):
                    case = Case(pass_, head_dim, causal, features)
                    if not features or (case.form(SEQLENS[-1]), features) in covered:
                        yield case


def favoured(hopper_s: float, sm80_s: float) -> str | None:
    """The algorithm that is predicted faster by more than ``MARGIN`` of its rival's time, if any.

    >>> favoured(1.0, 0.95) is None, favoured(1.0, 0.9), favoured(1.0, 1.2)
    (True, 'flash', 'flash-sm90')
    """
    if min(hopper_s, sm80_s) >= (1 - MARGIN) * max(hopper_s, sm80_s):
        return None
    return hopper.ALGORITHM if hopper_s < sm80_s else "flash"


def table() -> str:
    """The page's: seconds of the sm_80 kernels over those of the Hopper kernels, without and with a
    causal mask."""
    headers = ("pass", "head dimension", "option", *(f"N = {n:,}" for n in SEQLENS))
    ratios: dict[tuple[str, int, Features], list[list[str]]] = {}
    for case in cases():
        pairs = map(case.seconds, SEQLENS)
        found = [f"{sm80 / own:.2f}" for own, sm80 in pairs]
        ratios.setdefault((case.pass_, case.head_dim, case.features), []).append(found)
    rows = []
    for (pass_, head_dim, features), (dense, causal) in ratios.items():
        option = (" and ".join(options_of(features)) or "none") + ", fp16" * ("fp16" in features)
        cells = (" / ".join(pair) for pair in zip(dense, causal, strict=True))
        rows.append((pass_, head_dim, option, *cells))
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
