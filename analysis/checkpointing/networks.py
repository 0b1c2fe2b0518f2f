"""Chains of the studied networks from their shapes alone, without running anything.

Outputs and interiors are exact sums of what autograd keeps; temporaries name the two or three maps
that are alive at once and leave small buffers out.  Times are in units of floating-point work, a
backward costing twice its forward: good for ratios, not for seconds.
"""

from __future__ import annotations

from ..parallel_activations import LayerShape, saved_bytes
from ..transformer import forward_flops_per_layer
from .chain import Chain, Stage

FP32 = 4


def mlp_chain(depth: int, width: int, rows: int, *, itemsize: int = FP32) -> Chain:
    """`depth` layers of linear and GELU on (rows, width), then a mean-square loss.

    A layer keeps GELU's input; its own input is the chain's a_{l-1}.
    """
    size = rows * width * itemsize
    weights = (width * width + width) * itemsize
    work = float(rows * width * width)

    def layer(first: bool) -> Stage:
        return Stage(
            activation_bytes=size,
            saved_bytes=size,
            forward_temporary_bytes=size,
            backward_temporary_bytes=max(weights, size) if first else weights,
            forward_s=work,
            backward_s=2 * work,
            kind="layer",
        )

    loss = _loss(itemsize, temporary=size, backward=3 * size)
    layers = [layer(index == 0) for index in range(depth)]
    return Chain((*layers, loss), input_bytes=size)


def _loss(itemsize: int, *, temporary: int, backward: int, saved: int = 0) -> Stage:
    return Stage(
        activation_bytes=itemsize,
        saved_bytes=saved,
        forward_temporary_bytes=temporary,
        saving_temporary_bytes=temporary,
        backward_temporary_bytes=backward,
        forward_s=0.0,
        backward_s=0.0,
        kind="loss",
    )


