"""Tables that commands write into pages of the documentation, each between two markers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.files import write_whole
from kernels.launch import KERNELS_DIR

PAGES_DIR = KERNELS_DIR.parent / "docs" / "pages"


@dataclass(frozen=True)
class Block:
    """What ``python -m command`` writes of a page."""

    page: str
    name: str
    command: str

    @property
    def path(self) -> Path:
        """The page's file."""
        return PAGES_DIR / self.page

    @property
    def markers(self) -> tuple[str, str]:
        """The lines before and after the table."""
        return (f"<!-- {self.name}: written by `python -m {self.command}` -->", f"<!-- end of {self.name} -->")

    def shown(self, text: str) -> str:
        """What stands between the markers of a page's text."""
        return text.split(self.markers[0])[1].split(self.markers[1])[0].strip()

    def put(self, table: str, text: str) -> str:
        """A page's text with this table between the markers."""
        before, rest = text.split(self.markers[0])
        after = rest.split(self.markers[1])[1]
        return f"{before}{self.markers[0]}\n\n{table}\n\n{self.markers[1]}{after}"

    def write(self, table: str, path: Path | None = None) -> None:
        """Put the table into the page."""
        path = path or self.path
        write_whole(path, self.put(table, path.read_text(encoding="utf-8")).encode())
