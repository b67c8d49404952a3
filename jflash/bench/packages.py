"""The question whether a peer's package can be used on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def missing(package: str, module: str) -> str | None:
    """Return the sentence for a package that is not installed; `None` if its module can be found."""
    return None if _can_be_found(module) else f"{package} is not installed."


def unimportable(package: str, load: Callable[[], Any]) -> str | None:
    """Return the sentence for a package that is installed and lacks something it needs; `None` if `load` can import
    it."""
    try:
        load()
    except ImportError as error:
        return f"{package} cannot be imported: {error}"
    return None


def _can_be_found(module: str) -> bool:
    # A search for `a.b` fails with an exception if there is no `a`.
    parent = module.rpartition(".")[0]
    return (not parent or _can_be_found(parent)) and importlib.util.find_spec(module) is not None
