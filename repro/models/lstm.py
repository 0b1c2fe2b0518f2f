"""A multi-layer LSTM unrolled over time, as in Chen et al. 2016, Fig. 6: a stage is one step.

State between steps: hidden and cell states, (layers, B, hidden) each, and the loss so far.  All
steps share their parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .sequential import SequentialModel


class _Cells(nn.Module):
    """The parameters that all steps share."""

    def __init__(self, layers: int, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        sizes = [inputs] + [hidden] * (layers - 1)
        self.cells = nn.ModuleList(nn.LSTMCell(size, hidden) for size in sizes)
        self.classify = nn.Linear(hidden, classes)


class Step(nn.Module):
    """One time step: every layer's cell, the softmax over classes, and its share of the loss.

    The step's input and target are data that exist anyway, so they are not part of the state.
    """

    kind = "step"

    def __init__(self, shared: _Cells, x: Tensor, target: Tensor) -> None:
        super().__init__()
        self.shared, self.data = shared, (x, target)

    def extra_repr(self) -> str:
        return f"x={tuple(self.data[0].shape)}"

    def forward(self, hidden: Tensor, cell: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, target = self.data
        hiddens, cells = [], []
        for index, layer in enumerate(self.shared.cells):
            h, c = layer(x, (hidden[index], cell[index]))
            hiddens.append(h)
            cells.append(c)
            x = h
        step_loss = nn.functional.cross_entropy(self.shared.classify(x), target)
        return torch.stack(hiddens), torch.stack(cells), loss + step_loss


class LastLoss(nn.Module):
    """The mean loss of all steps; the final states end here."""

    kind = "loss"

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, hidden: Tensor, cell: Tensor, loss: Tensor) -> Tensor:
        return loss / self.steps


class UnrolledLSTM(SequentialModel):
    """`steps` steps of a `layers`-layer LSTM; make its input with `initial_state()`."""

    def __init__(
        self,
        steps: int,
        *,
        batch: int,
        layers: int = 4,
        inputs: int = 50,
        hidden: int = 1024,
        classes: int = 5000,
        device: torch.device | str = "cpu",
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: need at least 1")
        shared = _Cells(layers, inputs, hidden, classes).to(device)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(steps, batch, inputs, generator=generator).to(device)
        target = torch.randint(classes, (steps, batch), generator=generator).to(device)
        stages: list[nn.Module] = [Step(shared, x[t], target[t]) for t in range(steps)]
        super().__init__([*stages, LastLoss(steps)])
        self.state_shape, self.device = (layers, batch, hidden), device

    def initial_state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zero hidden and cell states (layers, B, hidden) and a zero loss."""
        return (
            torch.zeros(self.state_shape, device=self.device),
            torch.zeros(self.state_shape, device=self.device),
            torch.zeros((), device=self.device),
        )
