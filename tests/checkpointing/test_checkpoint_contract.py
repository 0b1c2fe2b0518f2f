"""A planned model's graph is the plain model's in every respect."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.checkpointing import PlannedModel, plan, profile
from repro.training.live_bytes import LiveBytes

STRATEGIES = ("store-all", "recompute-all", "sqrt")
WIDTH = 16


def layers(count: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def planned(model: Any, x: Any, strategy: str = "recompute-all", **options: Any) -> PlannedModel:
    return plan(model, x, strategy=strategy, repeats=0, **options)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- written in place between forward and backward -------------------------------------------------


def write_input(model: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    x.zero_()
    return out


def write_weight(model: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        model[1][0].weight.zero_()
    return out


def write_result(model: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    out.detach().zero_()
    return out


def write_result_in_the_graph(model: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    return out.mul_(2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("write", [write_input, write_weight, write_result, write_result_in_the_graph])
def test_what_the_plain_model_refuses_is_refused(write: Callable, strategy: str) -> None:
    model, x = layers(), torch.ones(3, WIDTH)
    for run in (model, planned(model, x, strategy)):
        given = x.clone()
        out = write(model, given, run(given))
        with pytest.raises(RuntimeError, match=r"in.?place operation"):
            out.sum().backward()


def test_what_only_a_second_run_reads_is_refused_too() -> None:
    """A bias that no gradient needs, and memory that torch does not watch."""
    model, x = layers(), torch.ones(3, WIDTH)
    run = planned(model, x)
    loss = run(x).sum()
    with torch.no_grad():
        model[0][0].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"0\.bias of stage 1 \(Sequential\) was changed"):
        loss.backward()
    array = torch.ones(3, WIDTH).numpy()
    loss = run(torch.from_numpy(array)).sum()
    array[:] = 0
    with pytest.raises(RuntimeError, match="gave another result"):
        loss.backward()


def test_an_offloaded_stage_watches_too() -> None:
    from analysis.checkpointing.offloading import offload_stages

    model, x = layers(), torch.ones(3, WIDTH)
    found = profile(model, x, repeats=0)
    schedule = offload_stages(found.chain)
    run = PlannedModel(model, found, schedule, link_bytes_per_s=1e9)
    given = x.clone()
    loss = run(given).sum()
    given.zero_()
    with pytest.raises(RuntimeError, match=r"inplace operation: .* stage 1"):
        loss.backward()


def test_a_result_written_after_it_was_used_is_no_fault() -> None:
    """Autograd needs no value of a sum's or a linear layer's result."""
    model, x = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.ones(3, WIDTH)
    run = planned(model, x)
    expected = gradients(model, model(x).mul_(3).sum())
    assert equal(gradients(model, run(x).mul_(3).sum()), expected)


# -- results of other kinds ------------------------------------------------------------------------


Pair = namedtuple("Pair", "value frozen")


class Ending(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, y: Tensor) -> Any:
        return self.make(y)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_keep_their_kind_and_flags(strategy: str) -> None:
    x = torch.randn(3, WIDTH)
    endings: list[Callable[[Tensor], Any]] = [
        lambda y: Pair(y, y.detach()),
        lambda y: {"a": y, "rest": [y * 2, None, 3]},
        lambda y: (y,),
        lambda y: [y, y.argmax(-1)],
    ]
    for make in endings:
        model = nn.Sequential(*layers(), Ending(make))
        run = planned(model, x, strategy)
        plain, found = model(x), run(x)
        assert type(found) is type(plain)
        a, spec = torch.utils._pytree.tree_flatten(found)
        b, other = torch.utils._pytree.tree_flatten(plain)
        assert spec == other
        for one, right in zip(a, b, strict=True):
            if isinstance(right, Tensor):
                assert torch.equal(one, right)
                assert one.requires_grad == right.requires_grad
            else:
                assert one == right


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda y: y.to_sparse(), "stage 2 returned a tensor that is of layout torch.spar"),
        (lambda y: object(), "stage 2 returned object, need a tensor"),
        (lambda y: None, "stage 2 returned NoneType without a tensor"),
    ],
)
def test_a_result_that_cannot_be_handed_on_is_named(make: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        planned(nn.Sequential(nn.Tanh(), Ending(make)), torch.randn(3, WIDTH))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_complex_result_keeps_its_gradient(strategy: str) -> None:
    model, x = nn.Sequential(*layers(), Ending(torch.fft.fft)), torch.randn(3, WIDTH)
    expected = gradients(model, model(x).abs().square().sum())
    assert equal(gradients(model, planned(model, x, strategy)(x).abs().square().sum()), expected)


# -- weights that several stages share -------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cast", [False, True])
def test_shared_weights_are_bitwise_equal(strategy: str, cast: bool) -> None:
    torch.manual_seed(0)
    one = nn.Linear(64, 64)
    twice = nn.Sequential(one, nn.GELU(), one)
    model = nn.Sequential(one, nn.Tanh(), one, nn.Tanh(), twice)
    x = torch.randn(32, 64)

    def forward(run: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return run(x).float().square().sum()

    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        run = planned(model, x, strategy)
    expected = gradients(model, forward(model))
    assert equal(gradients(model, forward(run)), expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):  # backward inside as well
        assert equal(gradients(model, forward(run)), expected)


# -- the contract of a wrapped model ---------------------------------------------------------------


def test_state_dict_is_the_models_own() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    run = planned(model, x)
    assert list(run.state_dict()) == list(model.state_dict())
    assert [n for n, _ in run.named_parameters()] == [n for n, _ in model.named_parameters()]
    other = layers()
    with torch.no_grad():
        other[0][0].weight.add_(1)
    run.load_state_dict(other.state_dict())
    assert torch.equal(model[0][0].weight, other[0][0].weight)
    layers().load_state_dict(run.state_dict())
    around = nn.Sequential(run, nn.Tanh())
    assert next(iter(around.state_dict())) == "0.0.0.weight"
    run.to(torch.float64)
    assert model[0][0].weight.dtype == torch.float64
    run.eval()
    assert not any(part.training for part in (model, model[0], run))
    functions = planned([*layers(2), torch.tanh], x)
    assert list(functions.state_dict()) == [f"parts.{i}.0.{name}" for i in range(2) for name in ("weight", "bias")]


def test_a_frozen_model_gives_a_result_without_gradient() -> None:
    model, x = layers().requires_grad_(False), torch.randn(3, WIDTH)
    run = planned(model, x)
    assert not run(x).requires_grad
    model[2].requires_grad_(True)
    expected = model(x).sum()
    expected.backward()
    want = model[2][0].weight.grad.clone()
    model[2][0].weight.grad = None
    run(x).sum().backward()
    assert torch.equal(model[2][0].weight.grad, want)
    assert model[0][0].weight.grad is None


def test_a_copy_is_independent_at_any_time() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    run = planned(model, x)
    open_step = run(x).sum()
    again = copy.deepcopy(run)
    assert again.model[0][0].weight is again.stages[0][0].weight
    assert again.model[0][0].weight is not model[0][0].weight
    found = gradients(again, again(x).sum())
    assert all(p.grad is None for p in model.parameters())
    assert equal(found, gradients(model, open_step))
    buffer = io.BytesIO()
    torch.save(run, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert equal(gradients(loaded, loaded(x).sum()), found)
    layer = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(TypeError, match="function that refers to modules"):
        copy.deepcopy(planned([lambda y: layer(y), torch.tanh], x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_result_dropped_without_backward_frees_everything(strategy: str) -> None:
    """Without the collector of cycles: a step that is skipped, or validation with gradients on."""
    model, x = layers(6, 64), torch.randn(256, 64)
    run = planned(model, x, strategy)
    run(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        known = [x, *model.parameters(), *(p.grad for p in model.parameters())]
        with LiveBytes(known=known) as live:
            for _ in range(3):
                out = run(x)
                del out
                assert live.live_bytes == 0
            loss = run(x).sum()
            loss.backward()
            assert live.live_bytes == loss.nbytes  # the graph, still named, keeps nothing
            del loss
            assert live.live_bytes == 0
    finally:
        gc.enable()


def test_hooks_and_results_kept_aside_are_part_of_the_graph() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x).tanh()
            self.penalty = y.square().mean()
            return y

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Aside() for _ in range(4))), torch.randn(3, WIDTH)

    def loss(run: nn.Module) -> Tensor:
        return run(x).sum() + sum(stage.penalty for stage in model)

    expected = gradients(model, loss(model))
    run = planned(model, x)
    seen: list[torch.Size] = []
    handle = model[1].lin.weight.register_hook(lambda g: seen.append(g.shape))
    after = model[2].lin.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    run2 = planned(model, x)
    assert not seen  # profiling does not call them
    assert equal(gradients(model, loss(run2)), expected)
    assert len(seen) == 2
    handle.remove()
    after.remove()
    assert equal(gradients(model, loss(run)), expected)


def test_hooks_of_the_model_itself_are_not_lost_silently() -> None:
    model = layers()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks of its own"):
        planned(model, torch.randn(3, WIDTH))

    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    with pytest.raises(TypeError, match="a forward of its own"):
        planned(Own(*layers()), torch.randn(3, WIDTH))


# -- more than one way backward --------------------------------------------------------------------


def test_gradients_by_name_twice_in_part_and_of_gradients() -> None:
    model, x = layers(), torch.randn(3, WIDTH, requires_grad=True)
    run = planned(model, x)
    first, last = model[0][0].weight, model[3][0].weight

    def parts(forward: nn.Module) -> list[Tensor]:
        loss = forward(x).square().sum()
        a = torch.autograd.grad(loss, last, retain_graph=True)
        b = torch.autograd.grad(loss, [first, x], create_graph=True)
        c = torch.autograd.grad(b[1].square().sum(), first, retain_graph=True)
        d = torch.autograd.grad(loss, [first, x])
        return [*a, *b, *c, *d]

    assert equal(parts(run), parts(model))
    hessian = torch.autograd.functional.hessian
    given = x.detach()
    assert torch.equal(hessian(lambda v: run(v).sum(), given), hessian(lambda v: model(v).sum(), given))
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(model, given, vectorize=True)
    assert torch.allclose(jacobian(run, given, vectorize=True), expected)


def test_what_cannot_follow_a_plan_is_named() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    run = planned(model, x)
    with pytest.raises(RuntimeError, match=r"torch\.func transforms .*planned\.model"):
        torch.func.hessian(lambda v: run(v).sum())(x)
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.func.vmap(run)(x)
    with pytest.raises(RuntimeError, match=r"torch\.fx cannot trace .*planned\.model"):
        torch.fx.symbolic_trace(run)
    with pytest.raises(RuntimeError, match=r"torch\.jit cannot trace"):
        torch.jit.trace(run, x)


def saved_on_host(run: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = run(x).sum()
    loss.backward()


def checkpointed(run: nn.Module, x: Tensor) -> None:
    checkpoint(run, x, use_reentrant=False).sum().backward()


def checkpointed_reentrant(run: nn.Module, x: Tensor) -> None:
    checkpoint(run, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


def backward_elsewhere(run: nn.Module, x: Tensor) -> None:
    thread = threading.Thread(target=run(x).sum().backward)
    thread.start()
    thread.join()


def planned_inside(run: nn.Module, x: Tensor) -> None:
    if isinstance(run, PlannedModel):
        run = planned(nn.Sequential(run, nn.Identity(), nn.Tanh()), x)
        run(x).sum().backward()
    else:
        run(x).tanh().sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "step", [saved_on_host, checkpointed, checkpointed_reentrant, backward_elsewhere, planned_inside]
)
def test_beside_other_users_of_the_graph(step: Callable, strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH)
    found = []
    for run in (model, planned(model, x, strategy)):
        model.zero_grad()
        torch.manual_seed(1)
        step(run, x)
        found.append([p.grad.clone() for p in model.parameters()])
    assert equal(*found)


def test_threads_share_a_planned_model() -> None:
    model, x = layers(), torch.randn(3, WIDTH)
    run, found = planned(model, x), []

    def work(factor: int) -> None:
        for _ in range(10):
            losses = [forward(factor * x).sum() for forward in (run, model)]
            a, b = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
            found.append(equal(a, b))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


# -- verify ----------------------------------------------------------------------------------------


def test_verify_reports_both_ways() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers(6, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
    x = torch.randn(256, 64)
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(9)
    random = torch.get_rng_state()
    run = planned(model, x, verify=True)
    assert torch.equal(torch.get_rng_state(), random)
    report = run.verification
    assert report is not None
    assert report.equal
    assert report.peak_holds
    assert report.measured_peak_bytes < report.plain_peak_bytes
    assert "equal bit for bit" in str(report)
    assert "Not counted: weights" in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert run.verify(x[:100]).equal  # a smaller batch


@pytest.mark.parametrize("strategy", ["store-all", "recompute-all", "sqrt"])
@pytest.mark.parametrize("ends", ["linear", "softmax", "bfloat16", "several"])
def test_the_peak_that_verify_measures_is_the_one_predicted(ends: str, strategy: str) -> None:
    """Of a model whose result is no scalar but 4 MiB: no step of training holds it, or its
    gradient, longer than the loss does."""

    class Several(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 2, torch.complex(x, x), x.detach() > 0

    torch.manual_seed(0)
    last = {"linear": nn.Linear(256, 256), "softmax": nn.Softmax(1), "several": Several()}
    stages = [nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)]
    model = nn.Sequential(*stages, *([last[ends]] if ends in last else []))
    x = torch.randn(4096, 256)
    if ends == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    report = plan(model, x, strategy=strategy, repeats=0).verify(x)
    assert report.as_promised, str(report)
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=1e-3)


def test_verify_notices_a_forward_that_is_not_its_stages() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers()

        def stages(self) -> list[nn.Module]:
            return list(self.parts)

        def forward(self, x: Tensor) -> Tensor:
            return self.parts(x) + x

    x = torch.randn(3, WIDTH)
    with pytest.warns(UserWarning, match="result 0 differs by"):
        run = planned(Residual(), x, verify=True)
    assert run.verification is not None
    assert not run.verification.equal
    assert run.verification.largest_difference == pytest.approx(float(x.abs().max()), rel=1e-5)
