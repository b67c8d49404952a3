"""A call that a backend refuses is no test of it: the skip's reason is the refusal."""

from typing import Any

import pytest

import jflash


def skip_refused(backend: str, *args: Any, **kwargs: Any) -> None:
    """Skip the running test if `backend` refuses this call, with its `unsupported()`'s sentence."""
    verdict, *refusals = jflash.explain(*args, implementation=backend, **kwargs).splitlines()
    if refusals:
        pytest.skip(f"{verdict} {refusals[0].strip()}")
