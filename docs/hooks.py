"""What the site has and the repository does not: each claim in full, judged when it is built."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add the page; it takes as long as judging all claims."""
    from figures import verdict_table

    page = verdict_table.full_page(verdict_table.collect(local=False))
    files.append(File.generated(config, "claims_in_full.md", content=page))
    return files
