"""Plans for models that their own forward calls: which blocks to recompute."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repro.checkpointing import InfeasibleBudgetError, blocks_of, peak_bytes, plan_blocks
from tests.support.command_support import run

WIDTH, VOCABULARY = 64, 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, scale: Tensor, flag: bool = True) -> tuple[Tensor, None]:
        y = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + nn.functional.dropout(y, 0.1, self.training) * scale, None


class LanguageModel(nn.Module):
    """Shaped as Hugging Face's: embedding, `model.layers`, norm, a head tied to the embedding."""

    def __init__(self, layers: int = 6, tied: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        hidden = self.model.embed(ids)
        scale = torch.full((1,), 0.5)
        for layer in self.model.layers:
            hidden, _ = layer(hidden, scale=scale, flag=True)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (ids if labels is None else labels).flatten())
        return {"loss": loss, "logits": logits}


def case() -> tuple[LanguageModel, Tensor]:
    torch.manual_seed(0)
    return LanguageModel(), torch.randint(VOCABULARY, (8, 64))


def step_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Measured peak of a step, the input included."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        result = model(*args, **kwargs)
        result["loss"].backward()

    return peak_bytes(step) + sum(t.nbytes for t in args)


def test_budgets_are_kept_and_predicted() -> None:
    model, ids = case()
    whole = plan_blocks(model, ids, budget_bytes=2**40, repeats=0)
    assert whole.recompute == ()
    assert str(whole).startswith("fits without recomputation")
    everything = whole.predicted_peak_bytes
    counts = []
    for share in (1.0, 0.8, 0.6, 0.5):
        budget = round(share * everything)
        found = plan_blocks(model, (ids,), budget_bytes=budget, repeats=0)
        with found.applied(model):
            measured = step_bytes(model, ids)
        assert "forward" not in model.model.layers[0].__dict__
        assert found.predicted_peak_bytes <= budget
        tied = model.head.weight.nbytes  # an upper bound: its two gradients need not meet the peak
        assert measured <= 1.01 * found.predicted_peak_bytes
        assert measured >= 0.99 * found.predicted_peak_bytes - tied
        assert found.recompute == tuple(f"model.layers.{i}" for i in range(len(found.recompute)))
        counts.append(len(found.recompute))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] > counts[1] > 0


def test_the_peak_may_be_in_a_block() -> None:
    """Results of half a MiB, and a vocabulary so small that the logits are none."""
    torch.manual_seed(0)
    model, ids = LanguageModel(tied=False), torch.randint(VOCABULARY, (4, 512))
    model.head = nn.Linear(WIDTH, 8, bias=False)
    labels = ids % 8
    whole = plan_blocks(model, ids, {"labels": labels}, budget_bytes=2**40, repeats=0)
    budget = whole.predicted_peak_bytes // 2
    for found in (whole, plan_blocks(model, ids, {"labels": labels}, budget_bytes=budget, repeats=0)):
        with found.applied(model):
            measured = step_bytes(model, ids, labels)
        assert measured == pytest.approx(found.predicted_peak_bytes, rel=0.02)


def test_gradients_are_the_models_and_the_model_is_left_alone() -> None:
    model, ids = case()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    whole = plan_blocks(model, ids, budget_bytes=2**40, repeats=1)
    found = plan_blocks(model, ids, budget_bytes=whole.predicted_peak_bytes // 2, repeats=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.head.weight is model.model.embed.weight

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(ids)["loss"].backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with found.applied(model):
        again = gradients()
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    exec(found.code(), {"model": model})
    wrapped = [name for name, m in model.named_modules() if "Checkpoint" in type(m).__name__]
    assert wrapped == list(found.recompute)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_a_budget_of_everything() -> None:
    model, ids = case()
    weights = 16 * sum(p.numel() for p in model.parameters())
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_blocks(model, ids, total_budget_bytes=weights, repeats=0)
    least = error.value.smallest_budget_bytes
    assert plan_blocks(model, ids, total_budget_bytes=least, repeats=0).recompute
    with pytest.raises(InfeasibleBudgetError, match=f"smallest feasible budget is {least} "):
        plan_blocks(model, ids, total_budget_bytes=least - 1, repeats=0)
    half = plan_blocks(model, ids, budget_bytes=2**40, repeats=0).predicted_peak_bytes // 2
    one = plan_blocks(model, ids, budget_bytes=half, repeats=0)
    all_in = plan_blocks(model, ids, total_budget_bytes=half + weights, repeats=0)
    assert all_in.recompute == one.recompute
    assert all_in.resident_bytes == weights


def test_bad_requests_are_named() -> None:
    model, ids = case()
    with pytest.raises(ValueError, match="budget_bytes=None and total_budget_bytes=None"):
        plan_blocks(model, ids)
    with pytest.raises(ValueError, match="total_budget_bytes=nan"):
        plan_blocks(model, ids, total_budget_bytes=float("nan"))
    with pytest.raises(ValueError, match="repeats=-1"):
        plan_blocks(model, ids, budget_bytes=1, repeats=-1)
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module"):
        plan_blocks(len, ids, budget_bytes=1)
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_blocks(model, ids, budget_bytes=1000, repeats=0)
    least = error.value.smallest_budget_bytes
    assert len(plan_blocks(model, ids, budget_bytes=least, repeats=0).recompute) >= 5
    with pytest.raises(ValueError, match="has no list of two or more like blocks"):
        plan_blocks(nn.Bilinear(3, 3, 3), ids, budget_bytes=1)
    assert list(blocks_of(model)) == [f"model.layers.{i}" for i in range(6)]
    for names in (["model.layers.1", "model.layers.0"], ["model.layers.0", "model.layers.2"]):
        assert plan_blocks(model, ids, budget_bytes=2**40, blocks=names, repeats=0).keep == tuple(names)
    model.model.unused = Block()
    with pytest.raises(ValueError, match=r"does not call model\.unused"):
        plan_blocks(model, ids, budget_bytes=2**40, blocks=["model.layers.1", "model.unused"], repeats=0)

    with pytest.raises(ValueError, match=r"model\.layers\.1\.up is a part of block model\.layers\.1"):
        plan_blocks(model, ids, budget_bytes=2**40, blocks=["model.layers.1", "model.layers.1.up"], repeats=0)

    class DynamicCache:
        pass

    class Cached(LanguageModel):
        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.model.embed(ids)
            for layer in self.model.layers:
                hidden, _ = layer(hidden, scale=torch.ones(1), flag=DynamicCache())
            return hidden

    with pytest.raises(ValueError, match="use_cache=False"):
        plan_blocks(Cached(), ids, budget_bytes=2**40, repeats=0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    status, out, _ = run(capsys, "plan", "my_models:case", "--budget", "1GiB", "--repeats", "0")
    assert status == 0
    assert out.startswith("fits without recomputation")
    status, out, _ = run(capsys, "plan", "my_models:case", "--budget", "4MiB", "--repeats", "0")
    assert status == 0
    assert out.startswith("recompute ")
    assert "apply_activation_checkpointing(model" in out
    assert "(--budget 4MiB, of activations)" in out
    status, _, err = run(capsys, *["plan", "my_models:case", "--total-budget", "10kB"])
    assert status
    assert "smallest feasible budget" in err
    status, _, err = run(capsys, *["plan", "my_models:case"])
    assert status
    assert "--budget and --total-budget" in err
