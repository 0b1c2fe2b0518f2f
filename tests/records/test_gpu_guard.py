"""The guard of the Hopper kernels: what it tries, and what a failure costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.shapes import AttentionShape
from kernels import dispatch, hopper
from kernels.hopper import ForwardForm
from kernels.launching.plan import Recorder
from repro.instruments import gpu_work, guard_lines, hopper_cases, hopper_guard
from repro.instruments.hopper_guard import Findings, Limits, check, shared
from tests.support.command_support import ROOT, SUPPORT
from tests.support.process_support import reports_its_id, wait_until_gone

SMS = 132
PERSISTENT = [name for name, form in hopper.FORMS.items() if getattr(form, "persistent", False)]
CHILD = """
import sys, time
print("noise on the same pipe", flush=True)
print("ready", flush=True)
for name in sys.argv[1:]:
    if name.startswith("compiles"):
        time.sleep(60)
    print("built\\t" + name, flush=True)
    if name.startswith("hangs"):
        time.sleep(60)
    if name.startswith("long"):
        sys.stderr.write("a warning\\n" * 50_000)  # more than a pipe holds
    if name.startswith("dies"):
        raise SystemExit("noise\\n" + name + ": an illegal address")
    if name.startswith("wrong"):
        print("wrong\\t" + name + "\\tdq is off by 3", flush=True)
    else:
        print("tried\\t" + name, flush=True)
