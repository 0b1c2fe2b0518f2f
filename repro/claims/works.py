"""Whose claims are judged: papers, study notes, this package; and conditions that recur."""

from __future__ import annotations

from dataclasses import dataclass

from repro.claims.protocol import Origin


@dataclass(frozen=True)
class Work:
    """Where a claim stands."""

    title: str
    origin: Origin = Origin.PAPER

    def __str__(self) -> str:
        return self.title


FA1 = Work("FlashAttention (Dao et al. 2022)")
FA2 = Work("FlashAttention-2 (Dao 2023)")
FA3 = Work("FlashAttention-3 (Shah et al. 2024)")
FLASH_DECODING = Work("Flash-Decoding (Dao, Haziza, Massa, Sizov 2023)")
RABE_STAATS = Work("Self-attention does not need O(n²) memory (Rabe, Staats 2021)")
MILAKOV = Work("Online normalizer for softmax (Milakov, Gimelshein 2018)")
RING = Work("Ring attention (Liu et al. 2023)")
CHEN = Work("Sublinear memory cost (Chen et al. 2016)")
KORTHIKANTI = Work("Reducing activation recomputation (Korthikanti et al. 2022)")
ZERO = Work("ZeRO (Rajbhandari et al. 2020)")

RECOMPUTE = Work("study note on recomputation (000)", Origin.NOTE)
FLASH = Work("study note on flash attention (001)", Origin.NOTE)
TILING = Work("study note on tiling and recomputation (002)", Origin.NOTE)
AUTODIFF = Work("lecture note on automatic differentiation (003)", Origin.NOTE)
CODE = Work("note with training code (004)", Origin.NOTE)

OURS = Work("this package", Origin.OURS)

PLAIN = "a plain chain of equal layers"
H200 = "H200, PyTorch 2.11; no mask, no dropout"
TODAY = "H200, PyTorch 2.11; FlashAttention-2; no mask, no dropout"
RANKS = "2 and 4 gloo ranks of a CPU"
