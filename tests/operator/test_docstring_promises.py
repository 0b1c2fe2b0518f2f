"""No public docstring promises more than a test shows: strong words and errors have their test."""

from __future__ import annotations

import ast
import math
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.algorithms import check_order
from analysis.cache_model import Cache
from analysis.hardware import A100_80GB
from analysis.lower_bounds import matmul_accesses_rectangular
from analysis.parallel_activations import LayerShape, saved_by_tensor
from analysis.shapes import AttentionShape
from analysis.sums.copies import copies
from analysis.tiles import best_tile
from kernels.beside.probes import chain
from kernels.building import nvrtc
from kernels.building.cache import digest
from kernels.hopper_forms import forward_form
from kernels.sass import code as sass
from kernels.sass.listing import listing
from repro.attention.reference import max_error
from repro.attention.validation import resolve_order
from repro.checkpointing import stages_of
from repro.commands.chains import imported_chain
from repro.commands.explain import condition
from repro.commands.predict import rates_of
from repro.distributed import launch, transport
from repro.distributed.ring_attention import merge
from repro.experiments import Cell
from repro.experiments.run import pending
from repro.instruments import cachegrind, counted, inductor_bytes
from repro.instruments.counters import CounterError
from repro.instruments.timing import time_interleaved
from repro.measuring.records import require_folder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("analysis", "kernels", "repro")
STRONG = re.compile(
    r"\bbit for bit\b|\bbitwise\b|\bsame bits\b|\b[Ee]xactly\b|\bExact\b|\b[Nn]ever\b|\balways\b"
    r"|\bguarantee|\bthread-safe|\breproducib|\bno two\b|\bdo not depend\b"
)
ERROR = re.compile(r"\bRaises?\b|\b[A-Z]\w*Error\b")

SHAPE = AttentionShape(1, 1, 64, 64, 64)
LAYER = LayerShape(seqlen=8, batch=1, hidden=8, heads=4)
TINY = replace(A100_80GB, name="tiny", shared_bytes_per_block=64, shared_bytes_per_sm=64)
CODE = sass.Code((sass.Instruction(16, "", "MOV", (), "R1, R2"),), {})
FRAME = pd.DataFrame({"n": [1]})
CELL = Cell(implementation="flash", seqlen_q=1)
CACHE = Cache(1024, 2, 64)
DEVICE: Any = None

#: Who promises -> the test that would fail without it; "" where the word promises nothing.
PROMISES = {
    "analysis.algorithms.Algorithm.deterministic": "test_flash_kernels_features::"
    "test_deterministic_backward_repeats_to_the_bit",
    "analysis.cache_model.predict_misses": "test_gemm_cache::"
    "test_closed_forms_match_a_fully_associative_cache",
    "analysis.checkpointing.heuristics.selective": "test_checkpoint_planners::"
    "test_selective_runs_exactly_the_chosen_kind_again",
    "analysis.checkpointing.optimal.heuristic_plans": "test_checkpoint_optimal::"
    "test_plans_fit_and_beat_every_heuristic_and_larger_budgets_never_cost_more",
    "analysis.checkpointing.optimal.optimal": "test_checkpoint_optimal::"
    "test_plans_fit_and_beat_every_heuristic_and_larger_budgets_never_cost_more",
    "analysis.checkpointing.selection.keep_greedy": "test_checkpoint_optimal::"
    "test_greedy_by_ratio_loses_where_one_large_stage_is_worth_more",
    "analysis.gemm.lower_bound_bytes": "test_gemm_ladder::test_no_tiling_beats_the_lower_bound",
    "analysis.gemm.predict_gemm": "test_gemm_ladder::test_values_and_bytes",
    "analysis.lower_bounds.matmul_accesses_rectangular": "test_docstring_promises::"
    "test_a_product_reads_its_operands_at_least",
    "analysis.optimistic.onset": "test_optimistic::test_onsets",
    "kernels.building.cache.digest": "test_docstring_promises::test_no_two_lists_have_one_digest",
    "kernels.dispatch.choose": "test_hopper_attention::"
    "test_a_deterministic_backward_is_the_same_in_every_order",
    "kernels.hopper.backward": "test_hopper_attention::"
    "test_a_deterministic_backward_is_the_same_in_every_order",
    "kernels.hopper.forward": "test_hopper_optimistic::"
    "test_only_the_tiles_that_overflow_are_done_again",
    "kernels.hopper_forms.forward_form": "test_docstring_promises::"
    "test_a_sawtooth_takes_one_block_a_tile",
    "kernels.host.backend.HostBackend": "test_host_launch::test_a_seed_orders_threads_reproducibly",
    "kernels.beside.probes.chain": "test_docstring_promises::"
    "test_a_chase_has_one_cycle_without_a_pattern",
    "repro.attention.decode.decode_attention": "test_decode_attention::"
    "test_any_problem_is_right_and_moves_the_bytes_predicted",
    "repro.attention.operator.flash_attention": "test_operator_contract::"
    "test_deterministic_gradients_repeat",
    "repro.attention.reference.max_error": "test_docstring_promises::test_nan_is_equal_to_nothing",
    "repro.attention.validation.resolve_scale": "test_edge_cases_layout::"
    "test_ec11_every_spelling_of_scale",
    "repro.checkpointing.case_training.Case": "",
    "repro.checkpointing.cases.failure": "test_checkpoint_fuzz::"
    "test_the_fuzzer_finds_and_shrinks_a_fault",
    "repro.checkpointing.planned.PlannedModel": "test_checkpoint_executor::"
    "test_gradients_are_bitwise_those_of_the_model",
    "repro.distributed.ring_attention.merge": "test_docstring_promises::"
    "test_merging_with_nothing_changes_nothing",
    "repro.distributed.ring_attention.ring_attention": "test_ring_attention::"
    "test_ring_in_fp32_is_as_exact_as_one_rank",
    "repro.instruments.counters.parse_csv": "test_instruments_counters::"
    "test_kilobytes_are_not_taken_for_bytes",
    "repro.measuring.row_files.exclusive": "test_records_reliability::"
    "test_a_second_run_waits_for_the_first_and_measures_nothing_twice",
    "repro.measuring.records.frame": "test_records::"
    "test_the_frame_has_every_column_even_without_rows",
    "repro.training.accumulation.accumulate_gradients": "test_accumulation_gradients::"
    "test_bitwise_equal_where_sums_are_exact",
    "repro.training.link.Pool.take": "test_offload_executor::"
    "test_device_memory_is_freed_and_the_host_pool_counts",
}


