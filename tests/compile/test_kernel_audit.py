"""The audit of compiled kernels: up to date, without a spill, and able to notice either."""

from __future__ import annotations

import dataclasses

import pytest

from kernels import audit
from kernels.building import nvrtc
from kernels.building.compile import nvrtc_version
from kernels.launch import Kernel
from kernels.sass import code as sass

NEEDS_TOOLS = pytest.mark.skipif(sass.find_nvdisasm() is None, reason=sass.MISSING)


def small() -> list[audit.Subject]:
    """Two subjects that compile fast."""
    found = [s for s in audit.subjects() if "preprocess" in s.name]
    return [found[0], next(s for s in found if s.arch == "sm_80")]


@pytest.fixture
def small_page(monkeypatch: pytest.MonkeyPatch) -> str:
    listed = small()
    monkeypatch.setattr(audit, "subjects", lambda: listed)
    versions = [nvrtc_version()]
    return audit.written([audit.row(subject, versions) for subject in listed], versions)


def test_the_page_is_up_to_date_and_nothing_spills() -> None:
    if not audit.TABLE.exists():
        pytest.skip("docs/kernel-audit.csv is not there: make audit")
    assert audit.complaints(audit.TABLE.read_text()) == []


@NEEDS_TOOLS
def test_lines_of_the_page_are_what_the_compiler_says() -> None:
    if not audit.TABLE.exists():
        pytest.skip("docs/kernel-audit.csv is not there: make audit")
    versions, lines = audit.read(audit.TABLE.read_text())
    shared = [version for version in versions if version in nvrtc.versions()]
    if not shared:
        pytest.skip(f"the page was made with NVRTC {versions}, here is {nvrtc.versions()}")
    there = {(line[0], line[1]): line for line in lines}
    for subject in small():
        line = [cell.split(" / ") for cell in there[subject.name, subject.arch]]
        for version in shared:
            mine = tuple(cell[versions.index(version) % len(cell)] for cell in line)
            assert audit.row(subject, [version]) == mine


def test_versions_that_differ_have_a_value_each(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"13.0": ("k", "128", "0"), "13.5": ("k", "168", "0")}
    monkeypatch.setattr(audit, "_facts", lambda subject, version: facts[version])
    subject = small()[0]
    assert audit.row(subject, ["13.0", "13.5"]) == ("k", "128 / 168", "0")
    assert audit.row(subject, ["13.5"]) == facts["13.5"]
    text = audit.written([facts["13.0"]], ["13.0", "13.5"])
    assert audit.read(text) == (("13.0", "13.5"), [facts["13.0"]])


@NEEDS_TOOLS
def test_a_page_says_what_it_is_about(small_page: str) -> None:
    assert audit.complaints(small_page) == []
    versions, lines = audit.read(small_page)
    assert versions == (nvrtc_version(),)
    for subject, line in zip(small(), lines, strict=True):
        values = dict(zip(audit.HEADER, line, strict=True))
        assert values["kernel"] == subject.name
        assert 0 < int(values["registers"]) <= 255
        assert int(values["16-byte accesses"]) > 0
        assert int(values["blocks an SM"]) * subject.kernel.threads <= 2048


@NEEDS_TOOLS
def test_what_is_wrong_is_named(small_page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = small()
    _, lines = audit.read(small_page)
    code = lines[0][-1]
    assert audit.complaints(small_page.replace(code, "00000000")) == [f"out of date: {first.name} {first.arch}"]
    spilled = [tuple("8" if i == 5 else c for i, c in enumerate(line)) for line in lines]
    assert audit.complaints(audit.written(spilled, ["13.0"])) == [
        f"spills 8 bytes: {s.name} {s.arch}" for s in (first, second)
    ]
    assert audit.complaints(audit.written(lines[:1], ["13.0"])) == [f"missing: {second.name} {second.arch}"]
    monkeypatch.setattr(audit, "subjects", lambda: [first])
    assert audit.complaints(small_page) == [f"unknown: {second.name} {second.arch}"]
    with pytest.raises(ValueError, match="no table of kernel, arch"):
        audit.read("nothing")


def test_comments_and_spacing_do_not_count() -> None:
    subject = small()[0]
    text = subject.kernel.text()

    def code(source: str) -> str:
        kernel = Kernel(source, subject.kernel.entry, subject.kernel.macros, subject.kernel.threads)
        return dataclasses.replace(subject, kernel=kernel).code

    assert code("// a remark\n\n" + text) == subject.code
    assert code(text.replace("0.0f", "1.0f")) != subject.code
    assert code(text + '\n#include "philox.cuh"\n') != subject.code


def test_every_subject_has_a_name_of_its_own() -> None:
    listed = audit.subjects()
    assert len({(s.name, s.arch) for s in listed}) == len(listed)
    assert {s.arch for s in listed} == set(audit.CARDS)
