"""What a GPU run found, judged: beside what was predicted and beside competing implementations.

From records alone, without a data frame, so that a run can say it on the rented machine too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from analysis.hardware import find_gpu
from kernels import hopper
from kernels.dispatch import form_name
from repro import experiments
from repro.experiments.gpu import gpu_throughput
from repro.measuring.records import Record

#: What the Hopper kernels must not be slower than: one step of the ladder below.
STEP_BELOW = "flash"
CUDNN = "sdpa-cudnn"
#: Aims for the geometric mean over the shapes: (what, pass, ours, beside, at least).
GOALS = (
    ("exact forward", "forward", hopper.ALGORITHM, "best", 1.00),
    ("optimistic forward", "forward", hopper.OPTIMISTIC, "best", 1.08),
    ("backward", "backward", hopper.ALGORITHM, "best", 1.00),
    ("backward", "backward", hopper.ALGORITHM, CUDNN, 1.12),
)


@dataclass(frozen=True)
class Shape:
    """A shape of ``gpu-throughput``: TFLOP/s by implementation, predicted bounds, refusals."""

    pass_: str
    head_dim: int
    causal: bool
    seqlen: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    refused: Mapping[str, str]

    def best(self) -> tuple[str, float] | None:
        """The fastest competing implementation, None where none ran."""
        found = {n: v for n, v in self.measured.items() if n.startswith("sdpa-")}
        return max(found.items(), key=lambda pair: pair[1]) if found else None

    def ratio(self, ours: str, beside: str = "best") -> float | None:
        """Our throughput over another's, None where one of them has none."""
        found = self.best()
        other = (found and found[1]) if beside == "best" else self.measured.get(beside)
        mine = self.measured.get(ours)
        return mine / other if mine and other else None


def shapes(rows: Iterable[Record], *, predict: bool = True) -> list[Shape]:
    """The shapes of ``gpu-throughput`` among these rows, in the order of pass, d, mask and N.

    predict: with the bounds, which take half a second a shape.
    """
    by_cell: dict[tuple[str, int, bool, int], list[Record]] = {}
    for r in rows:
        if r.experiment != gpu_throughput.EXPERIMENT.name or r.source != "measured" or r.seqlen_q is None:
            continue
        key = (r.pass_, r.head_dim or 0, bool(r.causal), r.seqlen_q)
        by_cell.setdefault(key, []).append(r)
    cells = {
        (str(c["pass"]), int(c["head_dim"]), bool(c["causal"]), int(c["seqlen_q"])): c for c in gpu_throughput.cells()
    }
    found = []
    for key, of_cell in sorted(by_cell.items(), key=lambda item: (-ord(item[0][0][0]), item[0])):
        device = next((r.device for r in of_cell if r.device), None)
        card = find_gpu(device) if device else None
        bounds = gpu_throughput.EXPERIMENT.predicted(cells[key]) if predict and key in cells else []
        measured = {
            r.implementation: r.value for r in of_cell if r.metric == "throughput_tflops" and r.value is not None
        }
        found.append(
            Shape(
                *key,
                measured=measured,
                predicted={
                    r.implementation: r.value
                    for r in bounds
                    if r.value is not None and card is not None and r.device == card.name
                },
                refused={r.implementation: r.error for r in of_cell if r.error},
            )
        )
    return found


def throughput_table(found: Sequence[Shape]) -> list[str]:
    """Lines: a shape each, then the geometric means beside the aims."""
    if not found:
        return []
    heads = ("pass", "d", "mask", "N", "predicted", "measured", "best competing", "", "ratio", "optimistic", "ratio")
    table = [heads]
    for s in found:
        best = s.best()
        ours, optimistic = s.measured.get(hopper.ALGORITHM), s.measured.get(hopper.OPTIMISTIC)
        table.append(
            (
                s.pass_,
                str(s.head_dim),
                "causal" if s.causal else "-",
                str(s.seqlen),
                _number(s.predicted.get(hopper.ALGORITHM)),
                _number(ours),
                best[0] if best else "-",
                _number(best and best[1]),
                _number(s.ratio(hopper.ALGORITHM), 2),
                _number(optimistic),
                _number(s.ratio(hopper.OPTIMISTIC), 2),
            )
        )
    lines = ["TFLOP/s; predicted: the bound of the time model; ratio: to the best competing one"]
    lines += _aligned(table)
    for s in found:
        lines += [f"{s.pass_} d={s.head_dim} N={s.seqlen}: {name}: {why}" for name, why in s.refused.items()]
    return lines + goals(found)


