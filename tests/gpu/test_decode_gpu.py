"""Decoding on a GPU: right in every form that is timed, on a stream, with any number of splits.

The other cases run on the GPU from ``tests/decode/test_decode_attention.py`` (``pytest -k cuda``).
"""

from __future__ import annotations

import pytest
import torch
from attention_support import BOUNDS
from decode_support import Problem

from repro.attention.reference import max_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FORMS = {
    "gqa": Problem(heads=32, kv_heads=8, head_dim=128),
    "fp8": Problem(heads=32, kv_heads=8, head_dim=128, fp8=True),
    "mqa": Problem(heads=32, kv_heads=1, head_dim=128),
    "latent": Problem(heads=32, kv_heads=1, head_dim=256, latent=True),
    "draft": Problem(heads=32, kv_heads=8, head_dim=128, seqlen_q=8),
}


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("splits", [1, 5, None])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, splits: int | None) -> None:
    problem = FORMS[form].but(seqlens=(1000, 1, 0), dtype=torch.bfloat16, page_size=64, splits=splits, device="cuda")
    out, lse = problem.run()
    want, want_lse = problem.answer()
    assert max_error(out, want) <= BOUNDS[torch.bfloat16][0]
    assert max_error(lse, want_lse) <= BOUNDS[torch.bfloat16][0]


def test_on_a_side_stream_behind_queued_work() -> None:
    problem = Problem(seqlens=(2000,), page_size=16, splits=7, device="cuda")
    want, _ = problem.run()
    busy = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            for _ in range(5):
                busy = busy @ busy
            out, _ = problem.run(check=False)
            again = out + 0
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(again, want)
