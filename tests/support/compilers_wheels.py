"""Programs of tests that need the compiler's wheels: `pip install .[hopper-compiler]`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(program: str, directory: Path, *arguments: str) -> Any:
    """What a program of this folder prints last, as JSON; skips where the wheels are not installed."""
    missing = [name for name in ("jax_cuda13_plugin", "nvidia.cu13") if not _is_there(name)]
    if missing:
        pytest.skip(f"The compiler's wheels are not installed: {missing}; pip install .[hopper-compiler]")
    command = [sys.executable, Path(__file__).parent / program, directory, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
