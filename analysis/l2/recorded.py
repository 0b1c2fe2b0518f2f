"""The order in which a recorded launch walked, as events for ``analysis.l2.replay``.

``kernels.attention.forward(progress=...)`` notes of each block its SM and times. Between two notes
a block is taken to walk evenly; nothing else is assumed, so a replay has no pace left to choose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analysis.l2.launch import BLOCK, Launch, Table


def events(launch: Launch, progress: npt.NDArray[np.int64], every: int) -> Table:
    """(events, 3): SM, block, step, in order of time.

    progress: (blocks, notes): SM, start, time after each ``every`` tiles, end; 0: no note.
    Raises ValueError for notes that are not those of the launch.
    """
    if progress.ndim != 2 or len(progress) != len(launch.blocks):
        raise ValueError(f"progress of shape {progress.shape} is not of {len(launch.blocks)} blocks")
    steps = launch.blocks[:, BLOCK.index("steps")]
    found: list[tuple[npt.NDArray[np.float64], Table]] = []
    for block, (row, count) in enumerate(zip(progress, steps, strict=True)):
        times = row[1:-1]
        noted = int(np.count_nonzero(times))
        start, end = float(times[0]), float(row[-1])
        if noted - 1 > count // every or not start <= times[:noted].max() <= max(end, start):
            raise ValueError(f"block {block}: notes {row.tolist()} are not of {count} steps")
        known = np.arange(noted) * float(every)
        at = times[:noted].astype(float)
        if count > known[-1]:
            known, at = np.append(known, float(count)), np.append(at, max(end, at[-1]))
        step = np.arange(count)
        when = np.concatenate([[start], np.interp(step, known, at), [max(end, start)]])
        which = np.concatenate([[-1], step, [-2]])
        rows = np.stack([np.full(len(which), row[0]), np.full(len(which), block), which], axis=1)
        found.append((when, rows.astype(np.int64)))
    order = np.argsort(np.concatenate([when for when, _ in found]), kind="stable")
    return np.concatenate([rows for _, rows in found])[order]


def spread(progress: npt.NDArray[np.int64]) -> float:
    """How far apart blocks are: the standard deviation of their durations over the mean."""
    durations = (progress[:, -1] - progress[:, 1]).astype(float)
    durations = durations[progress[:, -1] > 0]
    if not len(durations) or durations.mean() == 0:
        raise ValueError("no block noted its end")
    return float(durations.std() / durations.mean())
