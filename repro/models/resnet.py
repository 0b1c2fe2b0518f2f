"""Pre-activation ResNet (He et al. 2016) of any depth, as in Chen et al. 2016, Fig. 5.

A layer is batch norm, ReLU and a 3x3 convolution, so a residual block counts two layers.  Three
groups of blocks with w, 2w and 4w channels, the image halved between groups (the CIFAR form), so
the chain is uneven: w·S² elements a layer in the first group, half of that in the second, a quarter
in the third.
"""

from __future__ import annotations

from torch import Tensor, nn

from .sequential import SequentialModel

LAYERS_PER_BLOCK = 2


def _layer(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels_in),
        nn.ReLU(),
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
    )


class PreActivationBlock(nn.Module):
    """(B, C, S, S) -> (B, C', S/stride, S/stride): two layers and a shortcut."""

    kind = "block"

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = _layer(channels_in, channels_out, stride)
        self.second = _layer(channels_out, channels_out)
        same = channels_in == channels_out and stride == 1
        self.shortcut = (
            None if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return self.second(self.first(x)) + shortcut


class Head(nn.Module):
    """Pooling, classifier and a mean-square loss (targets play no role for memory)."""

    kind = "loss"

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm(x).relu().mean((2, 3))).square().mean()


class PreActivationResNet(SequentialModel):
    """`layers` layers in residual blocks (an even number, at least 6) on (B, 3, S, S) images."""

    def __init__(self, layers: int, width: int = 16, classes: int = 10) -> None:
        blocks, rest = divmod(layers, LAYERS_PER_BLOCK)
        if rest or blocks < 3:
            raise ValueError(f"layers={layers}: need an even number of at least 6")
        sizes = [(blocks + 2) // 3, (blocks + 1) // 3, blocks // 3]
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        channels = width
        for group, count in enumerate(sizes):
            for index in range(count):
                out, stride = width << group, 2 if group and index == 0 else 1
                stages.append(PreActivationBlock(channels, out, stride))
                channels = out
        super().__init__([*stages, Head(channels, classes)])
