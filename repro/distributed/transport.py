"""Counts what a process sends and receives, at its TCP sockets: below torch, below gloo, and
without formulas.

The kernel keeps the bytes of each connection, both ways (``TCP_INFO``, Linux 4.19 or newer). The
sum over this process's connections, before and after, is what a step moved, message headers
included.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from types import TracebackType

#: Offsets in ``struct tcp_info``: bytes received, all bytes sent, and those of them sent again.
_BYTES_RECEIVED, _BYTES_SENT, _BYTES_RETRANSMITTED, _LENGTH = 128, 200, 208, 216


def moved_so_far() -> dict[int, tuple[int, int]]:
    """Bytes sent and received by every TCP connection of this process, by inode of its socket.

    Raises OSError where the kernel does not count them.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed in the meantime
            continue
        if not target.startswith("socket:["):
            continue
        with socket.socket(fileno=os.dup(int(name))) as one:
            if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        if len(info) < _LENGTH:
            raise OSError(f"TCP_INFO has {len(info)} bytes, {_LENGTH} are needed to count")
        places = (_BYTES_SENT, _BYTES_RETRANSMITTED, _BYTES_RECEIVED)
        sent, again, received = (struct.unpack_from("Q", info, at)[0] for at in places)
        found[int(target[8:-1])] = (sent - again, received)
    return found


class TransportBytes:
    """Context: what this process sent and received within, on all its TCP connections."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._before: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> TransportBytes:
        self._before = moved_so_far()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(0.05)  # gloo's own thread may still be writing
        for inode, (sent, received) in moved_so_far().items():
            sent_before, received_before = self._before.get(inode, (0, 0))
            self.sent_bytes += sent - sent_before
            self.received_bytes += received - received_before
