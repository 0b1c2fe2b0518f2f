"""Everything is in pyproject.toml, except that records go into the wheel.

In the checkout they lie in results/, where measuring writes them; in the wheel they are inside the
package that reads them, as repro/results/.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RESULTS = Path(__file__).resolve().parent / "results"
#: Rows of records, and what was read of machine code.
KEPT = (".jsonl", ".csv", ".xz")


class WithRecords(build_py):
    """Copies what is committed; results/local is what this machine measured itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in sorted(RESULTS.glob("*/*")):
            if source.suffix in KEPT and source.parent.name != "local":
                target = Path(self.build_lib, "repro", "results", source.parent.name, source.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


setup(cmdclass={"build_py": WithRecords})
