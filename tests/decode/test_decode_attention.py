"""repro.decode_attention: held to float64, in pages or not, in any number of splits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, normal
from decode_support import Problem

import repro
from kernels import decode as driver
from repro.attention import launcher
from repro.attention.reference import max_error


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host backend judges every access."""
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


def check(problem: Problem) -> None:
    out, lse = problem.run()
    want, want_lse = problem.answer()
    bound = BOUNDS[problem.dtype][0]
    assert max_error(out, want) <= bound, problem
    assert max_error(lse, want_lse) <= bound, problem


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, torch.float16), (40, torch.float32), (96, torch.bfloat16), (256, torch.float16), (256, torch.float32)],
)
def test_head_dimensions(head_dim: int, dtype: torch.dtype, device: str) -> None:
    check(Problem(head_dim=head_dim, dtype=dtype, splits=2, seqlen_q=3, device=device))


@pytest.mark.parametrize("width", [1, 2, 7])
def test_speculative_widths(width: int, device: str) -> None:
    """Query i of a draft sees the draft's tokens up to its own, as one query at a time would."""
    problem = Problem(seqlens=(130, 64), seqlen_q=width, dtype=torch.float32, device=device)
    check(problem)
    (q, k, v), options = problem.arguments()
    together = repro.decode_attention(q, k, v, **options)
    for i in range(width):
        alone = options | {"seqlens_k": options["seqlens_k"] - (width - 1 - i)}
        one = repro.decode_attention(q[:, :, i : i + 1], k, v, **alone)
        assert max_error(one, together[:, :, i : i + 1]) <= BOUNDS[torch.float32][0]


@pytest.mark.parametrize(("page_size", "splits"), [(16, 1), (48, 3), (256, 3)])
def test_pages_change_no_bit(page_size: int, splits: int, device: str) -> None:
    plain = Problem(seqlens=(500, 1, 129), splits=splits, device=device)
    out, lse = plain.run()
    paged = plain.but(page_size=page_size)
    # The same numbers: drawn for the room that there is, which pages round up.
    (q, k, v), options = plain.arguments()
    pad = torch.nn.functional.pad
    wide = [pad(x, (0, 0, 0, paged.room - plain.room)) for x in (k, v)]
    caches, table = paged.paged(*wide)
    again, again_lse = repro.decode_attention(q, *caches, block_table=table, return_lse=True, **options)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


def test_sequences_share_pages(device: str) -> None:
    """A prompt in common lies in memory once; each sequence goes on in pages of its own."""
    k, v = (normal(5, 16, 2, 64, device=device, seed=i) for i in (1, 2))
    q = normal(2, 4, 1, 64, device=device)
    table = torch.tensor([[3, 1, 0], [3, 1, 4]], dtype=torch.int32, device=device)
    lengths = torch.tensor([40, 48], dtype=torch.int32, device=device)
    out = repro.decode_attention(q, k, v, seqlens_k=lengths, block_table=table)
    for b in range(2):
        rows = [x[table[b].long()].flatten(0, 1)[: lengths[b]] for x in (k, v)]
        want = repro.flash_attention(q[b : b + 1], *(x.transpose(0, 1)[None] for x in rows))
        assert max_error(out[b : b + 1], want) <= BOUNDS[torch.float32][0]


def test_every_number_of_splits_gives_the_same_answer(device: str) -> None:
    problem = Problem(seqlens=(300, 33), dtype=torch.float32, device=device)
    one, one_lse = problem.run()
    for splits in (2, 3, 5, 64, 1000):
        out, lse = problem.run(splits=splits)
        assert max_error(out, one) <= BOUNDS[torch.float32][0]
        assert max_error(lse, one_lse) <= BOUNDS[torch.float32][0]
    default, _ = problem.run(splits=None)
    assert max_error(default, one) <= BOUNDS[torch.float32][0]


def test_runs_repeat_to_the_bit(device: str) -> None:
    problem = Problem(seqlens=(300, 33), splits=5, device=device)
    first, again = problem.run(), problem.run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_row_without_keys_is_zero(device: str) -> None:
    for splits in (1, 4):
        problem = Problem(seqlens=(0, 2), seqlen_q=4, splits=splits, device=device)
        out, lse = problem.run()
        assert torch.all(out[0] == 0)
        assert torch.all(lse[0] == -math.inf)
        # Two keys, four queries: the first two see none.
        assert torch.all(out[1, :, :2] == 0)
        assert torch.all(lse[1, :, :2] == -math.inf)
        assert torch.all(lse[1, :, 2:] > -math.inf)
        check(problem)


