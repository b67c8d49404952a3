"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata


def installed(package: str) -> str | None:
    """The package's version; `None` if it is not installed, as a checkout on the path is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
