"""Every environment variable that jflash reads, and every folder that it writes to, in one place."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def metal_cache() -> Path:
    """Return the folder for compiled shaders of the Metal emulator: `JFLASH_METAL_CACHE`, else in the user's cache
    folder."""
    given = os.environ.get("JFLASH_METAL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jflash" / "metal"


def tiles_cache() -> Path | None:
    """Return the folder for tuned tiles: in the user's cache folder, as platformdirs knows it.

    Without platformdirs, which tuning needs anyway, it is `None`.
    """
    if importlib.util.find_spec("platformdirs") is None:
        return None
    import platformdirs

    return platformdirs.user_cache_path("jflash") / "tiles"