def test_nothing_to_do(device: str) -> None:
    q, k = torch.ones(2, 4, 1, 64, device=device), torch.ones(2, 2, 0, 64, device=device)
    out, lse = repro.decode_attention(q, k, k, return_lse=True)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)
    empty = repro.decode_attention(q[:0], k[:0], k[:0])
    assert empty.shape == (0, 4, 1, 64)


def test_scores_beyond_fp16_and_any_scale(device: str) -> None:
    """Raw q·k of 131072 where fp16 ends at 65504; scales of zero and below."""
    v = torch.arange(4.0).repeat_interleave(128).view(1, 1, 4, 128).to(device, torch.float16)
    q = torch.full((1, 1, 1, 128), 32.0, dtype=torch.float16, device=device)
    out, lse = repro.decode_attention(q, q.expand(1, 1, 4, 128).contiguous(), v, return_lse=True, splits=1)
    assert max_error(out, torch.full_like(out, 1.5)) == 0
    assert abs(float(lse) - 11586.62) <= 0.01
    problem = Problem(dtype=torch.float32, device=device)
    (q, k, v), options = problem.arguments()
    for scale in (0.0, -0.5, 1):
        got = repro.decode_attention(q, k, v, scale=scale, **options)
        want = repro.decode_attention(q * scale, k, v, scale=1.0, **options)
        assert max_error(got, want) <= BOUNDS[torch.float32][0]


def test_layouts_are_read_where_they_lie(device: str) -> None:
    problem = Problem(seqlens=(65,), ragged=False, device=device)
    q, k, v = problem.contiguous()
    want = repro.decode_attention(q, k, v, splits=2)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert torch.equal(repro.decode_attention(q, *by_token, splits=2), want)
    both = torch.stack([k, v], 3).contiguous()  # keys and values of a token side by side
    pair = both[:, :, :, 0], both[:, :, :, 1]
    assert torch.equal(repro.decode_attention(q, *pair, splits=2), want)
    odd = torch.empty(*q.shape[:3], 65, dtype=q.dtype, device=device)[..., 1:]
    odd.copy_(q)
    assert torch.equal(repro.decode_attention(odd, k, v, splits=2), want)


