"""A call that a backend refuses is no test of it: the skip's reason is the refusal."""

from typing import Any

import pytest

import jflash


def skip_refused(backend: str, *args: Any, **kwargs: Any) -> None:
    """Skip the running test if `backend` refuses this call, with its `unsupported()`'s sentence."""
    verdict, *others = jflash.explain(*args, implementation=backend, **kwargs).splitlines()
    if not verdict.startswith(f"{backend} serves"):
        pytest.skip(f"{verdict} {others[0].strip()}")
