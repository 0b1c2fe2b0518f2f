"""FlashAttention-2's machine code on the model of an A100: what is read, recorded and compared."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from analysis.flops import paper_flops
from analysis.shapes import AttentionShape, Tile
from kernels.sass.listing import parse_listing
from repro.experiments import Context, UnavailableError
from repro.experiments.gpu import ampere_time
from repro.gpu.register import predictions
from repro.measuring import records
from repro.timing import ampere_validation, flash2_time


def shape_of(seqlen: int, head_dim: int, causal: bool = False, batch: int = 1) -> AttentionShape:
    heads = 2048 // head_dim
    return AttentionShape(batch, heads, seqlen, seqlen, head_dim, dtype="fp16", causal=causal)


def test_the_struct_has_lengths_and_strides_where_the_kernels_read_them() -> None:
    found = flash2_time.arguments("forward", 512, 64, causal=True)
    assert struct.unpack_from("<2i", found, 180) == (512, 512)
    assert struct.unpack_from("<3q", found, 48) == (64, 64, 64)  # rows of q, k, v
    assert struct.unpack_from("<2i", found, 388) == (-1, 0)  # a causal window
    assert struct.unpack_from("<2i", flash2_time.arguments("forward", 512, 64, False), 388) == (-1, -1)
    gradients = struct.unpack_from("<5q", flash2_time.arguments("backward", 512, 64, False), 464)
    assert all(gradients)
    assert len(set(gradients)) == 5


def test_an_entry_is_found_by_its_template_arguments() -> None:
    name = (
        "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64ELi128ELi128ELi4ELb0"
        "ELb0EN7cutlass6half_tE19Flash_kernel_traitsILi64ELi128ELi128ELi4ES3_EELb0ELb{}ELb0ELb0ELb1"
        "ELb1ELb0ELb0EEEvNS_16Flash_fwd_paramsE"
    )
    cubin = b"\0.text." + name.format(1).encode() + b"\0"
    assert flash2_time.entry_in(cubin, "forward", 64, causal=True) == name.format(1)
    assert flash2_time.entry_in(cubin, "forward", 64, causal=False) is None
    assert flash2_time.entry_in(cubin, "forward", 128, causal=True) is None
    assert flash2_time.entry_in(cubin, "backward", 64, causal=True) is None


def test_a_folder_without_the_kernels_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.cubin").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no forward for head_dim=64, causal=False in the cubins"):
        flash2_time.record(tmp_path, "2.8.0")


def test_a_block_walks_as_many_tiles_as_it_is_asked_for() -> None:
    """A loop over the key length, where the kernels read it."""
    code = parse_listing(
        [
            "1---000 MOV R0, c[0x0][0x218]",
            ".L_x_0:",
            "1---000 IADD3 R0, R0, -0x80, RZ",
            "1---000 ISETP.GT.AND P0, PT, R0, RZ, PT",
            "1---000 @P0 BRA `(.L_x_0)",
            "1---000 EXIT ",
        ]
    )
    for rounds in (1, 2, 7):
        found = flash2_time.program(code, "forward", 64, False, rounds)
        assert len(found.ways) == 4
        assert found.ways[0].steps.count(1) == rounds


def test_every_form_is_on_record_with_its_tile() -> None:
    for (pass_, head_dim), form in flash2_time.FORMS.items():
        line = flash2_time.recorded((pass_, head_dim, True))
        assert line.tile == flash2_time.recorded((pass_, head_dim, False)).tile
        assert (line.tile, line.blocks_per_sm) == (form.tile, form.blocks_per_sm)
        assert 1 <= line.slowdown <= line.blocks_per_sm


def test_blocks_start_with_the_first_tile_of_a_head() -> None:
    shape = AttentionShape(1, 2, 512, 512, 64, dtype="fp16", causal=True)
    assert list(flash2_time._rounds("forward", Tile(128, 128), shape)) == [1, 2, 3, 4] * 2
    assert list(flash2_time._rounds("backward", Tile(128, 128), shape)) == [4, 3, 2, 1] * 2


def test_work_is_counted_as_in_the_paper() -> None:
    """§4.1: 4 N² d heads of a forward, 2.5 times that of a backward, half under a causal mask."""
    forward = paper_flops(shape_of(1024, 64, batch=16), "forward")
    assert forward == 4 * 1024**2 * 64 * 32 * 16
    assert paper_flops(shape_of(1024, 64, batch=16), "backward") == 2.5 * forward
    causal = paper_flops(shape_of(1024, 64, True, batch=16), "forward")
    assert causal == forward / 2


def test_predictions_of_their_code_are_within_what_the_page_and_the_changelog_say() -> None:
    """All within 11 %, and all but one too slow."""
    ratios = [p.theirs / p.published for p in ampere_validation.points()]
    assert ampere_validation.errors(ratios)[1] < 0.11
    assert sum(ratio < 1 for ratio in ratios) == 31


def test_every_time_is_registered_once_and_is_what_the_model_says() -> None:
    """A model or a kernel that changes by more registers new cells beside these."""
    path = records.RESULTS / "registered" / f"{ampere_time.EXPERIMENT.name}.jsonl"
    cells = ampere_time.cells()
    rows = [row for row in records.read(path) if row.cell in {one.id for one in cells}]
    assert all(row.date and row.commit and row.source == "predicted" for row in rows)
    rows.sort(key=lambda row: [one.id for one in cells].index(row.cell))
    today = [now for cell in cells for now in predictions("ampere-time", cell)]
    for row, now in zip(rows, today, strict=True):
        assert (row.cell, row.implementation) == (now.cell, now.implementation)
        assert now.value == pytest.approx(row.value, rel=0.05)


def test_other_cards_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    with pytest.raises(UnavailableError, match=r"of an A100, compute capability 8\.0"):
        ampere_time.EXPERIMENT.measured(ampere_time.cells()[0], Context("cuda"))
