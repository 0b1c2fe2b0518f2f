"""What reaches NVIDIA's driver, by cuda.bindings or without it: into a library that stands for it.

The launches of a plan, prepared once and queued with addresses, must be those of the general way,
byte for byte; tensor maps must say what the hardware needs. Neither needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.command_support import program

CASES = ("persistent", "one tile", "optimistic", "backward", "in turns", "early forward", "early", "sm_80")
EARLY = [6, 1]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


@pytest.fixture(scope="module", params=["cuda.bindings", "ctypes"])
def report(request: pytest.FixtureRequest) -> Any:
    """By cuda.bindings, and where that is missing."""
    if request.param == "ctypes":
        return program("driver_report.py", WITHOUT="cuda,cuda.bindings")
    pytest.importorskip("cuda.bindings.driver")
    return program("driver_report.py")


@pytest.mark.parametrize("case", CASES)
def test_prepared_launches_are_the_general_ones(report: Any, case: str) -> None:
    found = report["cases"][case]
    general, prepared = found["general"], found["prepared"]
    assert len(general) == len(found["entries"])
    assert len({launch["function"] for launch in general}) == len(set(found["entries"]))
    assert prepared == general
    assert all(launch["stream"] == 0xABC0 for launch in prepared)


@pytest.mark.parametrize("case", CASES)
def test_only_addresses_differ_elsewhere(report: Any, case: str) -> None:
    """Every address once more, 2⁴⁰ further on, and nothing else."""
    found = report["cases"][case]
    moved = 0
    for here, there in zip(found["prepared"], found["elsewhere"], strict=True):
        assert {**here, "arguments": 0} == {**there, "arguments": 0}
        for old, new in zip(here["arguments"], there["arguments"], strict=True):
            if old[0] in found["addresses"]:
                moved += 1
                assert new == [old[0] + (1 << 40), *old[1:]]
            else:
                assert new == old
    assert moved >= len(found["addresses"])


def test_every_array_reaches_a_kernel(report: Any) -> None:
    for found in report["cases"].values():
        passed = {argument[0] for launch in found["prepared"] for argument in launch["arguments"]}
        assert set(found["addresses"]) <= passed


def test_a_tensor_map_s_fields(report: Any) -> None:
    """(B, H, N, D) = (1, 2, 8192, 128), rows first in memory, 176 keys a box: by hand."""
    main = report["cases"]["one tile"]["prepared"][0]
    _, k = main["arguments"][:2]
    address, kinds, *rest = k
    assert address == (1 << 33) + (1 << 30)  # the second array
    # bf16, rank 5, no interleave, 128-byte swizzle, 256 bytes of L2 promotion, zero fill
    assert [kinds >> shift & 0xFF for shift in range(0, 48, 8)] == [9, 5, 0, 3, 3, 0]
    sizes, strides, boxes = rest[:5], rest[5:9], rest[9:]
    assert sizes == [64, 8192, 2, 2, 1]
    assert strides[:3] == [2 * 2 * 128, 128, 2 * 128]
    assert strides[3] % 16 == 0  # of a single batch: any multiple of 16
    assert [box & 0xFFFFFFFF for box in boxes] == [64, 176, 2, 1, 1]
    assert [box >> 32 for box in boxes] == [1] * 5


def test_dependent_launches_and_no_others_say_so(report: Any) -> None:
    attributes = {
        case: [launch["attribute"] for launch in found["prepared"]] for case, found in report["cases"].items()
    }
    assert attributes.pop("early") == [[0, 0], EARLY, EARLY]
    assert attributes.pop("early forward") == [[0, 0], EARLY]
    assert all(none == [0, 0] for found in attributes.values() for none in found)


def test_threads_do_not_mix_their_addresses(report: Any) -> None:
    """Backward passes of two threads may share a plan: one writes addresses while one launches."""
    assert report["lost"] == 0


def test_a_refused_launch_names_kernel_and_reason(report: Any) -> None:
    assert report["refused"].startswith("flash_forward")
    assert "the driver refuses the launch: CUDA_ERROR_INVALID_VALUE" in report["refused"]
