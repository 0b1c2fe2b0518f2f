"""Sequential models whose training memory is studied: each lists its stages and ends in its loss.

The loss is the last stage, so a model's output is a scalar and a step is ``model(x).backward()``.
"""

from .gpt import GPT, Granularity
from .lstm import UnrolledLSTM
from .mlp import MLPChain
from .resnet import BottleneckResNet, PreActivationResNet
from .sequential import SequentialModel

__all__ = [
    "GPT",
    "BottleneckResNet",
    "Granularity",
    "MLPChain",
    "PreActivationResNet",
    "SequentialModel",
    "UnrolledLSTM",
]