def resnet_chain(layers: int, width: int, batch: int, image: int, *, itemsize: int = FP32) -> Chain:
    """Pre-activation ResNet of `layers` layers on (batch, 3, image, image): stem, blocks, head.

    A block keeps both ReLU outputs and the map between its two convolutions.
    """
    blocks = layers // 2
    sizes = [(blocks + 2) // 3, (blocks + 1) // 3, blocks // 3]
    map_bytes = batch * width * image * image * itemsize
    stages = [
        Stage(
            map_bytes,
            saving_temporary_bytes=map_bytes,
            forward_temporary_bytes=map_bytes,
            backward_temporary_bytes=map_bytes,
            forward_s=27.0 * width * batch * image**2,
            backward_s=54.0 * width * batch * image**2,
        )
    ]
    into, into_channels = map_bytes, width
    for group, count in enumerate(sizes):
        for _ in range(count):
            channels, side = width << group, image >> group
            out = batch * channels * side * side * itemsize
            weights = 9 * channels * (into_channels + channels) * itemsize
            work = float(batch * side * side * 9 * channels * (into_channels + channels))
            statistics = 2 * (into_channels + channels) * itemsize
            stages.append(
                Stage(
                    activation_bytes=out,
                    saved_bytes=into + 2 * out + statistics,
                    forward_temporary_bytes=into + 2 * out + weights // 2,
                    saving_temporary_bytes=out + weights // 2,
                    backward_temporary_bytes=into + out + weights // 2,
                    forward_s=work,
                    backward_s=2 * work,
                    kind="block",
                )
            )
            into, into_channels = out, channels
    head = _loss(itemsize, temporary=2 * into, backward=into, saved=into)
    return Chain((*stages, head), input_bytes=batch * 3 * image * image * itemsize)


def lstm_chain(
    steps: int, *, batch: int, layers: int, hidden: int, classes: int, inputs: int = 50, itemsize: int = FP32
) -> Chain:
    """`steps` steps of an LSTM: a step keeps, per layer, four gates, tanh of the cell and the
    hidden state that feeds the next layer, and the log-softmax of its classes."""
    row = batch * hidden * itemsize
    state = 2 * layers * row + itemsize
    scores = batch * classes * itemsize
    gates = 4 * hidden * (hidden + inputs + (layers - 1) * 2 * hidden)
    work = float(batch * (gates + hidden * classes))
    step = Stage(
        activation_bytes=state,
        saved_bytes=6 * layers * row + scores,
        forward_temporary_bytes=state,
        saving_temporary_bytes=state // 2,
        backward_temporary_bytes=4 * hidden * hidden * itemsize,  # one weight gradient
        forward_s=work,
        backward_s=2 * work,
        kind="step",
    )
    last = _loss(itemsize, temporary=itemsize, backward=itemsize, saved=itemsize)
    return Chain((step,) * steps + (last,), input_bytes=state)


def lstm_shared_bytes(*, layers: int, hidden: int, classes: int, inputs: int = 50, itemsize: int = FP32) -> int:
    """Bytes of the parameters that all steps share: a planned step sums their gradients beside the
    ones that exist already."""
    cells = 4 * hidden * (inputs + hidden + 2 + (layers - 1) * (2 * hidden + 2))
    return (cells + classes * (hidden + 1)) * itemsize


def gpt_chain(
    layers: int, *, batch: int, seqlen: int, hidden: int, heads: int, vocabulary: int, itemsize: int = FP32
) -> Chain:
    """A GPT of `layers` layers without dropout; stages are attentions and MLPs.

    Interiors: norm, Q, K, V, the softmax output P (its input is not kept), the merged heads; norm,
    GELU's input and output.  Forward work splits as 8 and 16 b·s·h² plus 4·b·s²·h for the core.
    """
    shape = LayerShape(seqlen, batch, hidden, heads)
    one = batch * seqlen * hidden * itemsize
    scores = batch * heads * seqlen * seqlen * itemsize
    statistics = 2 * batch * seqlen * itemsize
    flops = float(forward_flops_per_layer(shape))
    mlp_flops = 16.0 * batch * seqlen * hidden**2
    attention = Stage(
        activation_bytes=one,
        saved_bytes=5 * one + scores + statistics,
        forward_temporary_bytes=4 * one + 2 * scores,
        saving_temporary_bytes=2 * one + scores,
        backward_temporary_bytes=scores + 6 * one,
        forward_s=flops - mlp_flops,
        backward_s=2 * (flops - mlp_flops),
        kind="attention",
    )
    mlp = Stage(
        activation_bytes=one,
        saved_bytes=9 * one + statistics,
        forward_temporary_bytes=7 * one,
        saving_temporary_bytes=one,
        backward_temporary_bytes=7 * one // 2,
        forward_s=mlp_flops,
        backward_s=2 * mlp_flops,
        kind="mlp",
    )
    ids = batch * seqlen * 8
    embedding = Stage(one, seqlen * 8, forward_s=0.0, backward_s=0.0, kind="embedding")
    logits = batch * seqlen * vocabulary * itemsize
    work = 2.0 * batch * seqlen * hidden * vocabulary
    loss = Stage(
        activation_bytes=itemsize,
        saved_bytes=one + logits + statistics,
        saving_temporary_bytes=logits,
        forward_temporary_bytes=2 * logits,
        backward_temporary_bytes=3 * logits,
        forward_s=work,
        backward_s=2 * work,
        kind="loss",
    )
    return Chain((embedding, *(attention, mlp) * layers, loss), input_bytes=ids)


def gpt_layer_bytes(*, batch: int, seqlen: int, hidden: int, heads: int, recompute: str, itemsize: int = 2) -> int:
    """Korthikanti et al. 2022, Table 2: bytes that one layer saves, with dropout, no parallelism.

    recompute: "none" s·b·h·(34 + 5as/h), "selective" 34·s·b·h, "full" 2·s·b·h (in 16 bits).
    """
    shape = LayerShape(seqlen, batch, hidden, heads)
    return int(saved_bytes(shape, recompute=recompute, itemsize=itemsize))