def goals(found: Sequence[Shape]) -> list[str]:
    """A line for each aim: the geometric mean over the shapes that have both, and the aim."""
    lines = []
    for what, pass_, ours, beside, aim in GOALS:
        of_pass = [s for s in found if s.pass_ == pass_]
        ratios = [r for s in of_pass if (r := s.ratio(ours, beside)) is not None]
        other = "the best competing implementation" if beside == "best" else "cuDNN"
        if not ratios:
            lines.append(f"{what}: not measured beside {other} (aim {aim:.2f})")
            continue
        mean = geometric_mean(ratios)
        lines.append(
            f"{what}: {mean:.3f} x {other}, geometric mean over {len(ratios)} shapes, "
            f"{min(ratios):.2f} to {max(ratios):.2f} (aim {aim:.2f}: "
            f"{'reached' if mean >= aim else 'not reached'})"
        )
    return lines


def left_out(found: Sequence[Shape]) -> dict[str, str]:
    """Hopper forms and algorithms that should not be dispatched to, and why.

    A form that is wrong anywhere, or slower than the sm_80 kernels in the geometric mean over the
    shapes that pick it; an algorithm beside the dispatched one that is wrong anywhere.
    """
    reasons: dict[str, str] = {}
    ratios: dict[str, list[float]] = {}
    for s in found:
        form = form_name(s.head_dim, s.pass_, s.seqlen, ["causal"] if s.causal else [])
        for name, why in s.refused.items():
            if name.startswith(hopper.ALGORITHM) and why.startswith("wrong"):
                reasons.setdefault(form if name == hopper.ALGORITHM else name, why)
        ratio = s.ratio(hopper.ALGORITHM, STEP_BELOW)
        if ratio is not None:
            ratios.setdefault(form, []).append(ratio)
    for form, over in ratios.items():
        mean = geometric_mean(over)
        if mean < 1:
            why = f"{mean:.2f} x the speed of the sm_80 kernels, mean over {len(over)} shapes"
            reasons.setdefault(form, why)
    return reasons


def beside_predictions(name: str, rows: Iterable[Record]) -> list[str]:
    """Lines that set an experiment's measured rows beside its predictions: how many, how far."""
    experiment = experiments.experiment(name)
    predicted = {
        (cell.id, *_what(r)): r.value for cell in experiment.cells() for r in experiment.predicted(cell) if r.value
    }
    ratios: list[tuple[float, Record]] = []
    errors = 0
    for r in rows:
        if r.experiment != name or r.source != "measured":
            continue
        errors += r.error is not None
        expected = predicted.get((r.cell or "", *_what(r)))
        if r.value and expected:
            ratios.append((r.value / expected, r))
    lines = [f"{name}: {errors} failures on record"] if errors else []
    if not ratios:
        return lines
    ordered = sorted(ratios, key=lambda pair: pair[0])
    lines.append(
        f"{name}: measured / predicted of {len(ratios)} numbers: median "
        f"{median(r for r, _ in ratios):.3f}, {ordered[0][0]:.3f} to {ordered[-1][0]:.3f}"
    )
    furthest = sorted(ratios, key=lambda pair: -abs(math.log(pair[0])))[:3]
    lines += [f"  furthest: {ratio:.3f} x, {_label(r)}" for ratio, r in furthest]
    return lines


def judge(rows: Sequence[Record], *, predict: bool = True) -> list[str]:
    """Everything there is to say of a run's rows, in lines.

    predict: beside predictions, which take a minute. Without them, as a run says it that pays for
    every second: what was measured, beside each other, and how many rows there are.
    """
    lines = throughput_table(shapes(rows, predict=predict))
    known = [n for n in experiments.names() if n != gpu_throughput.EXPERIMENT.name]
    for name in (n for n in known if any(r.experiment == n for r in rows)):
        if predict:
            lines += beside_predictions(name, rows)
            continue
        of_name = [r for r in rows if r.experiment == name]
        failed = sum(r.error is not None for r in of_name)
        lines.append(f"{name}: {len(of_name)} rows, {failed} of them failures")
    return lines


def _what(r: Record) -> tuple[object, ...]:
    return r.implementation, r.pass_, r.metric, r.level, r.kernel, r.tensor, r.direction


def _label(r: Record) -> str:
    parts = [r.implementation, r.pass_, r.metric, r.level, r.kernel, r.tensor, r.direction]
    shape = f"N={r.seqlen_q} d={r.head_dim}" if r.seqlen_q else ""
    return " ".join(str(part) for part in [*parts, shape] if part and part != "-")


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    left: Callable[[int], bool] = lambda i: i in (0, 2, 6)  # noqa: E731
    return [
        "  ".join(
            cell.ljust(width) if left(i) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
