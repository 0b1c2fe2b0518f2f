"""Our four packages belong together; a file of the user's with the name of one breaks them.

Run by the others from its place on the disk, before they import anything of ours: what Python finds
under the name ``analysis`` may be somebody else's.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shadow(name: str) -> str | None:
    """The file that Python would import as ``name`` in the place of ours; None if it is ours."""
    try:
        found = find_spec(name)
    except ValueError:  # a module made by hand, without an origin
        return f"a module {name!r} that is already imported"
    if found is None:
        return f"nothing (no package {name!r} is found)"
    places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
    ours = any(Path(place).resolve().is_relative_to(ROOT / name) for place in places)
    return None if ours else ", ".join(places)


def require(*names: str) -> None:
    """ImportError, saying which file and what to do, if one of our packages is not ours."""
    for name in names:
        instead = shadow(name)
        if instead is not None:
            raise ImportError(
                f"{instead} is imported as {name!r} in the place of {ROOT / name}, which "
                "recompute-repro needs: rename it, or start Python in another folder"
            )