def public(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, str]]:
    """Public functions, classes and methods of a module with their docstrings."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name[0] != "_":
                name = f"{prefix}.{child.name}"
                yield name, child, ast.get_docstring(child) or ""
                if isinstance(child, ast.ClassDef):
                    yield from inside(child, name)

    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    yield from inside(ast.parse(path.read_text(encoding="utf-8")), module)  # type: ignore[misc]


def documented() -> list[tuple[str, ast.FunctionDef | ast.ClassDef, str]]:
    paths = (p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py")))
    return [found for p in paths if p.parent.name != "experiments" for found in public(p)]


def test_every_strong_word_has_its_test() -> None:
    promising = {name for name, _, text in documented() if STRONG.search(text)}
    assert promising == set(PROMISES), sorted(promising ^ set(PROMISES))
    for test in filter(None, {*PROMISES.values(), *SHOWN_BY.values()}):
        module, _, function = test.partition("::")
        text = next((ROOT / "tests").rglob(f"{module}.py")).read_text(encoding="utf-8")
        assert f"def {function}(" in text, test


# -- errors ----------------------------------------------------------------------------------------

#: Raised by what others call: name -> the test that sees the error come out of its caller.
SHOWN_BY = {
    "require_a_point": "test_commands_decode::test_a_point_that_cannot_be_is_a_row_with_its_reason",
    "require": "test_shadowed_packages::test_the_file_is_named_in_one_line",
    "workshop": "test_kept_files::test_a_folder_that_everybody_can_write_is_refused",
    "write_checked": "test_kept_files::test_a_full_disk_names_the_file",
    "check_of": "test_edge_cases_arguments_kernels::test_every_argument_is_refused_by_name",
    "check_shapes": "test_edge_cases_arguments_kernels::test_arrays_that_disagree_are_refused",
    "check_arrays": "test_decode_arrays::test_arrays_that_disagree_are_refused",
    "check_decode_arguments": "test_decode_attention::test_refused_before_any_launch",
    "check_values": "test_decode_attention::test_refused_before_any_launch",
    "require_arrays": "test_edge_cases_arguments_kernels::test_arrays_that_disagree_are_refused",
    "require_fit": "test_ladder_arguments::test_tiles_above_the_limit_name_both_numbers",
    "saved": "test_ladder_arguments::test_backward_without_its_forward",
    "import_cupy": "test_host_cupy_arguments::test_without_cupy_there_is_one_clear_line",
    "prepare": "test_driver_calls::test_a_refused_launch_names_kernel_and_reason",
    "check_arguments": "test_edge_cases_arguments::test_the_operator_refuses_by_name",
    "check_tile": "test_edge_cases_arguments::test_the_operator_refuses_by_name",
    "resolve_tile": "test_edge_cases_arguments::test_the_operator_refuses_by_name",
    "check_options": "test_edge_cases_arguments::test_plan_refuses_before_it_profiles",
    "check_sample": "test_edge_cases_arguments::test_plan_refuses_before_it_profiles",
    "require_profiler": "test_checkpoint_memory::"
    "test_a_torch_without_the_private_profiler_is_one_clear_line",
    "join_stages": "test_checkpoint_executor::test_misuse_is_named",
    "unpack": "test_checkpoint_contract::test_what_the_plain_model_refuses_is_refused",
    "present": "test_checkpoint_state::test_what_cannot_be_restored_is_noticed",
    "settle": "test_checkpoint_state::test_what_cannot_be_restored_is_noticed",
    "in_force": "test_checkpoint_contract::test_what_only_a_second_run_reads_is_refused_too",
    "chain_of": "test_commands_plan::test_a_mistake_is_one_line",
    "find_plans": "test_commands_plan::test_a_mistake_is_one_line",
    "transformer_chain": "test_commands_plan::test_a_mistake_is_one_line",
    "require_one_format": "test_commands_plan::test_a_mistake_is_one_line",
    "from_file": "test_commands_gpus::test_a_wrong_file_is_refused_by_field",
    "require_folder": "test_edge_cases_arguments_systems::"
    "test_command_lines_are_refused_before_any_work",
    "resident_tensors": "test_edge_cases_arguments_systems::test_refused_by_name_before_any_work",
    "lengths_of": "test_packed::test_wrong_tables_are_named",
    "resolve": "test_operator_contract::test_wrong_arguments_are_named",
    "seqlens": "test_commands_predict::test_a_mistake_is_one_line_and_no_traceback",
    "windows": "test_commands_predict::test_a_mistake_is_one_line_and_no_traceback",
    "Link": "test_edge_cases_arguments_systems::test_refused_by_name_before_any_work",
}
#: What needs a card, its driver or its profiler to refuse.
NEEDS_A_CARD = {"tensor_map", "encode_tiled", "warm_up"}


def words(node: ast.AST) -> set[str]:
    """Names and short texts in a piece of code."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    found |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return found | {text for text in texts if isinstance(text, str) and text.isidentifier()}


