"""Whether the Hopper kernels work on this card, asked of a process that may hang.

    python -m repro.instruments.hopper_guard

A kernel that waits for a barrier nobody arrives at never ends, and nothing in its process gets on.
So before anything times or counts these kernels, another process runs each of them once on small
tensors and compares; it has a limit, and its failure costs one implementation and not the run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from analysis.shapes import AttentionShape
from kernels import attention
from kernels.hopper_forms import FORWARD_FORMS, ForwardForm

LIMIT_S = 60.0
#: Largest error against float64 for N(0, 1) inputs in bf16: results, gradients.
BOUNDS = (2e-2, 4e-2)


@cache
def refusal(command: Sequence[str] | None = None, limit_s: float = LIMIT_S) -> str | None:
    """Why the Hopper kernels must not be used here, or None. Asked once a process."""
    chosen = command or (sys.executable, "-m", "repro.instruments.hopper_guard")
    process = subprocess.Popen(
        chosen, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)  # and no wait: the driver may not let go of it
        return f"the Hopper kernels did not finish small tensors within {limit_s:g} s"
    if process.returncode == 0:
        return None
    return (said.strip() or f"the Hopper check ended with {process.returncode}").splitlines()[-1]


def main() -> None:
    """Run both passes by their rules, then every form of the forward.

    SystemExit with one line if one is wrong.
    """
    for algorithm in attention.HOPPER:
        for head_dim in (64, 128):
            for causal in (False, True):
                _try(algorithm, AttentionShape(1, 2, 333, 333, head_dim, 0, "bf16", causal))
    for form in FORWARD_FORMS:
        for causal in (False, True):
            _try_form(form, AttentionShape(1, 2, 333, 333, form.head_dim, 0, "bf16", causal))


def _try_form(form: ForwardForm, shape: AttentionShape) -> None:
    import torch

    from repro.instruments.gpu_work import Operands, form_work

    operands = Operands(shape)
    run, got = form_work(form, operands)
    run()
    q, k, v = (t.double() for t in (operands.q, operands.k, operands.v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
    error = float((got.double() - exact).abs().max())
    if not error <= BOUNDS[0]:
        raise SystemExit(
            f"{form.name}, causal={shape.causal}: out is off by {error:.3g}, more than {BOUNDS[0]}"
        )


def _try(algorithm: str, shape: AttentionShape) -> None:
    import torch

    from repro.instruments.gpu_work import Operands, kernel_results

    operands = Operands(shape)
    got = kernel_results(algorithm, operands)
    q, k, v = (t.double().requires_grad_() for t in (operands.q, operands.k, operands.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
    exact = [out, *torch.autograd.grad(out, (q, k, v), operands.dout.double())]
    for name, ours, right in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
        bound = BOUNDS[name != "out"]
        error = float((ours.double() - right).abs().max())
        if not error <= bound:
            raise SystemExit(
                f"{algorithm}, head_dim {shape.head_dim}, causal={shape.causal}: {name} is off by "
                f"{error:.3g}, more than {bound}"
            )


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        raise SystemExit(str(error).splitlines()[0]) from None
