"""kernels/README.md says what is so: its bytes are the exact sums, its files exist."""

from __future__ import annotations

import re

import pytest

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.launch import KERNELS_DIR
from kernels.standard import standard_row_bytes

TEXT = (KERNELS_DIR / "README.md").read_text()
SHAPE = AttentionShape(batch=1, heads=1, seqlen_q=1024, seqlen_k=1024, head_dim=64)


def rows() -> list[list[str]]:
    """Cells of the bytes table."""
    table = TEXT.split("<!-- bytes:")[1].split("<!-- end -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_bytes(row: list[str]) -> None:
    algorithm, pass_, tile, read, written, units = row
    block_m, block_n = (int(x) for x in tile.split("×"))
    traffic = predict_traffic(algorithm, SHAPE, Tile(block_m, block_n), pass_)
    assert int(read.replace(" ", "")) == traffic.read_bytes
    assert int(written.replace(" ", "")) == traffic.write_bytes
    assert units == f"{traffic.total_bytes / SHAPE.query_bytes:.1f}"


def test_every_algorithm_is_there() -> None:
    assert {row[0] for row in rows()} >= {"standard", "flash1-literal", "flash1-skip-first", "flash1-released", "flash"}


def test_named_files_exist_and_no_source_is_missing() -> None:
    named = set(re.findall(r"`((?:[a-z]+/)?[a-z0-9_]+\.(?:cu|cuh|py|hpp))`", TEXT))
    bare = {"device_ptx.cuh"}
    missing = {name for name in named - bare if not (KERNELS_DIR / name).exists()}
    assert not missing
    assert {path.relative_to(KERNELS_DIR).as_posix() for path in KERNELS_DIR.rglob("*.cu")} <= named


def test_the_longest_row_of_standard_attention() -> None:
    keys = int(re.search(r"([\d ]+) keys in fp16", TEXT)[1].replace(" ", ""))
    assert standard_row_bytes(keys, "fp16", 128, rows=2) <= SHARED_LIMIT_BYTES
    assert standard_row_bytes(keys + 8, "fp16", 128, rows=2) > SHARED_LIMIT_BYTES
