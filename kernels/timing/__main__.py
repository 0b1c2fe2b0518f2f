"""``python -m kernels.timing [NAME ...]`` records the clocks of our kernels anew, by default all.

After a change of their source: the kernels are compiled and followed through the model of an SM.
Minutes; needs NVRTC, nvdisasm and a C compiler, no GPU. ``python -m repro.timing tables`` then
writes the pages' tables.
"""

from __future__ import annotations

import argparse
import sys

from kernels.command_line import program
from kernels.timing import ampere_time, hopper_packed_time, hopper_time, sm80_on_hopper

RECORDS = {
    "ampere": ampere_time.record,
    "hopper": hopper_time.record,
    "hopper-packed": hopper_packed_time.record,
    "sm80-on-hopper": sm80_on_hopper.record,
}
"""What is recorded, by name."""


def main(asked: list[str] | None = None) -> None:
    """Records what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m kernels.timing", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECORDS, []], metavar="NAME",
                        help=f"of {', '.join(RECORDS)}")  # fmt: skip
    for name in parser.parse_args(asked).names or RECORDS:
        RECORDS[name]()


if __name__ == "__main__":
    sys.exit(program(main))
