"""How the programs of this project end: an error is one line and a non-zero exit status.

0 is success, 1 an error, 2 a command line that cannot be (with a hint at ``--help``), 130 an
interruption. A reader that closes the pipe (``| head``) is no error.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable

#: Set to 1 to see where an error came from.
TRACEBACK_VARIABLE = "REPRO_TRACEBACK"


def program(main: Callable[[], object]) -> int:
    """Run a program that reads its arguments by argparse; returns the exit status, which is
    ``main``'s result where that is a number.

    For programs without the packages that a rented machine may lack.
    """
    show_what_can_be_shown()
    try:
        status = main()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return ended(error)
    return status if isinstance(status, int) else 0


def ended(error: BaseException) -> int:
    """Say in one line what ended a program; its exit status."""
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted; run the same command again to go on")
        return 130
    if isinstance(error, BrokenPipeError):
        # Python flushes stdout once more at exit; into nothing, or it would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
        return 2
    # click's own errors (an unknown option, ...) know their text, status and command.
    message = getattr(error, "format_message", None)
    text = message() if message else str(error)
    _say(f"error: {text.strip() or type(error).__name__}")
    if message is None:
        return 1
    context = getattr(error, "ctx", None)
    if context is not None:
        _say(f"try: {context.command_path} --help")
    return int(getattr(error, "exit_code", 1))


def show_what_can_be_shown() -> None:
    """A character that standard output or error has no code for becomes "?", not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
