"""The archive of a paper's supplement: records, figures, tables, environment, commit, checksums.

The same inputs give the same bytes: entries are sorted, owned by nobody and dated by the commit.
And the unpacking of an archive that came from elsewhere, which is trusted with nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import platform
import tarfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from repro.measuring import machine
from repro.measuring.progress import say
from repro.measuring.records import RESULTS

#: Files at the top of the checkout that an archive carries.
TOP = ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "requirements.lock", "Makefile")
PACKAGES = ("analysis", "kernels", "repro", "figures", "tests", "examples", "docs")
DRAWN = (".svg", ".png", ".csv", ".md", ".html")


def write(path: Path, drawn: Path) -> list[str]:
    """Write a .tar.gz and return the names in it.

    drawn: the folder of figures and tables. Raises ValueError where it is no folder or has none,
    where ``path`` is a folder, or where this is no checkout.
    """
    if not machine.CHECKOUT:
        raise ValueError("an archive is made from a checkout, this is an installed package")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file to write")
    if drawn == Path() or not drawn.is_dir():
        raise ValueError(f"no folder {str(drawn)!r} of figures and tables: run `make figures` first")
    contents = dict(_contents(drawn))
    if not any(name.startswith("figures/out/") for name in contents):
        raise ValueError("nothing is drawn yet: run `make figures` (or `make report`) first")
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(contents.items()))
    contents["SHA256SUMS"] = sums.encode()
    folder = path.name.removesuffix(".tar.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    moment = _commit_time()
    try:
        with (
            open(draft, "wb") as file,
            gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, data in sorted(contents.items()):
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), moment, 0o644
                tar.addfile(entry, io.BytesIO(data))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return sorted(contents)


#: An archive from elsewhere may hold this much, unpacked.
EXTRACT_LIMIT_BYTES = 256 << 20
EXTRACT_LIMIT_FILES = 10_000


def extract(path: Path, to: Path) -> list[Path]:
    """Unpack a .tar.gz without its first folder into ``to``; returns the files.

    Raises ValueError, before anything is written, for what is no such archive, for links and other
    things that are no plain files, for a name that leads out of ``to``, and for too much.
    """
    try:
        with tarfile.open(path, "r:gz") as tar:
            wanted = [(_inside(path, member), member) for member in tar if not member.isdir()]
            total = sum(member.size for _, member in wanted)
            if total > EXTRACT_LIMIT_BYTES or len(wanted) > EXTRACT_LIMIT_FILES:
                raise ValueError(
                    f"{path}: {len(wanted)} files of {total} bytes; the limits are "
                    f"{EXTRACT_LIMIT_FILES} and {EXTRACT_LIMIT_BYTES}"
                )
            for name, member in wanted:
                content = tar.extractfile(member)
                assert content is not None
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                (to / name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a whole .tar.gz archive ({error})") from None
    return [to / name for name, _ in wanted]


def _inside(path: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """Where a member goes. ValueError names one that must not be unpacked."""
    name = PurePosixPath(member.name)
    if not member.isreg():
        raise ValueError(f"{path}: {member.name!r} is no plain file")
    if name.is_absolute() or ".." in name.parts or len(name.parts) < 2:
        raise ValueError(f"{path}: {member.name!r} leads out of the archive's folder")
    return PurePosixPath(*name.parts[1:])


def _contents(drawn: Path) -> Iterator[tuple[str, bytes]]:
    root = machine.ROOT
    for name in _tracked():
        if _own(root / name, root):
            yield name, (root / name).read_bytes()
    for path in sorted(RESULTS.glob("*/*.jsonl")):
        if _own(path, RESULTS):
            yield f"results/{path.parent.name}/{path.name}", path.read_bytes()
    for path in sorted(drawn.glob("*")):
        if path.suffix in DRAWN and not path.name.startswith(".") and _own(path, drawn):
            yield f"figures/out/{path.name}", path.read_bytes()
    yield "COMMIT", f"{machine.commit() or 'unknown'}\n".encode()
    yield "ENVIRONMENT", environment().encode()


def _own(path: Path, root: Path) -> bool:
    """Whether a path leads to something inside ``root``; a link that leads out is said."""
    there = path.resolve()
    if there.is_relative_to(root.resolve()):
        return True
    say(f"{path.relative_to(root)}: leads to {there}, outside; left out of the archive")
    return False


def _tracked() -> list[str]:
    """Sources and papers of the checkout: what git knows of, or else what lies in the packages."""
    listed = machine.git("ls-files", "-z")
    if listed is not None:
        names = [n for n in listed.split("\0") if n]
    else:
        names = [*TOP] + [
            p.relative_to(machine.ROOT).as_posix()
            for package in PACKAGES
            for p in (machine.ROOT / package).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        ]
    wanted = [n for n in names if n in TOP or n.split("/")[0] in PACKAGES]
    return sorted(n for n in wanted if (machine.ROOT / n).is_file())


def environment() -> str:
    """Machine and installed packages, one a line."""
    card = machine.gpu()
    lines = [
        f"python {platform.python_version()}",
        f"system {platform.system()} {platform.machine()}",
        f"cpu {machine.cpu()}",
        f"gpu {card.name}, driver {card.driver}" if card else "gpu none",
        "",
    ]
    packages = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    return "\n".join([*lines, *(f"{n}=={v}" for n, v in sorted(packages.items()))]) + "\n"


def _commit_time() -> int:
    return int(machine.git("log", "-1", "--format=%ct") or 0)
