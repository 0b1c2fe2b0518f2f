"""The chain of a published network at its published size, from its shapes.

The network is that of the example which the authors of "Training Deep Nets with Sublinear Memory
Cost" released (github.com/dmlc/mxnet-memonger, example_resnet.py): bottlenecks of three layers,
a layer being convolution, batch norm and an activation in place. It has (3, 24, 36, 3) blocks, 200
layers. The paper trains one of 1,000 and does not say how many blocks each group has.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments import whole
from .chain import Chain, Stage

RELEASED_BLOCKS = (3, 24, 36, 3)
FP32, INDEX = 4, 8
BATCH, IMAGE, FILTERS, CLASSES = 32, 224, 64, 1000


def scaled_blocks(layers: int) -> tuple[int, int, int, int]:
    """Blocks of each group for at most this many layers: the middle groups grow as released, 2:3.

    200 layers give the released (3, 24, 36, 3). ValueError for fewer than 29.
    """
    whole("layers", layers, least=29)
    first, second, third, last = RELEASED_BLOCKS
    middle = (layers - 2) // 3 - first - last
    found = round(middle * second / (second + third))
    return first, found, middle - found, last


def bottleneck_chain(
    blocks: Sequence[int],
    *,
    batch: int = BATCH,
    image: int = IMAGE,
    filters: int = FILTERS,
    classes: int = CLASSES,
    itemsize: int = FP32,
) -> Chain:
    """Stem, bottlenecks, classifier, as `repro.models.BottleneckResNet` trains them.

    A layer of f channels on S x S keeps the convolution's result and the activation's, 2·B·f·S²
    elements (the norm's result is overwritten by the activation), and two statistics a channel.
    Backward: gradients behind the last activation and behind its norm, 4f channels each, or twice
    the largest convolution's weights, which the CPU's library rearranges.
    """
    side = (image + 1) // 2
    large = batch * filters * side * side * itemsize
    side = (side - 3) // 2 + 1
    small = batch * filters * side * side
    stages = [
        Stage(
            activation_bytes=small * itemsize,
            saved_bytes=2 * large + small * INDEX + 2 * filters * itemsize,
            forward_temporary_bytes=2 * large - small * itemsize,
            backward_temporary_bytes=large,
            forward_s=147.0 * large / itemsize,
            backward_s=294.0 * large / itemsize,
        )
    ]
    channels = filters
    for group, count in enumerate(blocks):
        f = filters << group
        for index in range(count):
            first = index == 0
            out = (side - 1) // 2 + 1 if group and first else side
            before, after = (batch * f * s * s * itemsize for s in (side, out))
            work = before / itemsize * channels + after / itemsize * (9 * f + 4 * f)
            work += after / itemsize * 4 * channels * first
            layers = 2 * (before + after + 4 * after) + 2 * 4 * after * first
            weights = 9 * f * f * itemsize
            into = batch * channels * side * side * itemsize
            statistics = 2 * (f + f + 4 * f + 4 * f * first) * itemsize
            stages.append(
                Stage(
                    activation_bytes=4 * after,
                    saved_bytes=layers + statistics,
                    forward_temporary_bytes=max(5 * after + 4 * after * first, weights),
                    saving_temporary_bytes=weights,
                    backward_temporary_bytes=max(8 * after, 2 * weights) - into,
                    forward_s=work,
                    backward_s=2 * work,
                    kind="block",
                )
            )
            channels, side = 4 * f, out
    pooled = batch * channels * itemsize
    head = Stage(
        activation_bytes=itemsize,
        saved_bytes=pooled + batch * classes * itemsize,
        backward_temporary_bytes=channels * classes * itemsize,
        forward_s=float(batch * channels * classes),
        backward_s=2.0 * batch * channels * classes,
        kind="loss",
    )
    return Chain((*stages, head), input_bytes=batch * 3 * image * image * itemsize)


def kept_bytes(blocks: Sequence[int], *, batch: int = BATCH, pre_activation: bool = False) -> int:
    """What autograd keeps of a forward, the images included: all but the last block's result, of
    which the classifier keeps the mean, and the loss.

    pre_activation: norm and activation before each convolution, as the paper's text says: a block
    keeps its first activation, C on S x S, and 2f for each of the two inner layers, instead of
    2(f + f + 4f) and its result.
    """
    chain = bottleneck_chain(blocks, batch=batch)
    kept = chain.input_bytes + sum(s.activation_bytes + s.saved_bytes for s in chain.stages)
    kept -= sum(s.activation_bytes for s in chain.stages[-2:])
    if not pre_activation:
        return kept
    channels, side = FILTERS, ((IMAGE + 1) // 2 - 3) // 2 + 1
    for group, count in enumerate(blocks):
        f = FILTERS << group
        for index in range(count):
            out = (side - 1) // 2 + 1 if group and index == 0 else side
            layer, wide = batch * FP32 * f * out * out, batch * FP32 * channels * side * side
            kept += wide - 2 * 4 * layer * (1 + (index == 0))
            kept += 2 * FP32 * (channels - 4 * f * (1 + (index == 0)))
            channels, side = 4 * f, out
    return kept


def bottleneck_parameters(blocks: Sequence[int], *, filters: int = FILTERS, classes: int = CLASSES) -> int:
    """Weights of the network: convolutions, norms and the classifier."""
    channels, found = filters, 3 * 49 * filters + 2 * filters
    for group, count in enumerate(blocks):
        f = filters << group
        for index in range(count):
            found += channels * f + 9 * f * f + 4 * f * f + 2 * (f + f + 4 * f)
            if index == 0:
                found += channels * 4 * f + 2 * 4 * f
            channels = 4 * f
    return found + channels * classes + classes
