"""The versions that `make` installs: write them, and check that they can be had everywhere.

    python .ci/lock.py check          # make check-install
    python .ci/lock.py check --install      # and install once, as a newcomer's machine would
    python .ci/lock.py write          # make lock: pyproject.toml has changed; other pins stay
    python .ci/lock.py write --upgrade
    python .ci/lock.py lowest FILE    # the oldest versions that pyproject.toml allows, torch apart

A wheel on the disk of one machine once hid that the versions did not fit together anywhere else. So
this resolves with every local setting of pip and uv taken away: folders of wheels, extra indexes,
constraints. Only what it takes to reach a registry stays (certificates, proxies), and a registry
that is set by hand is asked only where the public one does not answer. Resolving reads metadata; no
package is downloaded except uv, which does it for all platforms.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
UV = "uv==0.13.9"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
EVERYWHERE = ("test", "dev", "docs")
LINUX = ("cuda12", "cuda13")
HEADER = """\
# Versions that `make` installs: pip install -c requirements.lock -e ".[test,dev,docs]"
# Written by `make lock`; checked by `make check-install` for Python 3.11 to 3.14 on Linux (x86-64,
# aarch64) and macOS. A constraint takes effect only where its package is needed: a torch built
# without CUDA leaves the nvidia packages out. No hashes: they would refuse such a torch.
"""
#: What a connection needs; everything else that speaks to pip or uv is dropped.
KEPT = re.compile(r"PATH|HOME|USER|LANG|LC_\w+|TMPDIR|\w+_proxy|\w+_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE")


class UnreachableError(Exception):
    """No package registry answers."""


class ConflictError(Exception):
    """The versions do not fit together; the message is the resolver's."""


