"""Small stages of all the kinds that make running a stage again difficult."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["STAGES", "build"]


class Stage(nn.Module):
    """A linear layer (width, width), and what a kind adds to it."""

    lin: Any

    def __init__(self, width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.setup(width, shared)

    def setup(self, width: int, shared: nn.Linear) -> None:
        pass


class Linear(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Shared(Stage):
    """Uses the one layer of the whole model, twice."""

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.lin = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.lin(x).tanh())


class Residual(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.lin(x))


class WritesToItsResult(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).add_(1).relu_()


class CountsInABuffer(Stage):
    calls: Tensor

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.register_buffer("calls", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x - 0.1 * self.calls)
        with torch.no_grad():
            self.calls += 1
        return y


class CountsUnseen(CountsInABuffer):
    """Through .data, which no version counter notices."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x - 0.1 * self.calls.clone())
        self.calls.data.add_(1)
        return y


class ReplacesItsBuffer(CountsInABuffer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x - 0.1 * self.calls)
        self.calls = self.calls + 1
        return y


class PowerIterationByHand(Stage):
    """A vector kept as an untrained parameter and replaced through .data."""

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.u = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.u.data = nn.functional.normalize(self.lin.weight.data @ self.u.data, dim=0)
        return self.lin(x) / (self.u @ self.lin.weight @ self.u)


class CountsInPython(Stage):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(x).roll(self.calls, 0)


class Remembers(Stage):
    before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.before is not None and self.before.shape == y.shape:
            y = y + 0.5 * self.before
        self.before = y.detach()
        return y.tanh()


class Spectral(Stage):
    def setup(self, width: int, shared: nn.Linear) -> None:
        self.lin = nn.utils.parametrizations.spectral_norm(self.lin)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Noisy(Stage):
    """Draws from every generator that everybody shares."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape) * random.random() * np.random.rand()
        return self.lin(x + noise.to(x.dtype)) + 0.1 * torch.rand_like(x)


class KeepsItsResult(Stage):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.lin(x).tanh()
        return self.last + x


class KeepsInADict(Stage):
    def setup(self, width: int, shared: nn.Linear) -> None:
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).tanh()
        self.seen["y"] = y.detach().clone()
        return y + x


class KeepsHalfByAHook(Stage):
    """A hook holds a copy of another type, so do those of the runs before the last."""

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.lin.register_forward_hook(self.note)
        self.halves: list[Tensor | None] = [None, None]

    def note(self, lin: nn.Module, given: Any, result: Tensor) -> None:
        self.halves = [self.halves[1], result.detach().half()]

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sin() + x


class KeepsItsGraph(Stage):
    """A result with its graph stays until the next run, which does not use it."""

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["y"] = self.lin(x).sin()
        return self.seen["y"].cos()


class CountsInItsClass(Stage):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.lin(x)


class CountsInADict(Stage):
    """What nobody puts back."""

    def setup(self, width: int, shared: nn.Linear) -> None:
        self.seen = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        return self.lin(x)


class HooksThatHandBack(Stage):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = self.lin(x).tanh()
        return y.sin()


class HooksBySize(Stage):
    """Large tensors are saved as another kind of object."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.clone(),) if t.numel() > 16 else t, lambda kept: kept[0] if isinstance(kept, tuple) else kept
        ):
            return self.lin(x).tanh().exp()


class SavedOnTheCpu(Stage):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.lin(x).tanh().sigmoid()


class LeavesAParameterUnused(Stage):
    def setup(self, width: int, shared: nn.Linear) -> None:
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class PartlyFrozen(Stage):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.lin(x).sigmoid()
        return x * gate + self.lin(x).detach() + self.lin(x)


class InnerGradient(Stage):
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.lin(x).tanh()
        (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return y + slope


class Checkpointed(Stage):
    """Has a checkpoint of its own inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner: Callable[[Tensor], Tensor] = lambda t: self.lin(t).tanh().sin()  # noqa: E731
        y: Tensor = checkpoint(inner, x, use_reentrant=self.reentrant)
        return y + x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Attention(Stage):
    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)[None, None]
        return nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)[0, 0] + x


class Recurrent(Stage):
    def setup(self, width: int, shared: nn.Linear) -> None:
        self.lin = nn.LSTM(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)[0]


class Spectrum(Stage):
    """A complex result on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.lin(x).float()).abs().log1p()


class Fork(Stage):
    """A tuple with an alias, a whole number and something that takes no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.lin(x)
        return y, y[:, :1], y.argmax(-1), y.detach().exp()


class Join(Stage):
    def forward(self, given: Any) -> Tensor:
        if isinstance(given, Tensor):
            return self.lin(given)
        if isinstance(given, dict):
            return given["a"] * given["b"].real + self.lin(given["a"])
        y, first, index, rest = given
        return self.lin(y) * first + index[:, None] + rest.clamp(max=2)


class ForkDict(Stage):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.lin(x)
        return {"a": y, "b": torch.fft.fft(y.float()), "scale": 2}


class ReluInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).flatten(1)


class Transpose(nn.Module):
    """A result that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT.exp().mT.clamp(max=3)


#: Kinds by name; those in PAIRS hand more than one tensor to the kind that follows.
STAGES: dict[str, Callable[[int, nn.Linear], nn.Module]] = {
    "linear": Linear,
    "shared": Shared,
    "residual": Residual,
    "writes-result": WritesToItsResult,
    "buffer": CountsInABuffer,
    "buffer-unseen": CountsUnseen,
    "buffer-replaced": ReplacesItsBuffer,
    "power-iteration": PowerIterationByHand,
    "counter": CountsInPython,
    "remembers": Remembers,
    "spectral": Spectral,
    "noisy": Noisy,
    "keeps": KeepsItsResult,
    "keeps-dict": KeepsInADict,
    "keeps-halves": KeepsHalfByAHook,
    "keeps-graph": KeepsItsGraph,
    "outside": CountsInADict,
    "outside-class": CountsInItsClass,
    "hooks": HooksThatHandBack,
    "hooks-size": HooksBySize,
    "hooks-cpu": SavedOnTheCpu,
    "unused": LeavesAParameterUnused,
    "frozen": PartlyFrozen,
    "inner": InnerGradient,
    "checkpoint": Checkpointed,
    "reentrant": CheckpointedReentrant,
    "attention": Attention,
    "lstm": Recurrent,
    "fft": Spectrum,
    "fork": Fork,
    "fork-dict": ForkDict,
    "join": Join,
    "relu_": lambda width, shared: ReluInPlace(),
    "tanh": lambda width, shared: nn.Tanh(),
    "dropout": lambda width, shared: nn.Dropout(0.3),
    "dropout_": lambda width, shared: nn.Dropout(0.3, inplace=True),
    "batch-norm": lambda width, shared: nn.BatchNorm1d(width),
    "layer-norm": lambda width, shared: nn.LayerNorm(width),
    "view": lambda width, shared: View(),
    "transpose": lambda width, shared: Transpose(),
    "identity": lambda width, shared: nn.Identity(),
}
PAIRS = {"fork": "join", "fork-dict": "join"}


def build(kinds: tuple[str, ...], width: int, seed: int) -> nn.Sequential:
    """The same model for the same arguments."""
    torch.manual_seed(seed)
    shared = nn.Linear(width, width)
    return nn.Sequential(*(STAGES[kind](width, shared) for kind in kinds))
