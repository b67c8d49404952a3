"""Every environment variable that jflash reads, in one place."""

from __future__ import annotations

import os
from pathlib import Path


def metal_cache() -> Path:
    """Where the Metal emulator keeps compiled shaders: `JFLASH_METAL_CACHE`, else the user's own cache folder."""
    given = os.environ.get("JFLASH_METAL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jflash" / "metal"
