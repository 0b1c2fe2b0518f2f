"""What the site has beyond the pages in the tree: every claim in full, from committed records."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from figures import verdict_table


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that only the site has."""
    text = verdict_table.claims_in_full(verdict_table.collect(local=False))
    files.append(File.generated(config, "claims-in-full.md", content=text))
    return files
