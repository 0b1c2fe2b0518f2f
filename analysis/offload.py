"""Offloading saved tensors to host memory: bytes moved, step time, and when it beats recomputing.

Three ways to have an activation in the backward pass: keep it, compute it again, or move it over a
link and back. :func:`transfer_plan` says which bytes move for a list of saved tensors;
:func:`step_timeline` replays a step layer by layer with one copy engine a direction;
:func:`crossover_bandwidth` is its steady state in closed form: above it, moving is faster than
recomputing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["store", "recompute", "offload"]

#: A view that touches at least this share of its storage moves the whole storage.
WHOLE_STORAGE_SHARE = 4
#: A span starts at a multiple of this, so that restored views keep their alignment.
SPAN_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class SavedView:
    """A tensor that autograd saves: a strided view of a storage (sizes and strides in elements)."""

    storage: int
    storage_bytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    resident: bool = False  # a parameter or buffer: it stays on the device

    @property
    def touched_bytes(self) -> int:
        """Bytes of distinct elements; a broadcast dimension (stride 0) counts once."""
        count = self.itemsize
        for size, stride in zip(self.size, self.stride, strict=True):
            count *= size if stride or size == 0 else 1
        return count

    @property
    def first_byte(self) -> int:
        """Start of the span, rounded down to the alignment."""
        start = self.offset * self.itemsize
        return start - start % SPAN_ALIGNMENT_BYTES

    @property
    def last_byte(self) -> int:
        """One past the last byte the view touches."""
        if 0 in self.size:
            return self.offset * self.itemsize
        reach = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (self.offset + reach + 1) * self.itemsize


def moves_whole_storage(view: SavedView) -> bool:
    """True when saving this view moves its whole storage, not only the span it touches.

    A saved view keeps its storage alive, so moving all of it frees all of it. Only a view that
    touches less than a quarter of its storage moves its own span.
    """
    return WHOLE_STORAGE_SHARE * view.touched_bytes >= view.storage_bytes


def transfer_plan(saved: Sequence[SavedView]) -> dict[tuple[int, int, int], int]:
    """Spans (storage, first byte, one past the last) that move for these saved tensors, and bytes.

    Residents do not move; a span inside one that already moves does not move again.
    """
    plan: dict[tuple[int, int, int], int] = {}
    for view in saved:
        if view.resident or view.storage_bytes == 0:
            continue
        first, last = view.first_byte, view.last_byte
        if moves_whole_storage(view):
            first, last = 0, view.storage_bytes
        if any(owner == view.storage and a <= first and last <= b for owner, a, b in plan):
            continue
        plan[view.storage, first, last] = last - first
    return plan


def transfer_bytes(saved: Sequence[SavedView]) -> int:
    """Bytes that move in each direction for these saved tensors."""
    return sum(transfer_plan(saved).values())


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes it saves, bytes of its input, seconds of its forward and backward."""

    saved_bytes: int
    forward_s: float
    backward_s: float
    input_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.saved_bytes, self.input_bytes, self.forward_s, self.backward_s) < 0:
            raise ValueError(f"layer costs must not be negative: {self}")


@dataclass(frozen=True)
class HostLinkModel:
    """A full-duplex link to host memory: bytes per second each way, least seconds of a copy."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"link bandwidth must be positive, got {self.bytes_per_s} B/s")

    def seconds(self, nbytes: int) -> float:
        """Time of one copy."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


@dataclass(frozen=True)
class StepTime:
    """A replayed step: total seconds, seconds the computation waited for the link, bytes moved each
    way, and the largest number of saved bytes on the device."""

    total_s: float
    waiting_s: float
    moved_bytes: int
    peak_bytes: int


