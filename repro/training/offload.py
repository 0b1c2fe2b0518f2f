"""Saved tensors in host memory: copied out in the forward pass, prefetched in the backward pass.

The unit of transfer is the **storage**, because a saved view keeps its whole storage alive: several
saved views (a product and its transpose, q, k and v cut out of one projection, a broadcast row)
move their storage once. Parameters and buffers never move; they live on the device anyway. A view
that touches little of a large storage moves only the span it touches
(``analysis.offload.transfer_plan`` states the rule and predicts the bytes).

Autograd checks that nobody wrote to a saved tensor in place; saved-tensor hooks silence that check,
so this executor makes it itself.

    with OffloadSavedTensors(model) as offload:
        loss = loss_fn(model(batch), target)
    loss.backward()
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from analysis.arguments import byte_count, flag, instance, items, methods
from analysis.offload import SavedView, moves_whole_storage
from repro.training.link import CudaLink, DirectLink, Link, Pool, Ticket


class _Slot:
    """A span of one storage: on the host, on its way, or back on the device."""

    def __init__(self, span: Tensor, first_byte: int, version: int, pool: Pool) -> None:
        self.first_byte = first_byte
        self.version = version
        self.nbytes = span.numel()
        self.device = span.device
        self.host = pool.take(self.nbytes)
        self.restored: Tensor | None = None
        self.arrival: Ticket | None = None
        self.waiting: set[int] = set()  # handles not unpacked since the last fetch
        self.handles: set[int] = set()  # every handle ever made
        self._pool = pool

    def __del__(self) -> None:
        if self.arrival is not None:  # prefetched, never used: both ends must outlive the copy
            self.arrival.wait()
        self._pool.give(self.host)

    @property
    def last_byte(self) -> int:
        return self.first_byte + self.nbytes


class _Handle:
    """What autograd keeps instead of the tensor: where its elements lie in the slot."""

    def __init__(self, slot: _Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset() - slot.first_byte // tensor.element_size()
        self.key = len(slot.handles)
        slot.handles.add(self.key)
        slot.waiting.add(self.key)


class _Kept:
    """A tensor that stays where it is, with autograd's check for writes in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