def pip_settings() -> dict[str, str]:
    """What pip's files and environment say here, by option: {"cert": "/etc/ssl/...", ...}."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout
    found = re.findall(r"^(?:global|install|user|site|:env:)\.([\w-]+)='(.*)'$", said, re.MULTILINE)
    return dict(found)


def clean_environment(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a machine without local wheels, with this one's certificates and proxy."""
    kept = {name: value for name, value in environment.items() if KEPT.fullmatch(name)}
    kept["PIP_CONFIG_FILE"] = os.devnull  # pip then reads no file at all
    kept["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    certificates = settings.get("cert") or environment.get("PIP_CERT")
    if certificates:
        kept |= {"PIP_CERT": certificates, "SSL_CERT_FILE": certificates}
    if settings.get("proxy"):
        kept |= {"HTTP_PROXY": settings["proxy"], "HTTPS_PROXY": settings["proxy"]}
    return kept


class Resolver:
    """uv in a folder of its own, in the clean environment.

    Raises UnreachableError when neither the public registry nor one set for this machine has it.
    """

    def __init__(self, folder: Path) -> None:
        settings = pip_settings()
        self.environment = clean_environment(os.environ, settings)
        self.environment |= {"UV_CACHE_DIR": str(folder / "cache"), "UV_NO_CONFIG": "1"}
        self.environment["UV_PYTHON_DOWNLOADS"] = "never"
        self.environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest that torch has wheels for
        venv.create(folder / "tool", with_pip=True)
        self.bin = folder / "tool" / "bin"
        try:
            self._install_uv()
        except UnreachableError:
            own = settings.get("index-url", "")
            if not own.startswith(("http://", "https://")):
                raise
            self.environment |= {"PIP_INDEX_URL": own, "UV_DEFAULT_INDEX": own}
            self._install_uv()

    def _install_uv(self) -> None:
        command = [self.bin / "python", "-m", "pip", "install", "-q", "--retries", "1", UV]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnreachableError((done.stderr.strip().splitlines() or ["pip failed"])[-1])

    def compile(self, *options: str) -> str:
        """Output of `uv pip compile pyproject.toml`: a line for each package."""
        done = subprocess.run(
            [self.bin / "uv", "pip", "compile", "pyproject.toml", "--no-header", "--no-annotate", *options],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConflictError(done.stderr.strip())
        return done.stdout

    def platform(self, python: str, platform: str, *options: str) -> str:
        """What an installation on one platform gets; wheels only, nothing is built."""
        extras = EVERYWHERE if "darwin" in platform else EVERYWHERE + LINUX
        return self.compile(
            *(f"--extra={extra}" for extra in extras),
            f"--python-version={python}",
            f"--python-platform={platform}",
            "--only-binary=:all:",
            *options,
        )

    def universal(self, pins: Path, *options: str) -> str:
        """A lock for every platform; the pins that are in the file already stay where they can."""
        return self.compile("--all-extras", "--universal", "--python-version=3.11", "-o", str(pins), *options)


def pins(text: str) -> set[str]:
    """The lines that pin a package, without markers: {"torch==2.13.0", ...}."""
    lines = (line.split(";")[0].strip() for line in text.splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def check(resolver: Resolver, folder: Path) -> list[str]:
    """What is wrong with the lock, a message for each fault."""

    def fault(where: tuple[str, str]) -> str | None:
        python, platform = where
        try:
            found = pins(resolver.platform(python, platform, "-c", str(LOCK)))
        except ConflictError as conflict:
            return f"Python {python}, {platform}:\n{conflict}"
        loose = found - pins(LOCK.read_text(encoding="utf-8"))
        print(f"Python {python}, {platform}: {len(found)} packages", flush=True)
        if loose:
            return f"Python {python}, {platform}: not pinned: {', '.join(sorted(loose))}"
        return None

    with ThreadPoolExecutor(2) as pool:
        faults = [f for f in pool.map(fault, itertools.product(PYTHONS, PLATFORMS)) if f]
    again = folder / "requirements.lock"
    again.write_text(LOCK.read_text(encoding="utf-8"), encoding="utf-8")
    try:
        resolver.universal(again)
        changed = pins(again.read_text(encoding="utf-8")) ^ pins(LOCK.read_text(encoding="utf-8"))
        if changed:
            faults.append(f"pyproject.toml asks for others (make lock): {sorted(changed)}")
    except ConflictError as conflict:
        faults.append(f"for all platforms at once:\n{conflict}")
    for platform in PLATFORMS:
        try:
            resolver.platform("3.11", platform, "--resolution=lowest-direct")
        except ConflictError as conflict:
            faults.append(f"oldest versions allowed, {platform}:\n{conflict}")
    return faults


def write(resolver: Resolver, folder: Path, upgrade: bool) -> None:
    """Write requirements.lock anew."""
    new = folder / "requirements.lock"
    new.write_text(LOCK.read_text(encoding="utf-8"), encoding="utf-8")
    resolver.universal(new, *(["--upgrade"] if upgrade else []))
    lines = [x for x in new.read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def lowest(resolver: Resolver) -> str:
    """Pins of the oldest direct dependencies that pyproject.toml allows, torch as in the lock.

    torch's own oldest version needs gigabytes of CUDA to be installed, even where there is no GPU.
    """
    torch = next(pin for pin in pins(LOCK.read_text(encoding="utf-8")) if pin.startswith("torch=="))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        print(torch, file=file, flush=True)
        python = "{}.{}".format(*sys.version_info)
        options = (
            "--extra=test",
            f"--python-version={python}",
            "--only-binary=:all:",
            "--resolution=lowest-direct",
            "-c",
            file.name,
        )
        found = resolver.compile(*options)
    unneeded = re.compile(r"(nvidia-|cuda-toolkit|triton)")  # torch brings its own, or needs none
    return "".join(f"{pin}\n" for pin in sorted(pins(found)) if not unneeded.match(pin))


def install(resolver: Resolver, folder: Path) -> None:
    """What `make` does on a new machine, into a folder that is thrown away afterwards."""
    target = folder / "venv"
    subprocess.run(
        ["make", f"VENV={target}", f"PYTHON={sys.executable}", f"{target}/.installed"],
        cwd=ROOT,
        env=resolver.environment,
        check=True,
    )
    subprocess.run([target / "bin/python", "-m", "repro", "doctor"], cwd=ROOT, env=resolver.environment, check=True)
    files = {f.stat().st_ino: f.stat().st_size for f in target.rglob("*") if f.is_file()}
    print(f"{sum(files.values()) / 1e9:.1f} GB on disk")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("--install", action="store_true")
    commands.add_parser("write").add_argument("--upgrade", action="store_true")
    commands.add_parser("lowest").add_argument("file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            resolver = Resolver(folder)
        except UnreachableError as error:
            print(f"skipped: no package registry is reachable from here ({error})")
            return 0
        if arguments.command == "write":
            write(resolver, folder, arguments.upgrade)
        elif arguments.command == "lowest":
            arguments.file.write_text(lowest(resolver), encoding="utf-8")
        else:
            faults = check(resolver, folder)
            if faults:
                print("\n\n".join(["error: requirements.lock:", *faults]), file=sys.stderr)
                return 1
            if arguments.install:
                install(resolver, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
