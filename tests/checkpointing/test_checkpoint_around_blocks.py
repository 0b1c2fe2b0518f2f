"""Block plans of models as people have them: residuals around blocks, skips, several lists, experts.
The predicted peak is within 2 % of the measured one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from repro.checkpointing import peak_bytes, plan_blocks
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
    """The longest of its lists, the third, is what a plan chooses among."""

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


CASES = {
    "U-Net that joins": lambda: UNet(joined=True),
    "U-Net that adds": lambda: UNet(joined=False),
    "ResNet": ResNet,
    "ConvNeXt": ConvNeXt,
}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_the_predicted_peak_is_kept(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, images = make(), torch.randn(2, 3, 64, 64)
    everything = plan_blocks(model, images, budget_bytes=2**40, repeats=0)
    some = plan_blocks(model, images, budget_bytes=round(0.93 * everything.predicted_peak_bytes), repeats=0)
    assert some.recompute
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        result = model(images)
        loss_of(result).backward()

    for found in (everything, some):
        with found.applied(model):
            measured = peak_bytes(step) + images.nbytes
        print(f"{type(model).__name__} {found.predicted_peak_bytes / measured:.4f}", found.recompute)
        assert measured <= found.predicted_peak_bytes <= 1.02 * measured
