"""The model of time judged on a prototype whose kernels were timed on an H200.

``results/prototype`` holds the machine code of 42 variants and 78 times. The variants are in two
halves by a rule that knows nothing of the times: sorted by the SHA-256 of their names, every second
one belongs to the first half. What can be decided about the model (which of several published
mechanisms to use) was decided on the first half; the second was looked at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def halves(names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """First and second half of the variants."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return frozenset(ranked[0::2]), frozenset(ranked[1::2])
