"""Every card with every way of sharing: an answer from the simulated L2, and the right one.

On the whole card two answers are known exactly: where all fits each byte moves once, and a cache of
one line keeps nothing. In between, cards of the same build but an eighth of the multiprocessors and
a few sets are held to a cache written plainly in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from analysis.algorithms import ALGORITHMS, Family
from analysis.hardware import GPUS, Gpu
from analysis.hbm import compulsory_hbm, predict_hbm
from analysis.l2 import L2, Launch, Pace, available, simulate
from analysis.l2.kernels import KERNELS, launch_of
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import Traffic, predict_traffic
from repro.prediction import predict
from tests.support.l2_support import plainly

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler here")
TILE = Tile(16, 32)


HEADS = AttentionShape(1, 4, 96, 96, 64)


@dataclass(frozen=True)
class Sharing:
    """Who reads what: an algorithm's pass on a small shape."""

    algorithm: str
    pass_: str = "forward"
    shape: AttentionShape = HEADS
    options: dict[str, Any] = field(default_factory=dict)
    order: str = "rows"

    @property
    def traffic(self) -> Traffic:
        return predict_traffic(self.algorithm, self.shape, TILE, self.pass_, **self.options)

    def launches(self, wave: int) -> dict[str, Launch]:
        """Of the kernels that walk."""
        options = {n: v for n, v in self.options.items() if n in ("block_mask", "mask_block")}
        options |= {"order": self.order, "form": ALGORITHMS[self.algorithm].form}
        return {
            kernel: launch_of(kernel, tuple(entries), self.shape, TILE, wave=wave, **options)
            for kernel, entries in self.traffic.kernels.items()
            if kernel in KERNELS
        }


BATCH = AttentionShape(3, 2, 96, 96, 64)
GROUPS = AttentionShape(1, 4, 96, 96, 64, kv_heads=2)
CAUSAL = AttentionShape(1, 4, 96, 96, 64, causal=True)
WINDOW = AttentionShape(1, 4, 96, 128, 64, kv_heads=2, window=(20, 9), sinks=3)
BLOCKS = {"block_mask": np.random.default_rng(1).random((1, 4, 6, 3)) < 0.6, "mask_block": TILE}
SHARINGS = {
    "a head's blocks": Sharing("flash"),
    "a batch": Sharing("flash", shape=BATCH),
    "heads of a group": Sharing("flash", shape=GROUPS),
    "causal": Sharing("flash", shape=CAUSAL),
    "window": Sharing("flash", shape=WINDOW),
    "window, sawtooth": Sharing("flash", shape=WINDOW, order="sawtooth"),
    "block-sparse": Sharing("flash", options=BLOCKS),
    "sawtooth": Sharing("flash", order="sawtooth"),
    "Hopper": Sharing("flash-sm90", shape=GROUPS),
    "Hopper backward": Sharing("flash-sm90", "backward", GROUPS),
    "Hopper backward in turns": Sharing("flash-sm90-deterministic", "backward", CAUSAL),
    "nobody (2022)": Sharing("flash1-released"),
    "nobody (2022), causal": Sharing("flash1-skip-first", shape=CAUSAL),
    "nobody (2022), backward": Sharing("flash1-literal", "backward"),
    "nobody (2022), backward as released": Sharing("flash1-released", "backward", CAUSAL),
    "backward": Sharing("flash", "backward"),
    "backward of groups": Sharing("flash", "backward", GROUPS, order="sawtooth"),
    "backward, block-sparse": Sharing("flash", "backward", options=BLOCKS),
    "backward, partial sums": Sharing("flash-deterministic", "backward", CAUSAL),
    "backward, window": Sharing("flash", "backward", WINDOW),
    "backward, window, split": Sharing("flash-split", "backward", WINDOW, order="sawtooth"),
    "backward, split": Sharing("flash-split", "backward", GROUPS),
}
#: As the bytes of a batch or a card decide, so do these two alone.
BUILDS = {(gpu.sms, gpu.l2_partitions): gpu for gpu in GPUS.values()}


def moved(traffic: Traffic, kernel: str, *ways: str) -> dict[str, int]:
    """Bytes across the SM boundary by tensor; those of masks and turns are not walked."""
    entries = traffic.kernels[kernel].items()
    found: dict[str, int] = {}
    for (tensor, way), count in entries:
        if way in ways and tensor not in ("block_mask", "turns"):
            found[tensor] = found.get(tensor, 0) + count
    return found


def test_the_cards_of_the_issue_and_newer_ones_are_there() -> None:
    wanted = (
        "A100-SXM4-40GB",
        "A100-SXM4-80GB",
        "H100-SXM5-80GB",
        "H200",
        "GeForce RTX 3090",
        "T4",
        "GeForce RTX 4090",
        "B200",
        "GB10",
    )
    assert set(wanted) <= set(GPUS)
    assert {gpu.l2_partitions for gpu in BUILDS.values()} == {1, 2}


