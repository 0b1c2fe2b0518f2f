"""The link's streams where another device is current than the one the tensors lie on.

No GPU is needed: the streams and events of ``torch.cuda`` are replaced by ones that note who waits.
The numbers are checked on a GPU, in tests/gpu/test_host_optimizer_gpu.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from repro.training.link import CudaLink

CURRENT, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """A stream that notes which devices' streams and events it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits: list[torch.device] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waits.append(stream.device)

    def wait_event(self, event: Event) -> None:
        self.waits.append(event.device)


class Event:
    device: torch.device

    def record(self, stream: Stream) -> None:
        self.device = stream.device


@pytest.mark.parametrize("direction", ["send", "fetch"])
def test_both_sides_wait_on_the_device_of_the_tensors(monkeypatch, direction: str) -> None:
    compute = {device: Stream(device) for device in (CURRENT, OTHER)}
    made: list[Stream] = []

    def make(device: torch.device) -> Stream:
        made.append(Stream(device))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute[device or CURRENT])

    link = CudaLink(OTHER)
    source, target = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    ticket = getattr(link, direction)(source, target)
    assert [stream.waits for stream in made].count([OTHER]) == 1, "the copy follows the computation"
    ticket.wait()
    assert compute[OTHER].waits == [OTHER], "the computation follows the copy"
    assert compute[CURRENT].waits == []
    assert torch.equal(target, source)
