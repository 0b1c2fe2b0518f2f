"""Shapes, planners, chains and the command line refuse by name what is of another kind or impossible,
before any work; numbers are taken from whichever library they come. (Of the operator's arguments:
``tests/conformance/test_arguments.py``.)"""

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
from repro.prediction import predict
from tests.support.command_support import run

NAN, INF = math.nan, math.inf


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


def test_the_operator_takes_numbers_of_any_library() -> None:
    tensors = [torch.ones(1, 1, 16, 8)] * 3
    plain = repro.flash_attention(*tensors, tile=(16, 16), scale=0.5, causal=True)
    for tile, scale, causal in (((np.int64(16), 16), np.float32(0.5), np.True_), ([16, 16], np.float64(0.5), True)):
        same = repro.flash_attention(*tensors, tile=tile, scale=scale, causal=causal)
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