"""
COMMAND = (sys.executable, "-c", CHILD)
LIMITS = Limits(start_s=20, build_s=1, run_s=1)


@pytest.mark.parametrize("name", guard_lines.NAMES)
def test_every_launch_fills_the_card_several_times(name: str) -> None:
    """Blocks that stay take several tiles, others come in several waves, the last one not full."""
    device = Recorder()
    device.multiprocessors = SMS
    waves, causal, grouped, ragged = [], set(), False, False
    for case in hopper_cases.cases(name, SMS):
        shape = case.shape
        for kernel, blocks, tiles in launches(name, shape, device):
            stays = "persistent" in kernel and "clear_counter" not in kernel
            waves.append((tiles if stays else blocks) / SMS)
            assert not stays or blocks <= SMS
            if waves[-1] > 2:
                causal.add(shape.causal)
                grouped |= shape.kv_heads < shape.heads
                ragged |= bool(shape.seqlen_q % 64) and shape.seqlen_k > shape.seqlen_q
    assert max(waves) > 2
    assert any(wave % 1 for wave in waves if wave > 2)
    assert causal == {False, True}
    assert grouped
    assert ragged
    if name in PERSISTENT:
        assert sum(wave > 2 for wave in waves) >= 4


def launches(name: str, shape: AttentionShape, device: Recorder) -> list[tuple[str, int, int]]:
    """(entry, blocks, query tiles) of what an implementation launches."""
    device.launches.clear()
    gpu_work.record_launches(device, name, shape)
    form = hopper.FORMS.get(name)
    if not isinstance(form, ForwardForm):
        form = hopper.forward_form(shape.head_dim, shape.causal, shape.seqlen_q)
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // form.tile.block_m)
    return [(launch.kernel.entry, launch.grid[0], tiles) for launch in device.launches]


def test_a_failure_costs_one_implementation_and_never_another() -> None:
    names = ("a", "hangs", "hangs 2", "b, form", "dies", "wrong", "compiles", "hangs 3", "c")
    found = check(names, COMMAND, LIMITS)
    assert found.right == ["a", "b, form", "c"]
    assert found.refused == {
        "hangs": "did not finish within 1 s",
        "hangs 2": "did not finish within 1 s",
        "dies": "dies: an illegal address",
        "wrong": "dq is off by 3",
        "compiles": "did not compile within 1 s",
        "hangs 3": "did not finish within 1 s",
    }
    assert check(("long", "b"), COMMAND, LIMITS).right == ["long", "b"]
    assert found.reason("never asked") is not None


def test_an_end_that_hangs_takes_nothing_from_what_was_tried() -> None:
    silent = "import os, time; print('ready\\nbuilt\\ta\\ntried\\ta', flush=True); os.close(1);time.sleep(60)"
    found = check(("a",), (*COMMAND[:2], silent), LIMITS)
    assert (found.right, found.refused) == (["a"], {})
    found = check(("a", "b"), (*COMMAND[:2], silent), LIMITS)
    assert list(found.refused) == ["b"]


def test_a_slow_first_start_is_no_hang() -> None:
    """The limits of an implementation count from when CUDA has started and it is compiled."""
    slow = "import time; time.sleep(2)\n" + CHILD
    assert check(("a", "b"), (*COMMAND[:2], slow), LIMITS).right == ["a", "b"]


def test_a_card_that_does_not_answer_any_more_is_not_asked_for_ever() -> None:
    never = (sys.executable, "-c", "import time; time.sleep(60)")
    found = check(("a", "b", "c"), never, Limits(start_s=1, build_s=1, run_s=1))
    assert found.refused == dict.fromkeys("abc", "did not start within 1 s")


def test_the_time_for_all_of_them_is_kept() -> None:
    found = check(("a", "hangs", "b"), COMMAND, Limits(20, 20, 60), within_s=2)
    assert found.right == ["a"]
    assert found.refused["hangs"] == found.refused["b"]
    assert "was over" in found.refused["b"]


def test_what_one_process_has_found_holds_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "checked.json"
    assert shared(path, ("a", "wrong"), COMMAND).refused == {"wrong": "dq is off by 3"}
    never = (sys.executable, "-c", "raise SystemExit('asked again')")
    assert shared(path, ("a", "wrong"), never).reason("a") is None
    path.write_text('{"right": 3')
    with pytest.raises(ValueError, match=r"checked\.json"):
        shared(path)


def test_nothing_of_a_hung_process_is_left(tmp_path: Path) -> None:
    """Its own children hold the card as it does."""
    ready = tmp_path / "ready"
    child = (
        "import os, subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {reports_its_id(ready)!r}])\n"
        f"while not os.path.exists({str(ready)!r}): time.sleep(0.05)\n"
        "print('ready\\nbuilt\\ta', flush=True); time.sleep(60)"
    )
    check(("a",), (*COMMAND[:2], child), Limits(20, 1, 1))
    wait_until_gone(int(ready.read_text()))


@pytest.mark.thorough
def test_on_the_stand_in_card_a_hang_of_the_persistent_loop_is_met_by_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real cases on the host backend; a fault shows where a block takes several tiles."""
    first, last = PERSISTENT[0], PERSISTENT[-1]
    plain = next(name for name, form in hopper.FORMS.items() if isinstance(form, ForwardForm) and not form.persistent)
    monkeypatch.setenv("FAULTS", json.dumps({first: "hangs", plain: "hangs", last: "wrong"}))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = (sys.executable, str(SUPPORT / "guard_rehearsal.py"))
    found = check((first, plain, last), command, Limits(120, 120, 15))
    assert found.right == [plain]
    assert found.refused.pop(first) == "did not finish within 15 s"
    assert list(found.refused) == [last]
    assert "out is off by" in found.refused[last]


def test_dispatch_leaves_out_what_a_run_refuses(tmp_path: Path) -> None:
    form = dispatch.form_name(128, "forward", 1024)
    path = tmp_path / "checked.json"
    Findings(["flash-sm90"], {form: "0.83 x of the sm_80 kernels"}).write(path)
    code = (
        "from kernels import dispatch; from kernels.launch import Array\n"
        "class Card: compute_capability, multiprocessors, name = '90', 132, 'card'\n"
        "def choose(n, d): \n"
        "    q = Array('q', 1 << 20, (1, 2, n, d), (2 * n * d, n * d, d, 1), 'bf16', 'r')\n"
        "    c = dispatch.choose(Card(), [q], scale=0.1); return c.algorithm + ': ' + c.reason\n"
        "print(choose(1024, 128)); print(choose(16384, 128)); print(choose(1024, 64))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, dispatch.CHECKED_VARIABLE: str(path)},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"flash: {form} is left out: 0.83 x of the sm_80 kernels"
    assert [line.split(":")[0] for line in lines[1:]] == ["flash-sm90", "flash-sm90"]


def test_refusals_are_reported_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    hopper_guard.report({})
    with pytest.raises(RuntimeError, match="1 of"):
        hopper_guard.report({"x": "hangs"})
    assert "x: hangs" in capsys.readouterr().err