class OffloadSavedTensors:
    """Context: what autograd saves inside goes to host memory and comes back for the backward.

    Args:
        model: modules (or tensors) whose parameters and buffers must not be copied.
        link: how bytes travel. Default: :class:`CudaLink` on first use with a CUDA tensor, else
            :class:`DirectLink`.
        pool: host buffers; pinned by default where there is CUDA.
        min_bytes: storages smaller than this stay on the device (latency would dominate).
        prefetch_bytes: while one slot is being used, fetch earlier ones up to this many bytes.
        in_flight_bytes: bound on device memory held by copies out that have not finished; reaching
            it makes the computation wait for the oldest copy. None: no bound.
        select: called with a tensor; False keeps it on the device.

    The context may be entered several times (once a layer) and nested calls share one backward
    order. ``packed``, ``kept`` and ``moved`` count tensors seen, kept, and storages moved.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module | Tensor] = (),
        *,
        link: Link | None = None,
        pool: Pool | None = None,
        min_bytes: int = 0,
        prefetch_bytes: int = 1 << 28,
        in_flight_bytes: int | None = None,
        select: Callable[[Tensor], bool] | None = None,
    ) -> None:
        min_bytes = byte_count("min_bytes", min_bytes)
        prefetch_bytes = byte_count("prefetch_bytes", prefetch_bytes)
        if in_flight_bytes is not None:
            in_flight_bytes = byte_count("in_flight_bytes", in_flight_bytes)
        if link is not None:
            methods("link", link, "send", "fetch")
        if pool is not None:
            methods("pool", pool, "take", "give")
        if select is not None:
            methods("select", select, "__call__")
        self._resident = {_storage_key(tensor) for tensor in resident_tensors(model)}
        self._link = link
        self.pool = pool if pool is not None else Pool(pin=torch.cuda.is_available())
        self._min_bytes = min_bytes
        self._prefetch_bytes = prefetch_bytes
        self._in_flight_bytes = in_flight_bytes
        self._select = select
        # Spans of live storages. An entry leaves with its storage, whose address may come back.
        self._spans: dict[int, weakref.WeakSet[_Slot]] = {}
        self._order: list[weakref.ref[_Slot]] = []
        self._position: weakref.WeakKeyDictionary[_Slot, int] = weakref.WeakKeyDictionary()
        self._leaving: deque[tuple[Tensor, int, int, Ticket]] = deque()
        self._hooks: list[saved_tensors_hooks] = []
        self.packed = self.kept = self.moved = 0

    @property
    def link(self) -> Link:
        """The link in use. RuntimeError before the first tensor has chosen one."""
        if self._link is None:
            raise RuntimeError("no tensor has been offloaded yet, and no link was given")
        return self._link

    def __enter__(self) -> OffloadSavedTensors:
        if not self._hooks and all(slot() is None for slot in self._order):
            self._order.clear()  # every earlier graph is gone
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)

    def wait(self) -> None:
        """Wait for every copy out; afterwards the device holds none of their sources."""
        while self._leaving:
            self._retire()

    # --- forward -----------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Handle | _Kept:
        self.packed += 1
        if not self._moves(tensor):
            self.kept += 1
            return _Kept(tensor)
        return _Handle(self._slot(tensor), tensor)

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return False
        if _storage_key(tensor) in self._resident:
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == 0 or nbytes < self._min_bytes:
            return False
        return self._select is None or self._select(tensor)

    def _slot(self, tensor: Tensor) -> _Slot:
        storage = tensor.untyped_storage()
        first, last = byte_span(tensor)
        key = _storage_key(tensor)
        if key not in self._spans:
            self._spans[key] = weakref.WeakSet()
            weakref.finalize(storage, self._spans.pop, key)
        version = tensor._version
        for slot in self._spans[key]:
            if slot.version == version and slot.first_byte <= first and last <= slot.last_byte:
                return slot
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(storage, first, (last - first,), (1,))
        if self._link is None:
            self._link = CudaLink(tensor.device) if tensor.is_cuda else DirectLink()
        slot = _Slot(source, first, version, self.pool)
        self._spans[key].add(slot)
        self._leaving.append((tensor, last - first, version, self.link.send(source, slot.host)))
        self._position[slot] = len(self._order)
        self._order.append(weakref.ref(slot))
        self.moved += 1
        self._retire_finished()
        return slot

    def _retire_finished(self) -> None:
        while self._leaving and self._leaving[0][3].done():
            self._retire()
        if self._in_flight_bytes is not None:
            while sum(entry[1] for entry in self._leaving) > self._in_flight_bytes:
                self._retire()

    def _retire(self) -> None:
        tensor, _, version, ticket = self._leaving.popleft()
        ticket.wait()
        if tensor._version != version:
            raise RuntimeError(
                "a tensor was modified in place while it was being copied out: it is at version "
                f"{tensor._version}, expected version {version}"
            )

    # --- backward ----------------------------------------------------------------------------

    def _unpack(self, packed: _Handle | _Kept) -> Tensor:
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "a tensor saved for the backward pass was modified in place: it is at version "
                    f"{packed.tensor._version}, expected version {packed.version}"
                )
            return packed.tensor
        self.wait()
        slot = packed.slot
        self._fetch(slot)
        self._prefetch(self._position[slot])
        assert slot.restored is not None
        if slot.arrival is not None:
            slot.arrival.wait()
            slot.arrival = None
        tensor = torch.empty(0, dtype=packed.dtype, device=slot.device)
        tensor.set_(slot.restored.untyped_storage(), packed.offset, packed.size, packed.stride)
        slot.waiting.discard(packed.key)
        if not slot.waiting:  # all its users have it; the tensors themselves keep it alive now
            slot.restored = None
            slot.waiting = set(slot.handles)
        return tensor

    def _fetch(self, slot: _Slot) -> None:
        if slot.restored is None:
            slot.restored = torch.empty(slot.nbytes, dtype=torch.uint8, device=slot.device)
            slot.arrival = self.link.fetch(slot.host, slot.restored)

    def _prefetch(self, position: int) -> None:
        budget = self._prefetch_bytes
        for index in range(position - 1, -1, -1):
            slot = self._order[index]()
            if slot is None:
                continue
            budget -= slot.nbytes
            if budget < 0:
                return
            self._fetch(slot)


def resident_tensors(model: nn.Module | Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """Parameters and buffers of modules, and tensors as they are.

    TypeError for anything else, and for one tensor that is not in a list.
    """
    found: list[Tensor] = []
    given: list[nn.Module | Tensor]
    given = [model] if isinstance(model, nn.Module) else items("model", model, Tensor, nn.Module)
    for item in given:
        if isinstance(item, nn.Module):
            found += [*item.parameters(), *item.buffers()]
        else:
            found.append(item)
    return found


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of the tensor's storage that move when it is saved: (first, last + 1)."""
    view = saved_view(tensor)
    storage = tensor.untyped_storage().nbytes()
    if moves_whole_storage(view):
        return 0, storage
    return view.first_byte, view.last_byte


def saved_view(tensor: Tensor, resident: bool = False) -> SavedView:
    """The facts about a saved tensor that decide what is transferred."""
    instance("tensor", tensor, Tensor)
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor is of layout {tensor.layout}, not torch.strided")
    resident = flag("resident", resident)
    return SavedView(
        storage=_storage_key(tensor),
        storage_bytes=tensor.untyped_storage().nbytes(),
        offset=int(tensor.storage_offset()),
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        resident=resident,
    )


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
