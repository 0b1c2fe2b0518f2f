"""Adam in mixed precision with its states in host memory (or beside the parameters).

The device keeps 16-bit parameters and gradients, 4 bytes a parameter; the fp32 copy, momentum and
variance, 12 bytes a parameter, live in a second pool. A step brings gradients down and parameters
up, bucket by bucket, while the host updates the bucket in between, a cache's worth at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from analysis.arguments import byte_count, instance, items, methods, real, whole
from repro.training.link import CudaLink, DirectLink, Link, Pool, Ticket

#: Elements that the host updates at once: few enough that the widened gradient and the new fp32
#: copy, 2 MiB each, are read again from cache, enough that the cost of a call does not count.
SLICE = 1 << 19


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of decoupled-weight-decay Adam, torch's defaults.

    TypeError or ValueError for what is no number, not finite, negative, or betas outside [0, 1).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            object.__setattr__(self, name, real(name, getattr(self, name), least=0.0))
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise TypeError(f"betas={self.betas!r} is not a pair of real numbers")
        first, second = (real(f"betas[{i}]", beta, least=0.0) for i, beta in enumerate(self.betas))
        if max(first, second) >= 1:
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        object.__setattr__(self, "betas", (first, second))


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
        AdamW(lr, betas, eps, weight_decay)  # refuses what is impossible
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
                update(chosen, state["step"], state["master"], parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                parameter.copy_(state["master"])


def update(adam: AdamW, step: int, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """One AdamW step in place on fp32 tensors of one shape; ``grad`` may be of any float type."""
    step = whole("step", step, least=1)
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
    """Neighbouring parameters that are updated together, with their states on the host."""

    def __init__(self, parameters: Sequence[Tensor], pool: Pool) -> None:
        self.parameters = list(parameters)
        self.numel = sum(p.numel() for p in parameters)
        itemsize, dtype = parameters[0].element_size(), parameters[0].dtype
        states = pool.take(12 * self.numel).view(torch.float32)
        self.master, self.exp_avg, self.exp_avg_sq = states.view(3, self.numel)
        self.grad = pool.take(itemsize * self.numel).view(dtype)
        self.new = pool.take(itemsize * self.numel).view(dtype)
        for parameter, part in self.parts(self.master):
            part.copy_(parameter.detach().reshape(-1))
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

    def parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its part of ``flat``, (numel,)."""
        return zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True)

    def update(self, adam: AdamW, step: int, wide: Tensor) -> None:
        """From ``grad`` to ``new``, slice by slice; ``wide`` is fp32 scratch as long as a slice."""
        for first in range(0, self.numel, SLICE):
            part = slice(first, first + SLICE)
            master = self.master[part]
            grad = wide[: master.numel()].copy_(self.grad[part])
            update(adam, step, master, grad, self.exp_avg[part], self.exp_avg_sq[part])
            self.new[part].copy_(master)


class HostAdamW:
    """AdamW with fp32 copy, momentum and variance on the host.

    Args:
        parameters: of one floating type, on one device.
        adam: hyper-parameters.
        bucket_bytes: an update waits for the gradients of about so many bytes, so that copying
            down, updating and copying up of different buckets overlap.
        link, pool: as for ``OffloadSavedTensors``.

    ``step()`` needs a gradient on every parameter and frees the gradients (set to None): they are
    no longer needed on the device once they have arrived. A step makes no buffer, here or there;
    only tensors that are not contiguous are copied on the device.
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
        found: list[Tensor] = items("parameters", parameters, Tensor)
        if not found:
            raise ValueError("HostAdamW got an empty parameter list")
        if adam is not None:
            instance("adam", adam, AdamW)
        bucket_bytes = byte_count("bucket_bytes", bucket_bytes)
        if link is not None:
            methods("link", link, "send", "fetch")
        if pool is not None:
            methods("pool", pool, "take", "give")
        kinds = {(p.dtype, p.device) for p in found}
        if len(kinds) > 1:
            raise ValueError(f"parameters must share type and device, got {sorted(map(str, kinds))}")
        if not found[0].is_floating_point() or found[0].layout != torch.strided:
            raise TypeError(
                f"parameters are {found[0].dtype}, {found[0].layout}; dense ones of a floating type are trained"
            )
        self.adam = adam or AdamW()
        self._device = found[0].device
        on_cuda = self._device.type == "cuda"
        self.link = link or (CudaLink(self._device) if on_cuda else DirectLink())
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
        longest = min(SLICE, max(b.numel for b in self._buckets))
        self._wide = Pool().take(4 * longest).view(torch.float32)  # never pinned: it stays here

    @property
    def state_bytes(self) -> int:
        """fp32 copy, momentum and variance: 12 bytes a parameter, all on the host."""
        return sum(12 * bucket.numel for bucket in self._buckets)

    @torch.no_grad()
    def step(self) -> None:
        """Bring gradients down, update, send parameters up; the device's gradients are freed."""
        down: list[list[tuple[Tensor, Ticket]]] = []
        for bucket in self._buckets:
            sent = []
            for parameter, part in bucket.parts(bucket.grad):
                if parameter.grad is None:
                    raise RuntimeError("HostAdamW.step() needs a gradient on every parameter")
                grad = parameter.grad.reshape(-1)
                sent.append((grad, self.link.send(_bytes(grad), _bytes(part))))
            down.append(sent)
        self.steps += 1
        up: list[tuple[Tensor, Tensor, Ticket]] = []
        for bucket, sent in zip(self._buckets, down, strict=True):
            for _, ticket in sent:
                ticket.wait()
            if self._device.type == "cuda":  # the CPU reads the gradients next: the host must wait
                torch.cuda.current_stream(self._device).synchronize()
            sent.clear()
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.update(self.adam, self.steps, self._wide)
            for parameter, part in bucket.parts(bucket.new):
                flat = parameter.detach().reshape(-1)  # the parameter itself where it is contiguous
                up.append((parameter, flat, self.link.fetch(_bytes(part), _bytes(flat))))
        for parameter, flat, ticket in up:
            ticket.wait()
            if not parameter.is_contiguous():
                parameter.copy_(flat.view_as(parameter))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
