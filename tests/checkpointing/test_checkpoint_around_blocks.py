"""Block plans of models as people have them: residuals around blocks, skips, several lists, experts.
The predicted peak is within 2 % of the measured one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repro.checkpointing import InfeasibleBudgetError, peak_bytes, plan_blocks
from repro.checkpointing.blocks import loss_of


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class UNet(nn.Module):
    """Three tensors skip the blocks, joined to what comes up or added to it."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.first = convolution(3, 16)
        self.down = convolution(16, 32, stride=2)
        self.again_down = convolution(32, 32, stride=2)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(4))
        more = 2 if joined else 1
        self.middle = convolution(32 * more, 32)
        self.up = convolution(32 * more, 16)
        self.again_up = convolution(16 * more, 16)
        self.last = nn.Conv2d(16, 3, 1)

    def skip(self, hidden: Tensor, skipped: Tensor) -> Tensor:
        return torch.cat([hidden, skipped], dim=1) if self.joined else hidden + skipped

    def forward(self, x: Tensor) -> Tensor:
        large = self.first(x)
        half = self.down(large)
        small = self.again_down(half)
        hidden = small
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.middle(self.skip(hidden, small))
        hidden = nn.functional.interpolate(hidden, scale_factor=2.0)
        hidden = self.up(self.skip(hidden, half))
        hidden = nn.functional.interpolate(hidden, scale_factor=2.0)
        return self.last(self.again_up(self.skip(hidden, large)))


class Bottleneck(nn.Module):
    """Torchvision's: batch normalisation, and activations in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            self.relu,
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            self.relu,
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        inner += self.shortcut(x)
        return self.relu(inner)


class ResNet(nn.Module):
    """Four lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        inputs = 16
        self.stages = nn.Module()
        for number, count in enumerate((2, 2, 4, 2)):
            outputs, stride = 64 * 2**number, 1 if number == 0 else 2
            blocks = [Bottleneck(inputs, outputs, stride)]
            blocks += [Bottleneck(outputs, outputs, 1) for _ in range(count - 1)]
            self.stages.add_module(str(number), nn.Sequential(*blocks))
            inputs = outputs
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for stage in self.stages.children():
            x = stage(x)
        return self.head(x.mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width, 1, 1))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(nn.functional.gelu(self.up(y)))
        return x + self.scale * y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """All of it but the head is one list, as in torchvision: nothing comes before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Sequential] = []
        inputs = 3
        for width, patch in ((16, 4), (32, 2), (64, 2)):
            parts.append(nn.Sequential(nn.Conv2d(inputs, width, patch, patch)))
            parts.append(nn.Sequential(*(ConvNeXtBlock(width) for _ in range(2))))
            inputs = width
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x).mean((2, 3)))


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Crossed(nn.Module):
    """Attends to something else as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(64, 4, batch_first=True), Mlp()

    def forward(self, x: Tensor, memory: Tensor, bias: None = None) -> Tensor:
        return x + self.mlp(x + self.attention(x, memory, memory, need_weights=False)[0])


class Residuals(nn.Module):
    """Joined outside of the blocks, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1)
        return x


class DownAndUp(nn.Module):
    """Results of blocks on the way down are used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(Mlp() for _ in range(3)), nn.ModuleList(Mlp() for _ in range(3))
        self.joins = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left = []
        for block in self.down:
            left.append(x := block(x))
        for block, join in zip(self.up, self.joins, strict=True):
            x = block(join(torch.cat([x, left.pop()], -1)))
        return x


class EncoderDecoder(nn.Module):
    """Two lists, two inputs, one of them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Mlp() for _ in range(4))
        self.decoder = nn.ModuleList(Crossed() for _ in range(4))

    def forward(self, x: Tensor, *, source: Tensor) -> Tensor:
        for layer in self.encoder:
            source = source + layer(source)
        for layer in self.decoder:
            x = layer(x, source, bias=None)
        return x


class Experts(nn.Module):
    """The two best of four; returns the router's logits too."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, column, which = (chosen == number).nonzero(as_tuple=True)
            found = expert(x[row, column]) * weights[row, column, which, None]
            y = y.index_put((row, column), found.to(y.dtype), accumulate=True)
        return x + y, logits


class MixtureOfExperts(nn.Module):
    """Its loss uses the logits of every router."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        routed = []
        for layer in self.layers:
            x, logits = layer(x)
            routed.append(logits.logsumexp(-1).square().mean())
        return {"loss": x.square().mean() + 0.01 * torch.stack(routed).sum()}


class SharedBlocks(nn.Module):
    """Every block runs twice, and every result is used after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in (*self.layers, *self.layers):
            found.append(x := layer(x).sin())
        return torch.stack([y * y for y in found]).sum(0)


def images(*shape: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.randn(shape or (2, 3, 64, 64)),), {}


def rows() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.randn(8, 128, 64),), {}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "U-Net that joins": (lambda: UNet(joined=True), images),
    "U-Net that adds": (lambda: UNet(joined=False), images),
    "ResNet": (ResNet, images),
    "ConvNeXt": (ConvNeXt, images),
    "residuals outside": (Residuals, rows),
    "skips between blocks": (DownAndUp, rows),
    "encoder and decoder": (EncoderDecoder, lambda: (rows()[0], {"source": torch.randn(8, 100, 64)})),
    "mixture of experts": (MixtureOfExperts, rows),
    "shared blocks": (SharedBlocks, rows),
}


@pytest.mark.parametrize("cast", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "call"), CASES.values(), ids=list(CASES))
def test_the_predicted_peak_is_kept(make: Callable[[], nn.Module], call: Callable[[], Any], cast: bool) -> None:
    """And gradients are the model's, bit for bit."""
    torch.manual_seed(0)
    model, (args, kwargs) = make(), call()
    inputs = sum(tensor.nbytes for tensor in (*args, *kwargs.values()))

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=cast)

    def step() -> None:
        torch.manual_seed(1)
        with autocast():
            result = model(*args, **kwargs)
            loss = loss_of(result)
        loss.backward()

    def gradients() -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    with autocast():
        everything = plan_blocks(model, args, kwargs, budget_bytes=2**40, repeats=0)
        with pytest.raises(InfeasibleBudgetError) as error:
            plan_blocks(model, args, kwargs, budget_bytes=1, repeats=0)
        least = error.value.smallest_budget_bytes
        some = plan_blocks(model, args, kwargs, budget_bytes=least, repeats=0)
    assert some.recompute
    for found in (everything, some):
        with found.applied(model):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
            measured = peak_bytes(step) + inputs
        assert measured <= found.predicted_peak_bytes <= 1.02 * measured