def test_the_next_step_is_launched_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other addresses, lengths and pages, equal layouts: the recorded launches run again."""
    asked: list[str] = []
    real = driver.forward

    def counting(*arguments: Any, **options: Any) -> None:
        asked.append("once")
        real(*arguments, **options)

    monkeypatch.setattr(driver, "forward", counting)
    first = Problem(seqlens=(200, 80), head_dim=48, page_size=16, splits=3, seed=1)
    steps = [first, first.but(seed=2), first.but(seqlens=(193, 0), seed=3)]
    for step in steps:
        (_, counted), (want, _) = step.counted(), step.answer()
        out, _ = step.run()
        assert max_error(out, want) <= BOUNDS[torch.float16][0]
        assert counted == step.expected(3)
    assert asked == ["once"]
    for change in ({"splits": 4}, {"causal": False}, {"scale": 0.5}):
        first.run(**change)
    assert len(asked) == 4
    (q, k, v), options = first.arguments()
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert torch.equal(repro.decode_attention(shifted, k, v, **options), repro.decode_attention(q, k, v, **options))
    assert len(asked) == 5  # rows that start between multiples of 16 bytes are copied first


def test_values_may_go_unchecked() -> None:
    problem = Problem(page_size=16, splits=2)
    assert torch.equal(problem.run(check=False)[0], problem.run()[0])


def test_no_gradient(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in Problem(device=device).contiguous())
    with pytest.raises(RuntimeError, match="no gradient, and q requires one"):
        repro.decode_attention(q, k, v)
    with torch.no_grad():
        assert not repro.decode_attention(q, k, v).requires_grad


@pytest.mark.parametrize("changes", [{"page_size": 16, "splits": 3}, {"fp8": True}])
def test_opcheck(changes: dict[str, Any]) -> None:
    (q, k, v), options = Problem(**changes).arguments()
    given = [options.get(name) for name in ("seqlens_k", "block_table")]
    arguments = (q, k, v, *given, None, None, None, None, options["splits"], 0.125, True, True)
    # fp8 has no "isclose" that opcheck could compare inputs with.
    tests = ("test_schema", "test_faketensor") if not changes.get("fp8") else ("test_faketensor",)
    assert callable(repro.decode_attention)  # registers the operator
    torch.library.opcheck(torch.ops.repro.decode_attention, arguments, test_utils=tests)


def wrong(**changes: Any) -> dict[str, Any]:
    """Arguments of a paged call with some replaced."""
    (q, k, v), options = Problem(page_size=16, heads=4, kv_heads=2).arguments()
    options |= {"q": q, "k_cache": k, "v_cache": v}
    for name, change in changes.items():
        options[name] = change(options[name]) if callable(change) else change
    return options


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "queries": ({"q": lambda q: q.expand(2, 4, 17, 64)}, ValueError, "17 queries.*above 16"),
    "batch": ({"q": lambda q: q[:1]}, ValueError, r"block_table must have shape \(1, 7\).*\(2, 7"),
    "heads": ({"q": lambda q: q[:, :3]}, ValueError, "3 heads, not a multiple of the cache's 2"),
    "type": ({"q": lambda q: q.float()}, TypeError, "float32 and torch.float16"),
    "dimension": ({"q": lambda q: q[..., :32]}, ValueError, "32, 64"),
    "columns": (
        {"q": lambda q: q[..., :60], "k_cache": lambda k: k[..., :60], "v_cache": lambda v: v[..., :60]},
        ValueError,
        "60 is not a multiple of 8",
    ),
    "shapes": ({"v_cache": lambda v: v[:3]}, ValueError, r"differ in shape: \(16.*\(3"),
    "kinds": ({"v_cache": lambda v: v.to(torch.float8_e4m3fn)}, TypeError, "float16.*float8"),
    "sparse": ({"k_cache": lambda k: k.to_sparse()}, TypeError, "sparse"),
    "page": (
        {"k_cache": lambda k: k[:, :8], "v_cache": lambda v: v[:, :8]},
        ValueError,
        "pages of 8 keys, not a multiple of 16",
    ),
    "stride": (
        {"k_cache": lambda k: k.transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError,
        "rows must be contiguous",
    ),
    "table type": ({"block_table": lambda t: t.long()}, TypeError, "int32 tensor, got torch.int64"),
    "table list": ({"block_table": [[0]]}, ValueError, "block_table must be .*got list"),
    "table index": (
        {"block_table": lambda t: t + 100},
        ValueError,
        r"block_table\[0, 0\] is 1\d\d, the cache has 16 pages",
    ),
    "table below": ({"block_table": lambda t: t - 100}, ValueError, r"is -\d+, the cache has 16"),
    "few columns": (
        {"block_table": lambda t: t[:, :3]},
        ValueError,
        "seqlens_k has 100, the cache room for 48: block_table has 3 columns of 16",
    ),
    "no table": ({"block_table": None}, ValueError, "2 sequences, k_cache 16; pages need a block"),
    "lengths shape": ({"seqlens_k": lambda s: s[:1]}, ValueError, r"shape \(2,\), got \(1,\)"),
    "scales": ({"k_scale": torch.ones(2)}, ValueError, "k_scale is for a cache of .*float8_e4m3fn"),
    "splits": ({"splits": 0}, ValueError, "splits=0 is below 1"),
    "causal": ({"causal": 1}, TypeError, "causal=1"),
    "check": ({"check": "no"}, TypeError, "check='no'"),
    "scale": ({"scale": math.nan}, ValueError, "scale=nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_launch(case: str) -> None:
    changes, kind, message = REFUSED[case]
    backend: Any = launcher.backend_of(torch.device("cpu"))
    backend.reset()
    with pytest.raises(kind, match=message):
        repro.decode_attention(**wrong(**changes))
    assert backend.traffic == {}


def test_entries_behind_the_end_may_be_anything() -> None:
    arguments = wrong()
    table = arguments["block_table"].clone()
    table[1, 3:] = -7  # 37 keys are three pages
    got = repro.decode_attention(**arguments | {"block_table": table})
    assert torch.equal(got, repro.decode_attention(**arguments))


FP8_REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fp32": ({"q": lambda q: q.float()}, TypeError, "multiplied in 16 bits; q is torch.float32"),
    "columns": (
        {"q": lambda q: q[..., :24], "k_cache": lambda k: k[..., :24], "v_cache": lambda v: v[..., :24]},
        ValueError,
        "24 is not a multiple of 16",
    ),
    "scale shape": ({"k_scale": torch.ones(3)}, ValueError, r"\(2,\), got \(3,\)"),
    "scale type": ({"v_scale": torch.ones(2).half()}, TypeError, "float32 tensor, got .*float16"),
    "no values": ({"v_cache": None, "v_scale": torch.ones(2)}, ValueError, "v_scale without"),
}


@pytest.mark.parametrize("case", FP8_REFUSED)
def test_fp8_refused_before_any_launch(case: str) -> None:
    changes, kind, message = FP8_REFUSED[case]
    (q, k, v), options = Problem(fp8=True, ragged=False).arguments()
    options |= {"q": q, "k_cache": k, "v_cache": v}
    for name, change in changes.items():
        options[name] = change(options[name]) if callable(change) else change
    with pytest.raises(kind, match=message):
        repro.decode_attention(**options)
