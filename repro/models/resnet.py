"""Pre-activation ResNet (He et al. 2016) of any depth, as in Chen et al. 2016, Fig. 5, small; and
the network of its authors' released example at its own size.

A layer is batch norm, ReLU and a 3x3 convolution, so a residual block counts two layers.  Three
groups of blocks with w, 2w and 4w channels, the image halved between groups (the CIFAR form), so
the chain is uneven: w·S² elements a layer in the first group, half of that in the second, a quarter
in the third.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.shortcut = None if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

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


def _convolution(
    channels_in: int, channels_out: int, kernel: int, stride: int = 1, *, pre: bool = False
) -> nn.Sequential:
    """Convolution, batch norm and a leaky ReLU in place: one "layer" of the released example; with
    `pre` the convolution comes last."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    norm = nn.BatchNorm2d(channels_in if pre else channels_out)
    activation = nn.LeakyReLU(0.25, inplace=True)
    parts = (norm, activation, convolution) if pre else (convolution, norm, activation)
    return nn.Sequential(*parts)


class Bottleneck(nn.Module):
    """(B, C, S, S) -> (B, 4f, S/stride, S/stride): three layers and a shortcut, which is a layer
    too where `first`; with `pre` it is a convolution alone."""

    kind = "block"

    def __init__(self, channels_in: int, filters: int, stride: int, first: bool, *, pre: bool = False) -> None:
        super().__init__()
        self.reduce = _convolution(channels_in, filters, 1, pre=pre)
        self.middle = _convolution(filters, filters, 3, stride, pre=pre)
        self.widen = _convolution(filters, 4 * filters, 1, pre=pre)
        self.shortcut: nn.Module | None = None
        if first and pre:
            self.shortcut = nn.Conv2d(channels_in, 4 * filters, 1, stride, bias=False)
        elif first:
            self.shortcut = _convolution(channels_in, 4 * filters, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return shortcut + self.widen(self.middle(self.reduce(x)))


class Classifier(nn.Module):
    """Global pooling, classifier and a mean-square loss (targets play no role for memory)."""

    kind = "loss"

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x.mean((2, 3))).square().mean()


class BottleneckResNet(SequentialModel):
    """(B, 3, S, S) -> loss: four groups of `blocks` bottlenecks with 64, 128, 256, 512 filters.

    The network of github.com/dmlc/mxnet-memonger, example_resnet.py (Chen et al. 2016), layer for
    layer: there blocks = (3, 24, 36, 3), 200 layers, on batches of 32 images of 224 x 224.
    pre_activation: the order that the paper's text names, norm and activation first.
    """

    def __init__(
        self, blocks: Sequence[int], filters: int = 64, classes: int = 1000, *, pre_activation: bool = False
    ) -> None:
        if len(blocks) != 4 or min(blocks) < 1:
            raise ValueError(f"blocks={tuple(blocks)}: need four numbers of at least 1")
        stem = nn.Sequential(
            nn.Conv2d(3, filters, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(filters),
            nn.LeakyReLU(0.25, inplace=True),
            nn.MaxPool2d(3, 2),
        )
        stages: list[nn.Module] = [stem]
        channels = filters
        for group, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if group and index == 0 else 1
                stages.append(Bottleneck(channels, filters << group, stride, index == 0, pre=pre_activation))
                channels = 4 * (filters << group)
        super().__init__([*stages, Classifier(channels, classes)])
