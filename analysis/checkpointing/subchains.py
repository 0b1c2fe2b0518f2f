"""Which subchains i..l of a chain are copies of one another.

Networks repeat their blocks, so far fewer than L^2/2 subchains differ; a table over subchains
needs one row for each that does.
"""

from __future__ import annotations

import numpy as np

from .chain import Chain


class Subchains:
    """index[i, l] (1-based) numbers the subchain i..l; representatives[number] is its first (i, l),
    in an order in which every subchain comes after all the shorter ones inside it.

    Two subchains are the same when their stages agree in every cost, in the size and gradient of
    their input, and in whether they end the chain.
    """

    def __init__(self, chain: Chain) -> None:
        costs, length = chain.costs, len(chain)
        columns = [column[1:].tolist() for column in costs[:7]]
        columns += [costs.activation[:-1].tolist(), costs.gradient[:-1].tolist()]
        columns += [[False] * (length - 1) + [True]]
        letters: dict[tuple, int] = {}
        word = [letters.setdefault(key, len(letters)) for key in zip(*columns, strict=True)]
        self.index = np.zeros((length + 2, length + 1), dtype=np.int32)
        self.representatives: list[tuple[int, int]] = []
        seen: dict[tuple[int, int], int] = {}
        previous = [0] * (length + 1)  # previous[i] = number of (i, last - 1)
        for last in range(1, length + 1):
            letter = word[last - 1]
            for first in range(last, 0, -1):
                key = (previous[first] if first < last else -1, letter)
                number = seen.get(key)
                if number is None:
                    number = seen[key] = len(self.representatives)
                    self.representatives.append((first, last))
                previous[first] = number
            self.index[1 : last + 1, last] = previous[1 : last + 1]
