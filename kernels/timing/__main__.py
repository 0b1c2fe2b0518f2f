"""``python -m kernels.timing [NAME ...]`` records the clocks of our kernels anew, by default all.

After a change of their source: the kernels are compiled and followed through the model of an SM.
Minutes; needs NVRTC, nvdisasm and a C compiler, no GPU. ``python -m repro.timing tables`` then
writes the pages' tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from kernels.command_line import program
from kernels.timing import followed_warps, hopper_packed_time, hopper_time
from kernels.timing.sm80_time import TARGETS

RECORDS: dict[str, Callable[[], None]] = {
    "hopper": hopper_time.record,
    "hopper-packed": hopper_packed_time.record,
    **{target.name: partial(followed_warps.record, target) for target in TARGETS},
}
"""What is recorded, by name."""


def main(asked: list[str] | None = None) -> None:
    """Records what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m kernels.timing", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECORDS, []], metavar="NAME", help=f"of {', '.join(RECORDS)}")
    for name in parser.parse_args(asked).names or RECORDS:
        RECORDS[name]()


if __name__ == "__main__":
    sys.exit(program(main))
