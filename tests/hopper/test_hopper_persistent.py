"""The persistent Hopper forward: blocks that take several query tiles, bit for bit as without.

The host has two multiprocessors, so every launch here has two blocks at most and blocks go on from
tile to tile; with one OS thread the first block takes all tiles but one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from flash_support import Problem, check, to_bits, to_float
from hopper_runs import Values, changed_source, launch

from analysis.traffic import Traffic, predict_traffic
from kernels import hopper
from kernels.hopper_forms import FORWARD_FORMS, ForwardForm, forward_form
from kernels.host import HostBackend, KernelError
from kernels.launch import Kernel

PERSISTENT = tuple(form for form in FORWARD_FORMS if form.persistent)
FORMS = pytest.mark.parametrize("form", PERSISTENT, ids=lambda form: form.name)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])


def one_tile(form: ForwardForm) -> ForwardForm:
    return ForwardForm(form.head_dim, form.consumers, form.block_n)


def same(got: Values, want: Values) -> None:
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


@CAUSAL
@FORMS
def test_bits_are_those_of_one_block_a_tile(form: ForwardForm, causal: bool) -> None:
    """Tiles of one and of several key tiles, ragged and empty ones, in random orders of threads."""
    for seed, (seqlen_q, seqlen_k) in enumerate([(300, 500), (70, 90), (500, 130), (193, 256)]):
        p = Problem(
            batch=2,
            heads=2,
            kv_heads=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=form.head_dim,
            dtype="bf16",
            causal=causal,
            seed=seed,
        )
        got = launch(p, form, backend=HostBackend(seed=seed or None))
        check(p, got)
        same(got, launch(p, one_tile(form)))


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 100])
def test_any_number_of_blocks_moves_the_same_bytes(multiprocessors: int) -> None:
    form = PERSISTENT[0]
    p = Problem(heads=3, seqlen_q=400, seqlen_k=200, dtype="bf16", causal=True)
    want = predict_traffic("flash-sm90", p.shape, form.tile, "forward", persistent=True)
    assert want.kernels["flash_forward_sm90_persistent"]["tile_counter", "atomic"] == 9 * 4
    for os_threads in (1, 2):
        backend = HostBackend(os_threads=os_threads, seed=os_threads)
        backend.multiprocessors = multiprocessors
        check(p, launch(p, form, backend=backend))
        assert Traffic(backend.traffic).kernels == want.kernels


def test_every_launch_begins_with_the_first_tile() -> None:
    backend = HostBackend(os_threads=1)
    for seed in range(3):
        p = Problem(heads=2, seqlen_q=300, seqlen_k=150, dtype="bf16", seed=seed)
        check(p, launch(p, PERSISTENT[0], backend=backend))


def test_a_tile_without_keys_brings_nothing_into_its_row() -> None:
    """Values that are not finite, which nobody but the last rows sees, leave its zeros alone."""
    p = Problem(seqlen_q=500, seqlen_k=100, head_dim=128, dtype="bf16", causal=True)
    p.data["v"][...] = np.inf
    form = PERSISTENT[1]
    got = launch(p, form, backend=HostBackend(seed=1))
    assert not got["out"][:, :, : form.tile.block_m].any()
    assert (got["lse"][:, :, :400] == -np.inf).all()


@pytest.mark.thorough
@CAUSAL
@FORMS
def test_the_optimistic_softmax_comes_in_this_form_too(form: ForwardForm, causal: bool) -> None:
    """Scores that rise by 120 nats towards the first keys: flagged and done again."""
    p = Problem(heads=2, seqlen_q=300, seqlen_k=500, head_dim=form.head_dim, dtype="bf16", causal=causal)
    assert p.scale is not None
    p.data["q"][:, :1, :, 0] = 8  # of one head
    p.data["k"][:, :1, :, 0] = np.linspace(120, 0, 500) / (8 * p.scale)
    for name in ("q", "k"):
        p.data[name] = to_float(to_bits(p.data[name], "bf16"), "bf16")
    exact = launch(p, form)
    backends = [HostBackend(seed=1), HostBackend(seed=2)]
    got, again = (
        launch(p, f, backend=b, optimistic=True) for f, b in zip((form, one_tile(form)), backends, strict=True)
    )
    same(got, again)
    for name in exact:
        np.testing.assert_array_equal(got[name][:, 0], exact[name][:, 0])
    first, second = (Traffic(backend.traffic).kernels for backend in backends)
    repair = "flash_forward_sm90_repair"
    assert first[repair] == second[repair]
    assert first[repair]["q", "read"] > 0
    want = predict_traffic(hopper.OPTIMISTIC, p.shape, form.tile, "forward", persistent=True).kernels
    for name in ("flash_forward_sm90_clear_counter", "flash_forward_sm90_persistent_optimistic"):
        assert first[name] == want[name]


def test_the_rule() -> None:
    """Blocks that stay up to 4096 queries, where the form has them."""
    for head_dim, causal, seqlen_q, consumers, block_n in (
        (256, False, 1, 2, 80),
        (64, True, 4096, 3, 128),
        (64, False, 8192, 3, 128),
        (128, False, 512, 2, 128),
        (128, True, 4096, 2, 128),
        (128, False, 8192, 2, 176),
        (128, True, 8192, 2, 128),
    ):
        stays = seqlen_q <= 4096 and head_dim < 256
        form = ForwardForm(head_dim, consumers, block_n, persistent=stays, pingpong=head_dim < 256)
        assert forward_form(head_dim, causal, seqlen_q) == form
        assert form in FORWARD_FORMS


def test_one_block_a_tile_has_no_counter() -> None:
    with pytest.raises(ValueError, match="d64 192x128 has no counter"):
        ForwardForm(64, 3, 128).kernel("bf16", False, "clear_counter")


# ---- mistakes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(ForwardForm):
    """The form with pieces of its source replaced."""

    changes: tuple[tuple[str, str], ...] = ()

    def kernel(self, dtype: str, causal: bool, part: str = "", **options: bool) -> Kernel:
        return changed_source(super().kernel(dtype, causal, part, **options), *self.changes)


RELEASE_OF_Q = "release(&barriers->q_empty[tile_iter % 2]);"
TAKEN = "return Taken{same(&from->number)};"
FAULTS = {
    "no release of Q": ("deadlock", "mbarrier_wait", (RELEASE_OF_Q, "")),
    "no word of the end": (
        "deadlock",
        "mbarrier_wait",
        ("                mbarrier_arrive(&barriers->q_full[buffer]);\n", ""),
    ),
    "no release of V between tiles": (
        "deadlock",
        "mbarrier_wait",
        ("        release(&barriers->v_empty[before.stage]);\n        round", "        round"),
    ),
    "Q overwritten before its readers are done": (
        "race",
        "",
        (RELEASE_OF_Q, ""),
        (TAKEN, f"const Taken whose = {TAKEN[7:]} {RELEASE_OF_Q} return whose;"),
    ),
    # The race, or before it phases that nobody saw.
    "a Q buffer not waited for": (
        "race, deadlock",
        "",
        ("mbarrier_wait(&barriers->q_empty[buffer], tile_iter / 2 % 2 ^ 1);", ""),
    ),
    "a turn that one warpgroup skips": (
        "deadlock",
        "named barrier",
        ("\n        warp_scheduler_arrive(warpgroup);", "if (warpgroup != 2) warp_scheduler_arrive(warpgroup);"),
    ),
    "a turn that nobody opens": ("deadlock", "named barrier", ("    warp_scheduler_open(warpgroup);\n", "")),
    "O overwritten before it is stored": ("race", "still had to read", ("bulk_wait_read<0>();", ";")),
    "left before the store": (
        "race",
        "exits before its bulk store",
        ("    if (threadIdx.x % WARPGROUP == 0) bulk_wait<0>();\n}", "}"),
    ),
    "one thread ahead of its warp at a named barrier": (
        "divergence",
        "named barrier .*warp_sync is missing",
        ("warp_sync();  // a named barrier wants", "// it wants"),
    ),
    "one thread ahead of its warp at a product": (
        "divergence",
        "warp_sync is missing",
        ("            bulk_commit();\n        }\n        warp_sync();\n", "            bulk_commit();\n        }\n"),
    ),
    "O in a Q buffer that is in use": (
        "race",
        "",
        (
            "shared + OUT_AT + (warpgroup - 1) * Q_BYTES;",
            "shared + (number % 2 * CONSUMERS + warpgroup - 1) * Q_BYTES;",
        ),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    kind, message, *changes = FAULTS[name]
    # One key tile each: with more, the rings of K and V would hold the producer back too.
    p = Problem(heads=8, seqlen_q=190, seqlen_k=100, dtype="bf16")
    for seed in (None, 1, 2, 3):
        backend = HostBackend(seed=seed, os_threads=1)
        with pytest.raises(KernelError) as caught:
            launch(p, Broken(64, 3, 128, True, True, changes=tuple(changes)), backend=backend)
        assert caught.value.kind in kind.split(", "), (seed, str(caught.value))
        assert re.search(message, str(caught.value))
