"""The operator where only a GPU will do: large counts, streams, devices, back ends.

The other edge cases run on the GPU from ``tests/operator`` (``pytest -k cuda``).
"""

from __future__ import annotations

import threading

import pytest
import torch
from attention_support import inputs, normal, run, run_and_check

import repro
from repro.attention.reference import attention_reference, max_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("shape", [(65536, 1, 1, 16), (1, 65536, 1, 16)])
def test_more_heads_than_a_grid_axis_holds(shape: tuple[int, ...]) -> None:
    q, k, v, dout = (normal(*shape, dtype=torch.float16, device="cuda", seed=seed) for seed in range(4))
    result = run(q, k, v, dout)
    assert torch.equal(result.out, v)
    assert torch.equal(result.dv, dout)


def test_scratch_beyond_32_bits() -> None:
    """Padded to 128 rows, scratch of this shape has more than 2³¹ elements."""
    shape = (8300, 16, 1, 128)
    q, k, v, dout = (normal(*shape, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(4))
    result = run(q, k, v, dout)
    assert torch.equal(result.out, v)
    assert all(bool(grad.isfinite().all()) for grad in (result.dq, result.dk, result.dv))


def test_tensors_beyond_32_bits() -> None:
    """q, k and v of more than 2³¹ elements each: offsets are computed in 64 bits."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    q = torch.randn(2**15 + 8, 1, 512, 128, dtype=torch.float16, device="cuda")
    assert q.numel() > 2**31
    out = repro.flash_attention(q, q, q)
    assert isinstance(out, torch.Tensor)
    last = q[-1:].cpu()
    want = attention_reference(last, last, last).out
    assert max_error(out[-1:].cpu(), want) <= 3e-3


def test_a_side_stream_behind_queued_work() -> None:
    """Called on a side stream behind queued work, it is right without a global synchronise."""
    q, k, v, _ = inputs(2, 4, 300, 300, 64, dtype=torch.float16, device="cuda")
    want = repro.flash_attention(q, k, v, causal=True)
    busy = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            for _ in range(8):  # about 10 ms of queued work
                busy = busy @ busy * 1e-4
            inputs_here = [(t + busy.sum() * 0).to(t.dtype) for t in (q, k, v)]
            out = repro.flash_attention(*inputs_here, causal=True)
            assert isinstance(out, torch.Tensor)
            doubled = out * 2
        stream.synchronize()
        assert torch.equal(doubled, want * 2)  # type: ignore[operator]


def test_scratch_is_not_reused_while_needed() -> None:
    """Many backward passes queued on one stream share the allocator's scratch and stay right."""
    q, k, v, dout = inputs(2, 4, 300, 300, 64, dtype=torch.float16, device="cuda")
    want = run(q, k, v, dout, deterministic=True)
    results = [run(q, k, v, dout, deterministic=True) for _ in range(50)]
    for result in results:
        for name, got, expected in zip(want._fields, result, want, strict=True):
            assert torch.equal(got, expected), name


def test_every_device_has_its_own_kernels() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1, 0):
        run_and_check(*inputs(1, 2, 65, 65, 64, dtype=torch.float16, device=f"cuda:{index}"))


def test_host_and_gpu_agree() -> None:
    """The same sources on both: in fp32 results differ by rounding only, the dropout mask not at
    all."""
    tensors = inputs(2, 2, 90, 70, 32)
    host = run(*tensors, dropout_p=0.3, seed=11, causal=True)
    gpu = run(*(t.cuda() for t in tensors), dropout_p=0.3, seed=11, causal=True)
    for name, got, want in zip(host._fields, gpu, host, strict=True):
        finite = want.isfinite()
        assert torch.equal(got.cpu().isfinite(), finite), name
        assert max_error(got.cpu()[finite], want[finite]) <= 2e-5, name


@pytest.mark.parametrize("variant", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn"])
def test_which_fused_back_end_ran(variant: str) -> None:
    """A forced back end is the one that ran, or it says in one line why it cannot."""
    from repro.attention.variants import ran_backend, unavailable

    q, k, v, _ = inputs(1, 2, 64, 64, 64, dtype=torch.float16, device="cuda")
    why = unavailable(variant, q, k, v)
    if why is not None:
        assert "\n" not in why
        return
    assert variant.removeprefix("sdpa-") in ran_backend(variant, q, k, v)


def test_threads_with_the_same_layout() -> None:
    """A thread whose first call of CUDA this is has no context yet; two share one set of launches,
    each with its own addresses."""
    operands = [inputs(1, 4, 200, 200, 64, dtype=torch.bfloat16, device="cuda", seed=s) for s in range(2)]
    wanted = [run(*of, causal=True, deterministic=True) for of in operands]  # both are kept now
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(50):
            got = run(*operands[index], causal=True, deterministic=True)
            for name, ours, right in zip(got._fields, got, wanted[index], strict=True):
                if not torch.equal(ours, right):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("seqlen", [300, 5000])
def test_a_captured_call_replays_on_new_values(seqlen: int) -> None:
    """In a CUDA graph: scratch, and the counter of persistent blocks, are made anew by a replay."""
    q, k, v, dout = inputs(1, 4, seqlen, seqlen, 64, dtype=torch.bfloat16, device="cuda", seed=0)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def call() -> tuple[torch.Tensor, ...]:
        out = repro.flash_attention(*leaves, causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return (out, *torch.autograd.grad(out, leaves, dout))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in range(1, 4):
        fresh = inputs(1, 4, seqlen, seqlen, 64, dtype=torch.bfloat16, device="cuda", seed=seed)
        with torch.no_grad():
            for kept, new in zip((*leaves, dout), fresh, strict=True):
                kept.copy_(new)
        graph.replay()
        for ours, right in zip(captured, call(), strict=True):
            assert torch.equal(ours, right)