def step_timeline(
    layers: Sequence[LayerCost], actions: Sequence[Action], link: HostLinkModel, prefetch_bytes: int = 1 << 62
) -> StepTime:
    """Replay forward and backward of a chain with one copy engine a direction.

    A copy out starts when its layer's forward ends and frees its bytes when it ends. The first
    offloaded layer of the backward waits until every copy out has ended. Starting layer i asks for
    layer i and for earlier offloaded layers within ``prefetch_bytes``; copies run in that order.
    Recomputing costs the layer's forward again and keeps its input.
    """
    if len(layers) != len(actions):
        raise ValueError(f"{len(layers)} layers but {len(actions)} actions")
    now = waiting = 0.0
    engine_free = 0.0
    held: list[tuple[float, int]] = []  # (time, change of saved bytes on the device)
    for layer, action in zip(layers, actions, strict=True):
        now += layer.forward_s
        if action == "recompute":
            held.append((now, layer.input_bytes))
            continue
        held.append((now, layer.saved_bytes))
        if action == "offload":
            engine_free = max(engine_free, now) + link.seconds(layer.saved_bytes)
            held.append((engine_free, -layer.saved_bytes))
    all_out = engine_free
    arrives: dict[int, float] = {}

    def ask(index: int) -> None:
        nonlocal engine_free
        if index not in arrives:
            start = max(engine_free, now)
            held.append((start, layers[index].saved_bytes))
            engine_free = start + link.seconds(layers[index].saved_bytes)
            arrives[index] = engine_free

    for index in range(len(layers) - 1, -1, -1):
        layer, action = layers[index], actions[index]
        window = prefetch_bytes
        if action == "offload":
            waiting += max(0.0, all_out - now)
            now = max(now, all_out)
            ask(index)
            for earlier in range(index - 1, -1, -1):
                if actions[earlier] == "offload":
                    window -= layers[earlier].saved_bytes
                    if window < 0:
                        break
                    ask(earlier)
            waiting += max(0.0, arrives[index] - now)
            now = max(now, arrives[index])
            now += layer.backward_s
            held.append((now, -layer.saved_bytes))
        elif action == "recompute":
            now += layer.forward_s
            held.append((now, layer.saved_bytes))
            now += layer.backward_s
            held.append((now, -layer.saved_bytes - layer.input_bytes))
        else:
            now += layer.backward_s
            held.append((now, -layer.saved_bytes))
    moved = sum(c.saved_bytes for c, a in zip(layers, actions, strict=True) if a == "offload")
    peak = level = 0
    for _, change in sorted(held):
        level += change
        peak = max(peak, level)
    return StepTime(now, waiting, moved, peak)


def steady_layer_seconds(cost: LayerCost, action: Action, link: HostLinkModel) -> float:
    """Seconds a layer adds to a long step: link and computation overlap perfectly."""
    if action == "store":
        return cost.forward_s + cost.backward_s
    if action == "recompute":
        return 2 * cost.forward_s + cost.backward_s
    copy = link.seconds(cost.saved_bytes)
    return max(cost.forward_s, copy) + max(cost.backward_s, copy)


def crossover_bandwidth(cost: LayerCost) -> float:
    """Link bandwidth (bytes/s) above which moving a layer is faster than computing it again.

    Solves max(f, t) + max(b, t) = 2f + b for the copy time t: t = 2f if b >= 2f, else f + b/2.
    """
    f, b = cost.forward_s, cost.backward_s
    if f <= 0:
        raise ValueError(f"a layer that costs {f} s to recompute never needs its tensors moved")
    return cost.saved_bytes / (2 * f if b >= 2 * f else f + b / 2)


def free_bandwidth(cost: LayerCost) -> float:
    """Link bandwidth (bytes/s) from which moving a layer hides entirely behind its forward."""
    if cost.forward_s <= 0:
        raise ValueError(f"nothing to hide a copy behind: forward takes {cost.forward_s} s")
    return cost.saved_bytes / min(cost.forward_s, cost.backward_s)


def transformer_layer_cost(
    batch: int, seqlen: int, hidden: int, flops_per_s: float, *, attention_matrix: bool, heads: int
) -> LayerCost:
    """A transformer layer: FLOPs 24Bsh² + 4Bs²h, saved sbh(34 + 5as/h) bytes (Korthikanti 2022,
    Eq. 1 and Section 5); without the attention matrices (flash attention) 34sbh. Backward is twice
    the forward."""
    tokens = batch * seqlen
    forward_flops = 24 * tokens * hidden**2 + 4 * tokens * seqlen * hidden
    saved = 34 * tokens * hidden + (5 * heads * seqlen * tokens if attention_matrix else 0)
    seconds = forward_flops / flops_per_s
    return LayerCost(saved, seconds, 2 * seconds, input_bytes=2 * tokens * hidden)
