"""Compiles what comes on standard input, for ``kernels.building.second_nvrtc``."""

from __future__ import annotations

import os
import pickle
import sys

from kernels.building.compile import compile_here


def main() -> None:
    """Answer until there is no more to read."""
    # Whatever a library prints goes to standard error, not between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            kernel, arch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: object
        try:
            answer = compile_here(kernel, arch)
        except Exception as error:  # the caller's to raise
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
