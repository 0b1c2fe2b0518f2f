"""A new figure: ``EXPERIMENTS`` and ``draw(frame)``, and it is drawn like all others.

In the package this file would be ``figures/bytes/my_figure.py``; ``make figures`` finds it by its
name, and ``make figures/out/my_figure.svg`` measures what it needs. Here it goes to a folder of
choice.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

from figures import common
from figures.common import Drawing, End, curve, finish, key, note, pick
from repro.experiments import tidy

EXPERIMENTS = ("fig2-middle",)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Which tensor the re-reads are of: bytes by tensor against the column block."""
    rows = pick(frame, metric="traffic_bytes", implementation="flash1-released")
    rows = rows.assign(gigabytes=rows["value"] / 1e9)
    figure, axes = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
    ends: list[End] = []
    for tensor, colour in {"q": "#0072B2", "out_tmp": "#D55E00", "k": "#009E73"}.items():
        ends += curve(axes, pick(rows, tensor=tensor, direction="read"), "block_n", tensor, colour, y="gigabytes")
    title, blocks = "Q and O are read again for every column block, K is not", sorted(rows["block_n"].unique())
    finish(axes, title, x=blocks, ends=ends, xlabel="column block Bc (keys)", ylabel="reads (GB)")
    key(axes, "host backend", published=False, loc="upper right")
    note(figure, "FlashAttention 2022, forward, N = 1024, d = 64, 16 heads, batch 64.")
    columns = ["source", "tensor", "direction", "block_n", "value"]
    return Drawing(figure, rows[columns].sort_values(columns[:-1]))


def main(folder: Path = Path("my-figures")) -> list[Path]:
    """Draw it; PNG, SVG and CSV are the same bytes every time."""
    common.style()
    return common.save("my_figure", draw(tidy(EXPERIMENTS)), folder)


if __name__ == "__main__":
    for path in main(*map(Path, sys.argv[1:2])):
        print(path)
