"""Files are UTF-8 whatever the locale says, and what a terminal cannot show is replaced."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import command_line
from repro.measuring import records

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("analysis", "kernels", "repro", "figures", "examples")
NO_TEXT = ("os.open", "gzip.open", "tarfile.open", "zipfile.open")


def unnamed_encodings(text: str) -> Iterator[int]:
    """Lines with a call that would take its encoding from the locale."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        name = whole.rsplit(".", 1)[-1]
        given = {keyword.arg for keyword in node.keywords}
        if "encoding" in given or whole in (*NO_TEXT, "common.write_text"):
            continue
        constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
        modes = [c for c in constants if isinstance(c, str) and set(c) <= set("rwaxbt+")]
        binary = (modes == [] and name.endswith("TemporaryFile")) or any("b" in m for m in modes)
        opens = whole in ("open", "os.fdopen") or name.endswith("TemporaryFile")
        opens |= name == "open" and len(constants) == len(node.args)  # a path's own method
        if name in ("read_text", "write_text") or "text" in given or (opens and not binary):
            yield node.lineno


def test_every_text_file_has_its_encoding() -> None:
    found = unnamed_encodings(
        "open('a')\nopen('a', 'rb')\np.read_text()\np.write_text('x', encoding='utf-8')\n"
        "run(c, text=True)\nopen('a', encoding='utf-8')\nos.open('a', 0)\nregister.open(self)\n"
        "tempfile.TemporaryFile()\ntempfile.TemporaryFile('w+')\n"
    )
    assert list(found) == [1, 3, 5, 10], "the search finds what it is for"
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources
        for line in unnamed_encodings(path.read_text(encoding="utf-8"))
    ]
    assert len(sources) > 100
    assert wrong == []


ODD = {"PYTHONIOENCODING": "latin-1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "command", [("-m", "repro", "explain", "fig2-left"), ("-m", "repro", "measure", "größe")], ids=" ".join
)
def test_a_terminal_without_utf8_shows_what_it_can(command: tuple[str, ...]) -> None:
    outputs = []
    for encoding in ("latin-1", "utf-8"):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **ODD, "PYTHONIOENCODING": encoding},
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        assert b"Unicode" not in done.stderr
        assert b"codec" not in done.stderr
        outputs.append((done.stdout + done.stderr).decode(encoding))
    odd, right = outputs
    assert odd == right.encode("latin-1", "replace").decode("latin-1")


def test_every_program_shows_what_it_can() -> None:
    """Each starts through what replaces characters, or has none to replace."""
    programs = [
        (path, text.rpartition('if __name__ == "__main__":')[2])
        for package in (*PACKAGES, ".ci")
        for path in sorted((ROOT / package).rglob("*.py"))
        if 'if __name__ == "__main__":' in (text := path.read_text(encoding="utf-8"))
    ]
    wrong = [
        str(path.relative_to(ROOT))
        for path, start in programs
        if not any(f"{name}(" in start for name in ("program", "cli.run", "show_what_can_be_shown"))
        and not path.read_text(encoding="utf-8").isascii()
    ]
    assert len(programs) > 20
    # Its letters are in comments; that it runs where nothing but ASCII can be shown is tested.
    assert wrong == ["examples/attention_in_40_lines.py"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_program_replaces_what_its_output_cannot_show(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])

    def main() -> None:
        print("12 µs → größer")
        raise ValueError("Ω is no unit")

    assert command_line.program(main) == 1
    assert command_line.program(lambda: 3) == 3
    shown = [stream.buffer.getvalue() for stream in streams if stream.flush() is None]
    assert shown[0] == "12 µs → größer\n".encode(encoding, "replace")
    assert shown[1] == "error: Ω is no unit\n".encode(encoding, "replace")


def test_a_kernel_compiles_in_the_c_locale(tmp_path: Path) -> None:
    code = "from kernels.host.compiler import runtime_library as r; print(r()._name)"
    for odd in (ODD, {}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **odd},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_records_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    row = records.Record(experiment="x", implementation="a", metric="m", source="measured", value=1.0, unit="µs")
    path = tmp_path / "x.jsonl"
    records.append(path, [row, row])
    plain = list(records.read(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(records.read(path)) == plain
    records.append(path, [row])
    assert len(list(records.read(path))) == 3
    path.write_bytes(path.read_bytes().decode().encode("utf-16"))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: not JSON"):
        list(records.read(path))
