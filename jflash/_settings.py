"""Every environment variable that jflash reads, and every folder that it writes to, in one place."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def metal_cache() -> Path:
    """Where the Metal emulator keeps compiled shaders: `JFLASH_METAL_CACHE`, else the user's own cache folder."""
    given = os.environ.get("JFLASH_METAL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jflash" / "metal"


def tiles_cache() -> Path | None:
    """Where tuned tiles are: in the user's cache folder, as platformdirs knows it.

    `None` without platformdirs, which tuning needs anyway.
    """
    if importlib.util.find_spec("platformdirs") is None:
        return None
    import platformdirs

    return platformdirs.user_cache_path("jflash") / "tiles"
