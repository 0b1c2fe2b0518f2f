"""Finding experiments and figures: a module each, in the folders of their package."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from pathlib import Path


def in_folders(package: str, init: str, *, without: Collection[str] = ()) -> dict[str, str]:
    """Stem of a module -> its dotted name, of every folder of a package but ``without``.

    init: the package's ``__init__.py``. Modules beside it, and those that begin with ``_``, do not
    count.
    """
    found = {}
    root = Path(init).parent
    for folder in pkgutil.iter_modules([str(root)]):
        if not folder.ispkg or folder.name in without:
            continue
        for module in pkgutil.iter_modules([str(root / folder.name)]):
            if not module.name.startswith("_"):
                found[module.name] = f"{package}.{folder.name}.{module.name}"
    return found
