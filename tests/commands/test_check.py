"""``make check K=…`` passes a right kernel and names what is wrong with a faulty one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from analysis.traffic import Traffic
from kernels import attention
from kernels.host import HostBackend
from repro import check, check_decode, prediction
from repro.instruments.decode_work import DecodeOperands


def forward_of_standard() -> check.Subject:
    return next(check.subjects("standard.cu", 8, "fp32"))


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("flash_backward_dq.cu", {("flash-split", "backward")}),
        (
            "flash1_forward.cu",
            {("flash1-literal", "forward"), ("flash1-skip-first", "forward"), ("flash1-released", "forward")},
        ),
    ],
)
def test_a_source_is_checked_in_every_pass_that_launches_it(source, passes) -> None:
    found = list(check.subjects(source, 64, "fp16"))
    assert {(s.algorithm, s.pass_) for s in found} >= passes
    assert {s.shape.causal for s in found} == {False, True}
    assert all(source in {k.source for k in s.kernels} for s in found)


def test_a_source_of_no_attention_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no attention pass launches beside/gemm_tiled\.cu"):
        list(check.subjects("beside/gemm_tiled.cu", 64, "fp16"))


def test_a_right_kernel_passes_and_the_command_says_so(capsys) -> None:
    assert check.main(["flash1_forward", "--head-dim", "16", "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "flash1-released forward d=16 fp32 causal: right, bytes as predicted" in said


def test_the_decoding_kernels_are_checked_in_every_form(capsys, monkeypatch) -> None:
    assert check.main(["flash_decode", "--dtype", "fp16"]) == 0
    said = capsys.readouterr().out
    assert "decode d=64 fp16 fp8 cache, 3 splits: right, bytes as predicted" in said
    assert check.main(["flash_decode_merge", "--dtype", "fp16"]) == 0
    assert "flash_decode_merge" in capsys.readouterr().out
    real = check_decode.flash_decode

    def short(*arguments: Any) -> Any:
        kernels = {name: dict(entries) for name, entries in real(*arguments).items()}
        kernels["flash_decode"]["k", "read"] -= 16
        return kernels

    monkeypatch.setattr(check_decode, "flash_decode", short)
    monkeypatch.setitem(check_decode.BOUNDS, "fp16", 1e-9)
    said = check_decode.wrong(next(check_decode.subjects(64, "fp16")))
    whole = sum(check_decode.SEQLENS) * 2 * 64 * 2  # 2 heads of 64 columns of 2 bytes
    assert f"flash_decode k read: {whole} B counted, {whole - 16} predicted" in said
    assert any(each.startswith("sequence 0: out is off by") for each in said)


def test_rows_that_see_nothing_must_be_zero(monkeypatch) -> None:
    real = DecodeOperands.launch

    def launch(operands: DecodeOperands, *rest: Any) -> None:
        real(operands, *rest)
        operands.out[2] = 1

    monkeypatch.setattr(DecodeOperands, "launch", launch)
    first = next(check_decode.subjects(32, "fp32"))
    assert check_decode.wrong(first) == ["sequence 2: rows that see no key are not 0"]


def test_a_wrong_result_is_named(monkeypatch) -> None:
    real = attention.forward

    def forward(backend: Any, algorithm: str, q: Any, k: Any, v: Any, out: Any, *rest: Any, **options: Any) -> None:
        real(backend, algorithm, q, k, v, out, *rest, **options)
        if isinstance(backend, HostBackend):  # and not a recorder, whose arrays have no memory
            ctypes.c_float.from_address(out.pointer).value += 0.01

    monkeypatch.setattr(attention, "forward", forward)
    (complaint,) = check.wrong(forward_of_standard())
    assert complaint.startswith("out: error 0.01 above")


def test_a_byte_too_many_is_named(monkeypatch) -> None:
    real = prediction.predict_traffic

    def less(*arguments: Any, **options: Any) -> Traffic:
        kernels = {k: dict(v) for k, v in real(*arguments, **options).kernels.items()}
        kernels["standard_scores"]["q", "read"] -= 1
        return Traffic(kernels)

    monkeypatch.setattr(prediction, "predict_traffic", less)
    (complaint,) = check.wrong(forward_of_standard())
    assert complaint.startswith("standard_scores q read: ")
    counted, predicted = (int(word) for word in complaint.split() if word.isdigit())
    assert counted == predicted + 1


def test_an_unknown_kernel_is_one_line(capsys) -> None:
    assert check.main(["nonsense"]) == 1
    assert "no kernels/nonsense.cu; there are" in capsys.readouterr().err
