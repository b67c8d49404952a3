"""The versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def installed(package: str) -> str | None:
    """Return the package's version, or `None` if it is not installed, as with a checkout that is only on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