@pytest.mark.parametrize("name", SHARINGS)
def test_where_all_fits_each_byte_moves_once_on_every_card(name: str) -> None:
    """Atomic sums and the running state of 2022 come in and go out once."""
    sharing = SHARINGS[name]
    for gpu in BUILDS.values():
        for kernel, launch in sharing.launches(gpu.sms).items():
            l2 = L2.of(gpu)
            found = simulate(launch, l2, gpu.sms, sampled_sets=l2.sets)
            read = moved(sharing.traffic, kernel, "read", "atomic")
            sent = moved(sharing.traffic, kernel, "write", "atomic")
            for tensor, count in found.items():
                # What the kernel has written itself it finds in L2.
                own = "atomic" not in {w for t, w in sharing.traffic.kernels[kernel] if t == tensor}
                fetched = 0 if own and {tensor} <= read.keys() & sent.keys() else count.touched
                assert count.fetched in ((fetched, count.touched) if tensor in read else (0,))
                assert count.written == 0, (gpu.name, tensor)
                assert count.left == (count.touched if tensor in sent else 0), (gpu.name, tensor)
                assert count.touched <= launch.sizes[tensor]


@pytest.mark.parametrize("name", SHARINGS)
def test_a_cache_of_one_line_keeps_nothing_on_every_card(name: str) -> None:
    """What crosses the SM boundary crosses to HBM, tensor by tensor, however many SMs there are."""
    sharing = SHARINGS[name]
    for sms in {gpu.sms for gpu in BUILDS.values()}:
        for kernel, launch in sharing.launches(sms).items():
            found = simulate(launch, L2(1, 1, 1), sms, sampled_sets=1, burst=1)
            read = moved(sharing.traffic, kernel, "read", "atomic")
            sent = moved(sharing.traffic, kernel, "write", "atomic")
            assert {t: c.fetched for t, c in found.items() if c.fetched} == read
            assert {t: c.written + c.left for t, c in found.items() if c.written + c.left} == sent


@pytest.mark.parametrize("name", SHARINGS)
def test_in_between_it_is_the_plain_cache_on_every_card(name: str) -> None:
    """Sets for a third of K and V or so, and an eighth of the multiprocessors: several waves."""
    sharing = SHARINGS[name]
    smaller = {(-(-sms // 16), partitions) for sms, partitions in BUILDS}
    for sms, partitions in sorted(smaller)[:: 1 if sharing.pass_ == "forward" else 3]:
        for launch in sharing.launches(sms).values():
            l2 = L2(partitions, 2 * partitions)
            found = simulate(launch, l2, sms, sampled_sets=l2.sets, burst=1)
            assert found == plainly(launch, l2, sms, 1, Pace())


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_every_algorithm_has_an_answer_or_a_reason_on_every_card(gpu: Gpu) -> None:
    """Bytes between each tensor once and the SM boundary, or an error that names the card."""
    shape = AttentionShape(2, 4, 2048, 2048, 64, kv_heads=4, dtype="fp16")
    for algorithm, what in ALGORITHMS.items():
        for pass_ in ("forward", "backward"):
            if what.family is Family.HOPPER and gpu.compute_capability != (9, 0):
                with pytest.raises(ValueError, match=f"needs compute capability 9.0, {gpu.name}"):
                    predict(algorithm, shape, pass_, gpu)
                continue
            if what.optimistic:
                continue  # bf16 alone, and the bytes of the exact form
            found = predict(algorithm, shape, pass_, gpu)
            entries = [e for kernel in found.traffic.kernels.values() for e in kernel.items()]
            asked = sum(count for (_, way), count in entries if way != "write")
            assert found.compulsory.read_bytes <= found.hbm.read_bytes <= asked
            assert found.theory is None or gpu.name in found.theory or "need" in found.theory


def test_the_cards_tell_apart_who_shares() -> None:
    """64 heads of 4096 rows: what blocks of a head share comes about once on every card with room
    for it, and what one block of 2022 walks alone again and again where 64 heads do not fit."""
    shape = AttentionShape(4, 16, 4096, 4096, 64)
    tile = Tile(64, 64)
    for gpu in (GPUS[n] for n in ("A100-SXM4-40GB", "H200", "GeForce RTX 3090", "T4", "GB10")):
        shared, alone = (
            predict_hbm(name, shape, tile, "forward", gpu).read_bytes
            / compulsory_hbm(predict_traffic(name, shape, tile, "forward"), shape).read_bytes
            for name in ("flash", "flash1-skip-first")
        )
        assert shared < 1.3, gpu.name
        # 2 x 64 columns and two statistics a row in fp16, of as many heads as there are blocks.
        resident = min(64, gpu.sms) * 4096 * 264
        assert (alone > 1.5) == (resident > L2.of(gpu).shared_bytes * gpu.l2_partitions), gpu.name
