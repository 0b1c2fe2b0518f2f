"""Hardware counters: parsing and every refusal, with a fake ncu; no GPU is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repro.instruments.counters import (
    BUSY_SECTIONS,
    HOW_BUSY,
    METRICS,
    CounterError,
    KernelBusy,
    KernelCount,
    count_kernels,
    ncu_command,
    parse_busy,
    parse_csv,
    split_by_cell,
    watch_kernels,
)

COLUMNS = ["ID", "Kernel Name", "Grid Size", *METRICS.values()]


def quoted(values: list[str]) -> str:
    return ",".join(f'"{v}"' for v in values)


def raw_page(rows: list[list[str]], unit: str = "byte") -> str:
    head = [quoted(COLUMNS), quoted(["", "", "", *[unit] * len(METRICS)])]
    return "\n".join(["==PROF== Connected to process 7", *head, *map(quoted, rows)]) + "\n"


def kernel(index: int, name: str, grid: str, *values: str) -> list[str]:
    return [str(index), name, grid, *values]


PAGE = raw_page(
    [
        kernel(0, "cell_marker", "(1, 1, 1)", "0", "0", "32", "0"),
        kernel(1, "flash_forward", "(4, 1, 1)", "24,576", "100", "24576", "8580"),
        kernel(2, "cell_marker", "(2, 1, 1)", "0", "0", "32", "0"),
        kernel(3, "void at::native::softmax<float>(float*)", "(9, 1, 1)", "1", "2", "3", "4"),
        kernel(4, "gemm", "(9, 2, 1)", "5", "6", "7", "8"),
    ]
)


def fake_ncu(folder: Path, *, writes: str = "", says: str = "", code: int = 0) -> str:
    """An executable that behaves like ncu would: writes the log, prints, exits."""
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"text, says, code = {writes!r}, {says!r}, {code!r}\n"
        "log = sys.argv[sys.argv.index('--log-file') + 1]\n"
        "if text:\n    open(log, 'w').write(text)\n"
        "print(says)\n"
        "sys.exit(code)\n"
    )
    script.chmod(0o755)
    return str(script)


def test_kernels_are_read_in_bytes_and_belong_to_the_cell_of_the_last_marker() -> None:
    cells = split_by_cell(parse_csv(PAGE))
    assert list(cells) == [0, 1]
    assert cells[0] == [
        KernelCount(
            "flash_forward",
            (4, 1, 1),
            {("hbm", "read"): 24576, ("hbm", "write"): 100, ("sm", "read"): 24576, ("sm", "write"): 8580},
        )
    ]
    assert [k.name for k in cells[1]] == ["softmax", "gemm"]


def test_a_cell_without_kernels_is_there_and_empty() -> None:
    page = raw_page([kernel(0, "cell_marker", "(3, 1, 1)", "0", "0", "0", "0")])
    assert split_by_cell(parse_csv(page)) == {2: []}


def test_a_kernel_before_the_first_marker_is_refused() -> None:
    page = raw_page([kernel(0, "gemm", "(1, 1, 1)", "1", "1", "1", "1")])
    with pytest.raises(CounterError, match="gemm was counted before the first cell marker"):
        split_by_cell(parse_csv(page))


def test_kilobytes_are_not_taken_for_bytes() -> None:
    page = raw_page([kernel(0, "gemm", "(1, 1, 1)", "1", "1", "1", "1")], unit="Kbyte")
    with pytest.raises(CounterError, match="'Kbyte', not in bytes"):
        parse_csv(page)


def test_a_missing_value_is_an_error_not_a_zero() -> None:
    page = raw_page([kernel(0, "gemm", "(1, 1, 1)", "n/a", "1", "1", "1")])
    with pytest.raises(CounterError, match="no number for gemm"):
        parse_csv(page)


def test_a_run_under_a_working_ncu(tmp_path: Path) -> None:
    counts = count_kernels(["true"], timeout_s=30, ncu=fake_ncu(tmp_path, writes=PAGE))
    assert [c.name for c in counts][:2] == ["cell_marker", "flash_forward"]


@pytest.mark.parametrize(
    ("says", "code", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "no permission"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", 1, "does not expose"),
        ("==WARNING== No kernels were profiled.", 0, "profiled no kernel inside the NVTX range"),
        ("RuntimeError: out of memory", 1, "ended with 1: RuntimeError: out of memory"),
        ("", 0, "wrote no kernel rows"),
    ],
)
def test_every_refusal_is_one_line(tmp_path: Path, says: str, code: int, message: str) -> None:
    ncu = fake_ncu(tmp_path, says=says, code=code)
    with pytest.raises(CounterError, match=message) as raised:
        count_kernels(["true"], timeout_s=30, ncu=ncu)
    assert "\n" not in str(raised.value)


def test_how_busy_units_were_is_read_under_ncu_s_own_names(tmp_path: Path) -> None:
    tensor = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    banks = "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed"
    columns = ["ID", "Kernel Name", "Grid Size", tensor, banks, "sm__cycles.max", "lts__x.pct"]
    rows = [
        ["0", "cell_marker", "(1, 1, 1)", "0", "0", "7", "1"],
        ["1", "flash_backward_sm90", "(4, 1, 1)", "71.25", "n/a", "1,000", "2"],
    ]
    page = "\n".join(map(quoted, [columns, ["", "", "", "%", "%", "cycle", "%"], *rows]))
    found = watch_kernels(["true"], timeout_s=30, ncu=fake_ncu(tmp_path, writes=page))
    # What is no percentage, no number, or says nothing of an SM's units is left out.
    assert split_by_cell(found) == {0: [KernelBusy("flash_backward_sm90", (4, 1, 1), {tensor: 71.25})]}
    with pytest.raises(CounterError, match="no percentage of"):
        parse_busy(PAGE)
    asked = ncu_command(["true"], tmp_path / "log", "ncu", HOW_BUSY)
    assert "--metrics" not in asked
    assert asked.count("--section") == len(BUSY_SECTIONS)
    assert "--metrics" in ncu_command(["true"], tmp_path / "log", "ncu")


def test_a_missing_ncu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CounterError, match=r"ncu .* is not on PATH"):
        count_kernels(["true"], timeout_s=1)


def test_a_hung_run_ends_at_its_limit(tmp_path: Path) -> None:
    script = tmp_path / "ncu"
    script.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    script.chmod(0o755)
    with pytest.raises(CounterError, match=r"did not finish within 0\.5 s"):
        count_kernels(["true"], timeout_s=0.5, ncu=str(script))