def in_tests_of_errors() -> set[str]:
    """What tests that expect an error mention, with the tables and helpers that they use."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top: dict[str, ast.AST] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                top[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                top |= {t.id: node for t in targets if isinstance(t, ast.Name)}
        todo = [
            node
            for name, node in top.items()
            if name.startswith("test_") and re.search("raises|rror", ast.unparse(node))
        ]
        done: set[str] = set()
        while todo:
            mentioned = words(todo.pop())
            found |= mentioned
            new = (mentioned & set(top)) - done
            done |= new
            todo += [top[name] for name in new]
    return found


def test_every_promised_error_is_seen_by_a_test() -> None:
    """By the name of who promises it: a test that expects an error mentions it, or sees its error
    come out of a caller."""
    raising = {
        node.name
        for _, node, text in documented()
        if ERROR.search(text) and not (isinstance(node, ast.ClassDef) and "Error" in node.name)
    }
    assert len(raising) > 100
    unseen = raising - in_tests_of_errors()
    assert unseen <= set(SHOWN_BY) | NEEDS_A_CARD, sorted(unseen - set(SHOWN_BY) - NEEDS_A_CARD)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: check_order("flash", "forward", "columns"), ValueError, "order='columns'"),
        (lambda: check_order("standard", "forward", "sawtooth"), ValueError, "no order='sawtooth'"),
        (lambda: copies(SHAPE, "forward", ["dk"]), ValueError, "dk"),
        (lambda: saved_by_tensor(LAYER, ranks=3), ValueError, "heads 4 do not divide among 3"),
        (lambda: best_tile(SHAPE, TINY), ValueError, "no tile of head_dim=64 fits tiny"),
        (lambda: listing(CODE), ValueError, "no control fields at 0x10"),
        (lambda: stages_of(5), TypeError, "int"),
        (lambda: stages_of([]), ValueError, "0 stages"),
        (lambda: condition("n", FRAME), ValueError, "expected field=value"),
        (lambda: condition("colour=red", FRAME), ValueError, "no field 'colour'"),
        (lambda: imported_chain("json:dumps", 5, repeats=1), ValueError, "json:dumps"),
        (lambda: rates_of(TINY, "measured"), ValueError, "tiny"),
        (lambda: pending([CELL, CELL], [], "d"), ValueError, "cells listed twice"),
        (lambda: resolve_order(3), TypeError, "order"),  # type: ignore[arg-type]
        (lambda: resolve_order("columns"), ValueError, "columns"),
        (lambda: time_interleaved({}, DEVICE, min_repeats=3, max_repeats=2), ValueError, "=3 and"),
        (lambda: time_interleaved({}, DEVICE, budget_ms=0), ValueError, "budget_ms=0"),
        (lambda: require_folder("../x"), ValueError, "'../x' cannot be a folder"),
    ],
)
def test_errors_of_helpers(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_missing_tools_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    with pytest.raises(RuntimeError, match="nvdisasm"):
        sass.disassemble(b"", "entry")
    monkeypatch.setattr(cachegrind, "missing", lambda: "valgrind is not installed")
    with pytest.raises(RuntimeError, match="valgrind is not installed"):
        cachegrind.count_misses(8, 2, CACHE, CACHE)
    (tmp_path / "libnvrtc.so.13").touch()
    monkeypatch.setenv(nvrtc.SECOND, str(tmp_path))
    with pytest.raises(RuntimeError, match="0 files libnvrtc-builtins"):
        nvrtc.second_version()
    monkeypatch.setenv(nvrtc.SECOND, "")
    monkeypatch.setattr(nvrtc, "versions", lambda: ("13.0",))
    with pytest.raises(ValueError, match=r"NVRTC 12.9 is not at hand, only 13\.0"):
        nvrtc.second_library("12.9")
    monkeypatch.setattr(counted, "count_kernels", lambda *_, **__: [])
    with pytest.raises(CounterError, match="no cell launched a kernel"):
        counted.count_cells([{"implementation": "flash"}], timeout_s=1)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.raises(RuntimeError, match="reports no bytes"):
        inductor_bytes.compiled_bytes(torch.sin, torch.ones(2))
    monkeypatch.setattr(launch, "measured", lambda ranks: [])
    with pytest.raises(RuntimeError, match="2 ranks measured nothing for a"):
        launch.records_of("x", "a", 2, {})


def test_a_kernel_that_does_not_count_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        assert one.type == socket.SOCK_STREAM
        monkeypatch.setattr(transport, "_LENGTH", 1000)
        with pytest.raises(OSError, match="1000 are needed to count"):
            transport.sent_so_far()


# -- strong words that had no test -----------------------------------------------------------------


def test_a_product_reads_its_operands_at_least() -> None:
    for rows, columns, inner, memory in ((1, 1, 1, 1), (3, 5, 7, 10**9), (64, 64, 64, 16)):
        least = matmul_accesses_rectangular(rows, columns, inner, memory)
        assert least >= rows * inner + inner * columns
        assert least >= 2 * rows * columns * inner / memory**0.5 * (1 - 1e-12)


def test_no_two_lists_have_one_digest() -> None:
    lists = [("ab",), ("a", "b"), ("", "ab"), ("ab", ""), ("a", "", "b"), ("b", "a"), ()]
    assert len({digest(*parts) for parts in lists}) == len(lists)


def test_a_sawtooth_takes_one_block_a_tile() -> None:
    for head_dim in (64, 128, 256):
        for seqlen in (1, 4096, 16384):
            if head_dim != 256:
                assert not forward_form(head_dim, False, seqlen, sawtooth=True).persistent


def test_a_chase_has_one_cycle_without_a_pattern() -> None:
    links = chain(4096, 16)
    place, seen = 0, []
    for _ in range(4096 // 16):
        seen.append(place)
        place = int(links[place])
    assert place == 0
    assert sorted(seen) == list(range(0, 4096, 16))
    steps = [(b - a) % 4096 for a, b in pairwise(seen)]
    assert max(steps.count(step) for step in set(steps)) < 8


def test_nan_is_equal_to_nothing() -> None:
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert max_error(nan, nan) == max_error(nan, one) == max_error(one, nan) == math.inf
    assert max_error(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0


def test_merging_with_nothing_changes_nothing() -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    none = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge(out, lse, *none), merge(*none, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    merged = merge(*none, *none)
    assert torch.equal(merged[0], none[0])
    assert torch.equal(merged[1], none[1])
