"""Which Hopper kernels work on this card, asked of processes that may hang.

    python -m repro.instruments.hopper_guard --report

A kernel that waits for a barrier nobody arrives at never ends, and nothing in its process gets on.
So before anything times or counts these kernels, another process runs each of them on small tensors
and compares. It says whom it has tried; if it hangs or ends with an error, the one it was at is
refused and a new process goes on with the rest. A failure costs one implementation, not the run.

Processes of one run may share what was found: in the file that ``REPRO_HOPPER_CHECKED`` names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING

from analysis.shapes import AttentionShape
from kernels import attention, hopper
from kernels.hopper import BackwardForm, ForwardForm

if TYPE_CHECKING:
    from torch import Tensor

    from repro.instruments.gpu_work import Operands

#: Seconds that a process may take for one implementation, the first also for its own start.
LIMIT_S = 30.0
#: Processes that may fail before all that is left is refused: a card may be lost to a hung kernel.
FAILURES = 3
#: Largest error against float64 for N(0, 1) inputs in bf16: results, gradients.
BOUNDS = (2e-2, 4e-2)
#: The dispatched algorithm first, then the others and every form by its name.
NAMES = (*attention.HOPPER, *hopper.FORMS)
COMMAND = (sys.executable, "-m", "repro.instruments.hopper_guard")
TRIED = "tried"
#: Names the file that the first process writes and later ones read.
CHECKED_VARIABLE = "REPRO_HOPPER_CHECKED"


def refusal(name: str) -> str | None:
    """Why an implementation must not be used here, or None. All are tried at the first question."""
    return _refusals().get(name)


@cache
def _refusals() -> Mapping[str, str]:
    where = os.environ.get(CHECKED_VARIABLE)
    return refusals(NAMES) if where is None else shared_refusals(Path(where))


def shared_refusals(
    path: Path, names: Sequence[str] = NAMES, command: Sequence[str] = COMMAND
) -> dict[str, str]:
    """:func:`refusals` as a file has them, which is written if it is not there yet."""
    if path.exists():
        found: dict[str, str] = json.loads(path.read_text())
        return found
    found = refusals(names, command)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(found, indent=1) + "\n")
    draft.replace(path)
    return found


def refusals(
    names: Sequence[str], command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S
) -> dict[str, str]:
    """Name -> one line that says what is wrong with it."""
    found: dict[str, str] = {}
    left = list(names)
    while left and len(found) < FAILURES:
        tried, reason = _one_process(left, command, limit_s)
        left = left[len(tried) :]
        if reason is None:
            return found
        if left:
            found[left.pop(0)] = reason
    last = next(reversed(found.values()), "")
    return found | dict.fromkeys(left, f"not tried after {FAILURES} failures, the last: {last}")


def _one_process(
    names: Sequence[str], command: Sequence[str], limit_s: float
) -> tuple[list[str], str | None]:
    """The names that a process has tried, in their order, and what ended it early."""
    # A file, not a pipe: a pipe that nobody reads yet holds up a process with much to say.
    with TemporaryFile("w+", errors="replace") as errors_file:
        process = subprocess.Popen(
            [*command, *names], stdout=subprocess.PIPE, stderr=errors_file, text=True,
            start_new_session=True,
        )  # fmt: skip
        lines: Queue[str | None] = Queue()
        Thread(target=_read, args=(process, lines), daemon=True).start()
        tried = []
        try:
            while (line := lines.get(timeout=limit_s)) is not None:
                if line.startswith(TRIED):
                    tried.append(line.split(" ", 1)[1])
            status = process.wait(limit_s)
        except (Empty, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGKILL)  # and no wait: the driver may not let go of it
            return tried, f"did not finish small tensors within {limit_s:g} s"
        errors_file.seek(0)
        errors = errors_file.read().strip()
    if status == 0:
        return tried, None
    return tried, (errors or f"the Hopper check ended with {status}").splitlines()[-1]


def _read(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip())
    lines.put(None)


def main(names: Sequence[str]) -> None:
    """Run the implementations, a line for each that is right.

    SystemExit with one line if one is wrong.
    """
    for name in names or NAMES:
        form = hopper.FORMS.get(name)
        head_dims = (64, 128) if form is None else (form.head_dim,)
        for head_dim in head_dims:
            for causal in (False, True):
                shape = AttentionShape(1, 2, 333, 333, head_dim, 0, "bf16", causal)
                _try(name, form, shape)
        print(TRIED, name, flush=True)


def _try(name: str, form: ForwardForm | BackwardForm | None, shape: AttentionShape) -> None:
    from repro.instruments.gpu_work import Operands, form_work, kernel_results

    operands = Operands(shape)
    results: tuple[str, ...] = ("out", "dq", "dk", "dv")
    if form is None:
        got = kernel_results(name, operands)
    else:
        run, got = form_work(form, operands)
        run()
        results = results[:1] if isinstance(form, ForwardForm) else results[1:]
    exact = _exact(operands)
    for result, ours in zip(results, got, strict=True):
        bound = BOUNDS[result != "out"]
        error = float((ours.double() - exact[result]).abs().max())
        if not error <= bound:
            raise SystemExit(
                f"{name}, head_dim {shape.head_dim}, causal={shape.causal}: {result} is off by "
                f"{error:.3g}, more than {bound}"
            )


def _exact(operands: Operands) -> dict[str, Tensor]:
    """out, dq, dk, dv in float64."""
    import torch

    q, k, v = (t.double().requires_grad_() for t in (operands.q, operands.k, operands.v))
    causal = operands.shape.causal
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), operands.dout.double())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def report() -> None:
    """Say what is refused, if anything. SystemExit with the number of refusals."""
    found = _refusals()
    for name, reason in found.items():
        print(f"{name}: {reason}", flush=True)
    if found:
        raise SystemExit(f"{len(found)} of {len(NAMES)} Hopper implementations are refused")


if __name__ == "__main__":
    try:
        report() if sys.argv[1:] == ["--report"] else main(sys.argv[1:])
    except RuntimeError as error:
        raise SystemExit(str(error).splitlines()[0]) from None
