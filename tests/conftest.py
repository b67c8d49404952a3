"""What every test file shares: eight simulated devices, the hypothesis profiles, and one run of a test per backend."""

import os

# JAX reads it when it starts its backend, so it is set before anything imports jax. Nearly all the time of a test is
# compilation, which takes half as long unoptimised; the deep profile tests what users run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *([] if "JFLASH_TEST_PROFILE" in os.environ else ["--xla_backend_optimization_level=0"]),
    ]
).strip()

import functools
import importlib.metadata
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from refusals import skip_refused

import jflash
from jflash import _dispatch, _settings
from jflash_metal import _ffi

EMULATED = _ffi.available() is None and _ffi.host() == "emulator"

# The fixtures below only name a backend, so one of them may serve all examples of a test.
_ALWAYS = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
hypothesis.settings.register_profile("default", max_examples=3, derandomize=True, database=None, **_ALWAYS)
hypothesis.settings.register_profile("deep", max_examples=300, print_blob=True, **_ALWAYS)
hypothesis.settings.load_profile(os.environ.get("JFLASH_TEST_PROFILE", "default"))


@pytest.fixture(params=_dispatch.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    return request.param


@pytest.fixture(autouse=True)
def own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that the backends come with, whatever was tuned on this machine."""
    monkeypatch.setattr(_settings, "tiles_cache", lambda: None)


@pytest.fixture(autouse=True)
def metal_schedule(request: pytest.FixtureRequest) -> None:
    """Another order of the Metal emulator's threads in every test, the same on every run."""
    if EMULATED:
        _ffi.set_schedule(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def attention(backend: str) -> Callable[..., Any]:
    """`jflash.attention` on this backend; skips, in the backend's own words, a call that it refuses."""

    def call(*args: Any, **kwargs: Any) -> Any:
        skip_refused(backend, *args, **kwargs)
        return jflash.attention(*args, implementation=backend, **kwargs)

    return functools.wraps(jflash.attention)(call)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution is known, as from a checkout on the path."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
