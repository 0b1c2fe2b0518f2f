"""The process of the Hopper guard on the host backend, with kernels that hang, die or are wrong.

    python tests/support/guard_rehearsal.py NAME...

``FAULTS`` (JSON) maps the name of an implementation to "hangs", "dies" or "wrong"; it shows in
launches whose blocks take several tiles only, as on a card a fault of the persistent loop would.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

from kernels.host import HostBackend
from repro.instruments import hopper_cases
from repro.instruments.hopper_cases import Sizes

FAULTS: dict[str, str] = json.loads(os.environ.get("FAULTS", "{}"))
BLOCKS = 3


class FaultyCard(HostBackend):
    """A host backend with many multiprocessors, on which one implementation is broken."""

    kind: str | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.multiprocessors = BLOCKS

    def launch(self, kernel: Any, grid: Any, shared_bytes: Any, args: Any, *rest: Any, **more: Any) -> None:
        stays = "persistent" in kernel.entry
        super().launch(kernel, grid, shared_bytes, args, *rest, **more)
        if self.kind is None or not stays or self.tiles(args) <= BLOCKS:
            return
        if self.kind == "hangs":
            time.sleep(600)
        if self.kind == "dies":
            raise SystemExit("CUDA error: an illegal memory access was encountered")
        maps = [arg.array for arg in args if hasattr(arg, "array")]
        out = next(array for array in maps if array.access == "w")
        ctypes.memset(out.pointer, 0x3F, out.extent_bytes)  # 0.75 and a bit everywhere

    @staticmethod
    def tiles(args: Any) -> int:
        """Query tiles of a forward's launch: (B, H, N, D) of the first tensor map, 128 rows."""
        batch, heads, rows, _ = args[0].array.shape
        return int(batch * heads * -(-rows // 128))


if __name__ == "__main__":
    from repro.attention import launcher

    card = FaultyCard(checks=False)
    launcher._host = lambda checks: card  # type: ignore[assignment]
    tried = hopper_cases.fault

    def fault(name: str, listed: Any, device: str) -> str | None:
        card.kind = FAULTS.get(name)
        return tried(name, listed, device)

    hopper_cases.fault = fault
    hopper_cases.main(sys.argv[1:], "cpu", Sizes(heads=2, seqlen=130, few=70, long=0))
