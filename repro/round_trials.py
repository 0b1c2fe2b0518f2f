"""What was tried on the Hopper loops: instructions and predicted clocks with and without a change.

A change is a macro ``TRY_…`` of the Hopper sources, or turns, which are a form's. Everything else
is as the default forms have it.

``python -m repro.round_trials`` writes ``kernels/hopper_trials.csv``. Minutes; needs NVRTC and
nvdisasm.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kernels import hopper_time
from kernels.building import nvrtc
from kernels.building.compile import compile_cubin
from kernels.hopper import BackwardForm, ForwardForm
from kernels.launch import Kernel
from kernels.sass.code import count, disassemble
from repro import cli

CSV = hopper_time.LINES.with_name("hopper_trials.csv")
COLUMNS = ("change", "pass", "form", "causal", "metric", "nvrtc", "without", "with", "date",
           "commit")  # fmt: skip
LENGTHS = (8, 16)


@dataclass(frozen=True)
class Forward(ForwardForm):
    """With macros beside the form's own."""

    macros: tuple[tuple[str, int], ...] = ()

    def kernel(self, *args: object, **options: object) -> Kernel:
        found = super().kernel(*args, **options)
        return replace(found, macros=(*found.macros, *self.macros))


@dataclass(frozen=True)
class Backward(BackwardForm):
    """With macros beside the form's own."""

    macros: tuple[tuple[str, int], ...] = ()

    def kernel(self, *args: object, **options: object) -> Kernel:
        found = super().kernel(*args, **options)
        return replace(found, macros=(*found.macros, *self.macros))


def f(head_dim: int, consumers: int, block_n: int, **options: object) -> Forward:
    return Forward(head_dim, consumers, block_n, **options)


WIDE, NARROW, TALL = f(128, 2, 176), f(128, 2, 128), f(64, 3, 128)
SHORT, TALL_SHORT = replace(NARROW, persistent=True), replace(TALL, persistent=True)
IN_TURN = tuple(replace(form, pingpong=True) for form in (NARROW, SHORT, WIDE, TALL, TALL_SHORT))
BACKWARD = (Backward(64, 128), Backward(128, 64), Backward(128, 80))
DEEP = f(256, 2, 80)


def trials() -> Iterator[tuple[str, Forward | Backward, Forward | Backward, bool, str]]:
    """Change, form without, form with, causal, part."""
    for form in (NARROW, SHORT, WIDE, TALL, TALL_SHORT, DEEP):
        yield "turns", form, replace(form, pingpong=True), False, ""
    yield "order", replace(IN_TURN[0], late_wait=True), IN_TURN[0], False, ""
    for form in IN_TURN:
        yield "lazy rescale", *toggled(form, "TRY_LAZY"), False, ""
    for form in (*IN_TURN, DEEP):
        yield "mask by bits", *toggled(form, "TRY_MASK_BITS"), True, ""
    for form in IN_TURN:
        if not form.persistent:
            yield "two loops", *toggled(form, "TRY_TWO_LOOPS"), True, ""
    for form in IN_TURN:
        if form.persistent:
            for part in ("", "optimistic"):
                yield "sums first", *toggled(form, "TRY_SUMS_FIRST"), False, part
    for form in BACKWARD:
        yield "address once", *toggled(form, "TRY_ADDRESS_ONCE"), False, ""


def toggled(form: Forward | Backward, macro: str) -> tuple[Forward | Backward, ...]:
    return tuple(replace(form, macros=((macro, on),)) for on in (0, 1))


def numbers(form: Forward | Backward, causal: bool, part: str) -> dict[tuple[str, str], float]:
    """By metric and version of NVRTC."""
    if isinstance(form, Backward):
        kernel = form.kernel("", "bf16", causal)
    else:
        kernel = form.kernel("bf16", causal, part)
    found: dict[tuple[str, str], float] = {}
    for version in nvrtc.versions():
        code = disassemble(compile_cubin(kernel, "sm_90a", version).cubin, kernel.entry)
        path, loop = code.shortest_round("HGMMA"), code.main_loop("HGMMA")
        counted, everywhere = count(path), count(code.instructions)
        ways = [count(way) for way in code.between_waits(1)]
        found |= {
            ("instructions", version): len(path),
            ("loop", version): len(loop),
            ("FMUL", version): counted["FMUL"],
            ("uniform", version): sum(n for o, n in counted.items() if o.startswith("U"))
            + counted["R2UR"],
            ("R2UR", version): counted["R2UR"],
            ("local", version): everywhere["LDL"] + everywhere["STL"],
            ("registers", version): max(used for _, used in code.registers_by_role()),
            ("MUFU under the product", version): ways[0]["MUFU"],
        }
        if isinstance(form, ForwardForm) and form.persistent:
            found["MUFU under the product, step", version] = ways[1]["MUFU"]
    version = nvrtc.versions()[0]
    if not part:
        try:
            (eight, sixteen), _ = hopper_time._points(form, causal, lengths=LENGTHS)
        except ValueError as error:  # a spill that the model cannot follow
            print(form.name, error, file=sys.stderr)
            return found
        found["clocks a round", version] = round((sixteen[1] - eight[1]) / 8)
        found["clocks of 8 rounds", version] = round(eight[1])
    return found


def main() -> None:
    """Measures every trial."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for change, without, with_, causal, part in trials():
            pass_ = "backward" if isinstance(without, Backward) else "forward"
            before, after = (numbers(form, causal, part) for form in (without, with_))
            name = f"{with_.name}{part and ', '}{part}"
            for (metric, version), value in after.items():
                if (metric, version) in before:
                    writer.writerow([change, pass_, name, causal, metric, version,
                                     before[metric, version], value, today, commit])  # fmt: skip
            file.flush()


if __name__ == "__main__":
    sys.exit(cli.program(main))
