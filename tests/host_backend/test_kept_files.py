"""What is kept between runs is loaded only if it is whole and could not be planted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import files, native
from analysis.checkpointing.native import library as planner
from kernels.building import cache
from kernels.host import HostCompileError, compiler

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        compiler.find_compiler(os.environ.get("CXX"))
    except HostCompileError as error:
        pytest.skip(str(error))
    chosen = tmp_path / "cache"
    monkeypatch.setenv("REPRO_CACHE_DIR", str(chosen))
    return chosen


def build(text: str = ANSWER) -> Path:
    return compiler.build(text, compiler.KERNEL_FLAGS, "probe", "")


def answer(library: Path) -> int:
    """In a process of its own: a library that is cut short can kill the one that loads it."""
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def put(path: Path, data: bytes) -> None:
    """Another file in the place of ``path``. A library that this process has loaded must not be
    written to: its pages would be gone, and whoever looks at all loaded objects would crash."""
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [lambda data: b"", halved, flipped], ids=["empty", "cut", "bit"])
def test_a_damaged_library_is_built_again(folder: Path, damage) -> None:
    kept = build()
    whole = kept.read_bytes()
    assert build() == kept
    put(kept, damage(whole))
    again = build()
    assert answer(again) == 42
    assert again.read_bytes() == whole


@pytest.mark.parametrize("damage", [lambda data: b"", halved, flipped], ids=["empty", "cut", "bit"])
def test_a_damaged_cubin_or_log_is_noticed(tmp_path: Path, damage) -> None:
    path = tmp_path / "a" / "x.cubin"
    cache.write_checked(path, b"\x7fELF and more")
    assert cache.read_checked(path) == b"\x7fELF and more"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read_checked(path) is None
    assert cache.read_checked(tmp_path / "absent") is None


def plant(library: Path, folder: Path) -> Path:
    """Another library under the name that its digest gives it."""
    draft = folder / "evil.so"
    draft.write_bytes(library.read_bytes() + b" ")
    planted = library.parent / f"{files._digest(draft.read_bytes())}.so"
    library.unlink()
    shutil.move(draft, planted)
    return planted


def test_a_folder_that_everybody_can_write_is_refused(folder: Path) -> None:
    build()
    for place in (folder, folder / "host"):
        before = place.stat().st_mode
        place.chmod(0o777)
        said = f"every user of this machine can write to {place}.*REPRO_CACHE_DIR"
        with pytest.raises(HostCompileError, match=said):
            build()
        with pytest.raises(PermissionError, match="every user"):
            files.private(folder / "host")
        place.chmod(before)
    # As /tmp: everybody can write, but nobody can replace what is ours.
    folder.chmod(0o1777)
    assert answer(build()) == 42


@as_root
def test_what_another_user_planted_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    kept = build()
    planted = plant(kept, tmp_path)
    os.chown(planted, 12345, 12345)
    assert build() == kept
    assert not planted.exists()
    os.chown(folder / "host", 12345, 12345)
    with pytest.raises(HostCompileError, match=r"host belongs to another user \(uid 12345\)"):
        build()


def test_what_the_group_could_have_changed_is_built_again(folder: Path, tmp_path: Path) -> None:
    kept = build()
    planted = plant(kept, tmp_path)
    planted.chmod(0o775)
    (folder / "host").chmod(0o775)
    assert build() == kept
    assert not planted.exists()
    assert not (folder / "host").stat().st_mode & 0o022


def test_the_planners_library_is_kept_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if planner("float") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    native.library.cache_clear()
    try:
        assert planner("float") is not None
        (kept,) = (tmp_path / "native").glob("fill-*/*.so")
        whole = kept.read_bytes()
        put(kept, b"")
        native.library.cache_clear()
        assert planner("float") is not None
        assert kept.read_bytes() == whole
        tmp_path.chmod(0o777)
        native.library.cache_clear()
        assert planner("float") is None
    finally:
        native.library.cache_clear()


KILLED = """
import os, signal, sys
from pathlib import Path
from analysis import files
with files.workshop(Path(sys.argv[1])) as draft:
    (draft / "half").write_text("x")
    print(draft, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_FILE = """
import os, signal, sys
from pathlib import Path
from analysis import files
files.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
files.write_whole(Path(sys.argv[1]) / "a.json", b"new")
"""


def test_a_killed_build_leaves_nothing_once_another_one_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert left.is_dir()
    with files.workshop(tmp_path) as first:
        assert not left.exists()
        with files.workshop(tmp_path) as second:
            assert first.is_dir(), "a live one stays"
            assert second != first
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_write_leaves_the_old_file_and_its_draft_goes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"old")
    (tmp_path / ".b.json.1.draft").write_bytes(b"of another file")
    command = [sys.executable, "-c", KILLED_FILE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a.json").read_bytes() == b"old"
    assert len(list(tmp_path.glob(".a.json.*.draft"))) == 1
    files.write_whole(tmp_path / "a.json", b"newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.json.1.draft", "a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"newer"


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    target.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_whole(target, b"new")
    assert caught.value.filename == str(target)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert target.read_bytes() == b"old"


@as_root
@pytest.mark.parametrize("home", [None, "/", "/nowhere/at/all"])
def test_a_user_without_a_home_has_a_cache(home: str | None, tmp_path: Path, monkeypatch) -> None:
    """As in a container started under any number: no HOME, no entry in the list of users."""
    for name in ("REPRO_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(files.tempfile, "tempdir", None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(54321)
            os.setuid(54321)
            os.write(writer, str(files.cache_dir()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert said.read() == f"{files.tempfile.gettempdir()}/recompute-repro-54321"
    os.waitpid(child, 0)


def test_the_cache_is_where_it_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPRO_CACHE_DIR", "mine")
    assert files.cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("REPRO_CACHE_DIR", "")
    assert files.cache_dir() == ROOT / ".cache"
    monkeypatch.setattr(files, "ROOT", tmp_path)  # no pyproject.toml: installed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_dir() == tmp_path / "xdg" / "recompute-repro"
