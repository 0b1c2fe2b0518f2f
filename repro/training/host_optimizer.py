"""Adam in mixed precision with its states in host memory (or beside the parameters).

The device keeps 16-bit parameters and gradients, 4 bytes a parameter; the fp32 copy, momentum and
variance, 12 bytes a parameter, live in a second pool. A step brings gradients down and parameters
up, bucket by bucket, while the host updates the bucket in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from repro.training.link import CudaLink, DirectLink, Link, Pool, Ticket


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of decoupled-weight-decay Adam, torch's defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


class MasterWeightAdamW(torch.optim.Optimizer):
    """AdamW on an fp32 copy of 16-bit parameters: K = 12 bytes of state a parameter (ZeRO).

    States live on the parameters' device. The update is torch's own AdamW on the fp32 copies, so a
    step equals ``torch.optim.AdamW`` on fp32 parameters with the same gradients, rounded once.
    Usable as the class of ``ZeroRedundancyOptimizer``.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Closures are not supported."""
        if closure is not None:
            raise ValueError("MasterWeightAdamW takes no closure")
        for group in self.param_groups:
            chosen = AdamW(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                    state["step"] = 0
                state["step"] += 1
                update(
                    chosen,
                    state["step"],
                    state["master"],
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                )
                parameter.copy_(state["master"])


def update(
    adam: AdamW, step: int, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """One AdamW step in place on fp32 tensors of one shape; ``grad`` may be of any float type."""
    adamw(
        [master],
        [grad.to(torch.float32)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step - 1))],  # torch counts before it updates
        foreach=False,
        fused=master.device.type in ("cpu", "cuda"),
        amsgrad=False,
        beta1=adam.betas[0],
        beta2=adam.betas[1],
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
    )


class _Bucket:
    """Neighbouring parameters that travel together, with their states on the host."""

    def __init__(self, parameters: Sequence[Tensor], pool: Pool) -> None:
        self.parameters = list(parameters)
        self.numel = sum(p.numel() for p in parameters)
        self.itemsize = parameters[0].element_size()
        dtype = parameters[0].dtype
        states = (pool.take(4 * self.numel).view(torch.float32) for _ in range(3))
        self.master, self.exp_avg, self.exp_avg_sq = states
        self.grad = pool.take(self.itemsize * self.numel).view(dtype)
        self.new = pool.take(self.itemsize * self.numel).view(dtype)
        self.master.copy_(torch.cat([p.detach().reshape(-1).float() for p in parameters]))
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()


class HostAdamW:
    """AdamW with fp32 copy, momentum and variance on the host.

    Args:
        parameters: of one type, on one device.
        adam: hyper-parameters.
        bucket_bytes: gradients travel in buckets of about this size, so that copying down, updating
            and copying up of different buckets overlap.
        link, pool: as for ``OffloadSavedTensors``.

    ``step()`` needs a gradient on every parameter and frees the gradients (set to None): they are
    no longer needed on the device once they have arrived.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        adam: AdamW | None = None,
        *,
        bucket_bytes: int = 1 << 25,
        link: Link | None = None,
        pool: Pool | None = None,
    ) -> None:
        found = list(parameters)
        if not found:
            raise ValueError("HostAdamW got an empty parameter list")
        kinds = {(p.dtype, p.device) for p in found}
        if len(kinds) > 1:
            raise ValueError(
                f"parameters must share type and device, got {sorted(map(str, kinds))}"
            )
        self.adam = adam or AdamW()
        on_cuda = found[0].is_cuda
        self.link = link or (CudaLink() if on_cuda else DirectLink())
        self.pool = pool or Pool(pin=on_cuda)
        self.steps = 0
        self._buckets: list[_Bucket] = []
        bucket: list[Tensor] = []
        for parameter in found:
            if bucket and sum(p.nbytes for p in [*bucket, parameter]) > bucket_bytes:
                self._buckets.append(_Bucket(bucket, self.pool))
                bucket = []
            bucket.append(parameter)
        self._buckets.append(_Bucket(bucket, self.pool))

    @property
    def state_bytes(self) -> int:
        """fp32 copy, momentum and variance: 12 bytes a parameter, all on the host."""
        return sum(12 * bucket.numel for bucket in self._buckets)

    @torch.no_grad()
    def step(self) -> None:
        """Bring gradients down, update, send parameters up; the device's gradients are freed."""
        self.steps += 1
        down: list[tuple[Tensor, Ticket]] = []
        for bucket in self._buckets:
            if any(p.grad is None for p in bucket.parameters):
                raise RuntimeError("HostAdamW.step() needs a gradient on every parameter")
            flat = torch.cat([p.grad.reshape(-1) for p in bucket.parameters if p.grad is not None])
            for parameter in bucket.parameters:
                parameter.grad = None
            down.append((flat, self.link.send(_bytes(flat), _bytes(bucket.grad))))
        up: list[tuple[_Bucket, Tensor, Ticket]] = []
        for bucket, (flat, ticket) in zip(self._buckets, down, strict=True):
            ticket.wait()
            if flat.is_cuda:  # the CPU reads the buffer next, so here the host itself must wait
                torch.cuda.current_stream().synchronize()
            update(
                self.adam, self.steps, bucket.master, bucket.grad, bucket.exp_avg, bucket.exp_avg_sq
            )
            bucket.new.copy_(bucket.master)
            arrived = torch.empty_like(flat)
            up.append((bucket, arrived, self.link.fetch(_bytes(bucket.new), _bytes(arrived))))
        for bucket, arrived, ticket in up:
            ticket.wait()
            first = 0
            for parameter in bucket.parameters:
                last = first + parameter.numel()
                parameter.copy_(arrived[first:last].view_as(parameter))
                first = last


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
