"""Every argument of another kind or with an impossible value is refused by name, before any work;
numbers are taken from whichever library they come."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import repro
from analysis.checkpointing import Chain, Stage, chen_recursive, every, greedy, optimal, revolve, selective, uniform
from analysis.hardware import H200
from analysis.shapes import AttentionShape, Tile
from kernels.host import HostBackend
from repro.attention import engine
from repro.prediction import predict
from tests.support.command_support import run

NAN, INF = math.nan, math.inf


def operands(**changes: Any) -> dict[str, Any]:
    made = {name: torch.ones(1, 1, 16, 8) for name in ("q", "k", "v")}
    return made | changes


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal comes before any work: the host backend launches nothing."""
    engine.forget()

    def launch(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(HostBackend, "launch", launch)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"scale": 1e300}, ValueError, r"scale=1e\+300 is above 2\.359e\+38"),
        ({"scale": -1e39}, ValueError, r"scale=-1e\+39 is above"),
        ({"scale": NAN}, ValueError, "scale=nan is not finite"),
        ({"scale": "1"}, TypeError, "scale='1' is a str"),
        ({"scale": True}, TypeError, "scale=True is a bool"),
        ({"scale": 1j}, TypeError, "scale=1j is a complex"),
        ({"dropout_p": None}, TypeError, "dropout_p=None is a NoneType"),
        ({"dropout_p": "0.5"}, TypeError, "dropout_p='0.5' is a str"),
        ({"dropout_p": NAN}, ValueError, r"dropout_p must lie in \[0, 1\], got nan"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p must lie in \[0, 1\], got -0.1"),
        ({"tile": 16}, TypeError, "two whole numbers, got 16"),
        ({"tile": "64"}, TypeError, "two whole numbers, got '64'"),
        ({"tile": (16,)}, TypeError, r"two whole numbers, got \(16,\)"),
        ({"tile": (16.0, 16)}, TypeError, r"tile block_m=16.0 is a float"),
        ({"tile": (16, True)}, TypeError, "tile block_n=True is a bool"),
        ({"tile": (16, 0)}, ValueError, "tile block_n=0 is below 1"),
        ({"tile": (16, -16)}, ValueError, "tile block_n=-16 is below 1"),
        ({"tile": (13, 16)}, ValueError, "block_m=13 is not a multiple of 16"),
        ({"causal": "no"}, TypeError, "causal='no' is a str, not True or False"),
        ({"causal": None}, TypeError, "causal=None is a NoneType"),
        ({"deterministic": 2}, TypeError, "deterministic=2 is a int"),
        ({"order": "up"}, ValueError, "order must be one of rows, sawtooth, got 'up'"),
        ({"order": None}, TypeError, "order must be a string, got NoneType"),
        ({"seed": 1.5, "dropout_p": 0.5}, TypeError, "seed=1.5 is a float"),
        ({"seed": True, "dropout_p": 0.5}, TypeError, "seed=True is a bool"),
        ({"seed": -1, "dropout_p": 0.5}, ValueError, r"seed must lie in \[0, 2\*\*63\), got -1"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"q": torch.ones(1, 1, 16, 8).to_sparse()}, TypeError, "q is a tensor of layout"),
        ({"v": torch.nested.nested_tensor([torch.ones(2, 3)])}, TypeError, "v is a nested tensor"),
        ({"key_mask": torch.ones(1, 16)}, TypeError, "key_mask must be a boolean tensor"),
        ({"key_mask": True}, TypeError, "key_mask must be a boolean tensor"),
        ({"key_mask": torch.ones(1, 16, dtype=torch.bool).to_sparse()}, TypeError, "key_mask is"),
        ({"block_mask": torch.ones(1, 1, dtype=torch.bool)}, ValueError, "needs tile="),
    ],
)
def test_the_operator_refuses_by_name(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = operands(**options)
    tensors = [given.pop(name) for name in ("q", "k", "v")]
    with pytest.raises(kind, match=message):
        repro.flash_attention(*tensors, **given)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dropout_p": None}, TypeError),
        ({"dropout_p": 2}, ValueError),
        ({"tile": 16}, TypeError),
        ({"scale": INF}, ValueError),
        ({"causal": "no"}, TypeError),
        ({"order": "up"}, ValueError),
    ],
)
def test_the_module_refuses_where_it_is_made(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        repro.FlashAttention(**options)


@pytest.mark.parametrize("field", ["batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "kv_heads"])
def test_shapes_take_whole_numbers_of_any_library_and_nothing_else(field: str) -> None:
    fields: dict[str, Any] = {"batch": 2, "heads": 2, "seqlen_q": 2, "seqlen_k": 2, "head_dim": 2}
    taken = AttentionShape(**{**fields, field: np.int64(2)})
    assert taken == AttentionShape(**fields)
    assert type(getattr(taken, field)) is int
    for value, kind, message in (
        (0, ValueError, f"{field}=0 is below 1"),
        (-1, ValueError, f"{field}=-1 is below 1"),
        (2.0, TypeError, f"{field}=2.0 is a float, not a whole number"),
        ("2", TypeError, f"{field}='2' is a str"),
        (True, TypeError, f"{field}=True is a bool"),
        (np.True_, TypeError, f"{field}=.*bool"),
        (NAN, TypeError, f"{field}=nan is a float"),
    ):
        with pytest.raises(kind, match=message):
            AttentionShape(**{**fields, field: value})
    with pytest.raises(TypeError, match="block_n=None is a NoneType"):
        Tile(16, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="causal='none' is a str"):
        AttentionShape(**fields, causal="none")


def test_predict_takes_its_own_kinds_of_things() -> None:
    shape = AttentionShape(1, 1, 64, 64, 64)
    wrong: Any
    for wrong in ({"shape": (1, 1, 64, 64, 64)}, {"gpu": 200}, {"tile": (64, 64)}):
        given: dict[str, Any] = {"shape": shape, "gpu": H200, "tile": None, **wrong}
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}=.* is a "):
            predict("flash", given["shape"], "forward", given["gpu"], tile=given["tile"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-heads", "0"), "--kv-heads '0': 0 is below 1"),
        (("--seqlen-k", "0"), "--seqlen-k '0': 0 is below 1"),
        (("--heads", "0"), "--heads '0': 0 is below 1"),
        (("-n", "0"), "--seqlen '0': 0 is below 1"),
        (("-n", "-1"), "--seqlen '-1'"),
        (("--kv-heads", ""), "--kv-heads ''"),
        (("--gpu", ""), "--gpu ''"),
        (("-d", "nan"), "--head-dim 'nan'"),
        (("--tile", "0x64"), "block_m=0 is below 1"),
    ],
)
def test_zero_and_nothing_are_not_the_same_on_the_command_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "predict", *arguments)
    assert (status, out) == (1, "")
    assert message in err


def chain() -> Chain:
    stage = Stage(activation_bytes=4, saved_bytes=8, forward_s=1.0, backward_s=2.0, kind="attention")
    return Chain((stage,) * 4, input_bytes=4)


@pytest.mark.parametrize(
    ("planner", "value", "kind", "message"),
    [
        (optimal, NAN, ValueError, "budget_bytes=nan is not a whole number of bytes"),
        (optimal, INF, ValueError, "budget_bytes=inf"),
        (optimal, 10.5, ValueError, "budget_bytes=10.5"),
        (optimal, "1GB", TypeError, "budget_bytes='1GB' is a str"),
        (optimal, None, TypeError, "budget_bytes=None"),
        (optimal, -1, ValueError, "budget_bytes=-1 is below 0"),
        (greedy, NAN, ValueError, "budget_bytes=nan"),
        (greedy, True, TypeError, "budget_bytes=True is a bool"),
        (selective, "attention", TypeError, "kinds='attention' is a str, not a collection"),
        (selective, [1], TypeError, "kinds: 1 is a int"),
        (selective, None, TypeError, "kinds=None"),
        (uniform, 2.0, TypeError, "segments=2.0 is a float"),
        (every, NAN, TypeError, "stages=nan is a float"),
        (revolve, "3", TypeError, "states='3' is a str"),
        (chen_recursive, 1.5, TypeError, "k=1.5 is a float"),
    ],
)
def test_planners_refuse_by_name(planner: Any, value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        planner(chain(), value)


def test_planners_take_numbers_of_any_library() -> None:
    whole = optimal(chain(), 10**6)
    for budget in (np.int64(10**6), 1e6, np.float64(1e6)):
        assert optimal(chain(), budget).schedule == whole.schedule
    assert uniform(chain(), np.int32(2)).schedule == uniform(chain(), 2).schedule
    assert selective(chain(), ["attention"]).schedule == selective(chain()).schedule


def test_the_operator_takes_numbers_of_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    given = operands()
    plain = repro.flash_attention(*given.values(), tile=(16, 16), scale=0.5, causal=True)
    for tile, scale, causal in (((np.int64(16), 16), np.float32(0.5), np.True_), ([16, 16], np.float64(0.5), True)):
        same = repro.flash_attention(*given.values(), tile=tile, scale=scale, causal=causal)
        assert torch.equal(same, plain)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"budget_bytes": NAN}, ValueError, "budget_bytes=nan is not a whole number of bytes"),
        ({"budget_bytes": True}, TypeError, "budget_bytes=True is a bool"),
        ({"budget_bytes": 10**6, "repeats": -1}, ValueError, "repeats=-1 is below 0"),
        ({"budget_bytes": 10**6, "repeats": 0.5}, TypeError, "repeats=0.5 is a float"),
        ({"budget_bytes": 10**6, "sample": None}, TypeError, "sample=None"),
        ({"budget_bytes": 10**6, "sample": ()}, TypeError, r"sample=\(\)"),
        ({"budget_bytes": 10**6, "sample": torch.ones(2, 4).to_sparse()}, TypeError, "of layout"),
        ({"budget_bytes": 10**6, "sample": torch.ones(2, 4, device="meta")}, TypeError, "on meta"),
        ({"budget_bytes": 10**6, "verify": "yes"}, TypeError, "verify='yes' is a str"),
        ({"strategy": "selective", "kinds": "attention"}, TypeError, "kinds='attention' is a str"),
        ({"strategy": "uniform", "segments": 2.0}, TypeError, "segments=2.0 is a float"),
        ({"strategy": "uniform", "segments": 0}, ValueError, "segments=0 is below 1"),
        ({"strategy": "sqrt", "segments": 2}, TypeError, "'sqrt' has no option 'segments'"),
        ({"strategy": "uniform", "parts": 2}, TypeError, "it has segments, keep_last"),
        ({"strategy": 5}, ValueError, "strategy 5 is not one of"),
        ({"strategy": "revolve"}, ValueError, "strategy 'revolve' needs states, got None"),
        ({"strategy": "every"}, ValueError, "strategy 'every' needs stages, got None"),
        ({"strategy": "uniform", "keep_last": True}, ValueError, "'uniform' needs segments"),
        ({}, ValueError, "neither budget_bytes nor strategy"),
    ],
)
def test_plan_refuses_before_it_profiles(
    options: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *_: ran.append(1))
    given = {"sample": torch.ones(2, 4), **options}
    with pytest.raises(kind, match=message):
        repro.plan(model, given.pop("sample"), **given)
    assert not ran


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"activation_bytes": NAN}, ValueError, "activation_bytes is nan, not whole bytes"),
        ({"saved_bytes": 1.5}, ValueError, "saved_bytes is 1.5, not whole bytes"),
        ({"saved_bytes": -1}, ValueError, "saved_bytes is -1, below 0"),
        ({"activation_bytes": True}, TypeError, "activation_bytes is True, a bool"),
        ({"activation_bytes": "4"}, TypeError, "activation_bytes is '4', a str"),
        ({"activation_bytes": None}, TypeError, "activation_bytes is None, a NoneType"),
        ({"forward_s": NAN}, ValueError, "forward_s is nan"),
        ({"forward_s": "1"}, TypeError, "forward_s is '1', a str"),
        ({"backward_s": INF}, ValueError, "backward_s is inf"),
    ],
)
def test_a_stage_names_the_field(change: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        Stage(**{"activation_bytes": 4, **change})


@pytest.mark.parametrize(
    ("stages", "size", "kind", "message"),
    [
        ("ab", 4, TypeError, "'a' is a str, not a Stage"),
        ((), 4, ValueError, "at least 1 stage"),
        ((Stage(4),), NAN, ValueError, "input_bytes=nan is not a whole number of bytes"),
        ((Stage(4),), None, TypeError, "input_bytes=None is a NoneType"),
        ((Stage(4),), -1, ValueError, "input_bytes=-1"),
    ],
)
def test_a_chain_names_what_it_cannot_take(stages: Any, size: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        Chain(stages, input_bytes=size)
