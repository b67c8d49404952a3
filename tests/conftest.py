"""The set-up that every test file shares.

It has eight simulated devices, the hypothesis profiles, one run of a test per backend, and what the short run leaves
out.
"""

import os

# JAX reads the variable when it starts its backend, so it is set before anything imports jax. Nearly all the time of a
# test is compilation, which takes half as long unoptimised; the deep profile tests what users run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *([] if "JFLASH_TEST_PROFILE" in os.environ else ["--xla_backend_optimization_level=0"]),
    ]
).strip()

# In Pallas' interpreter a warpgroup holds threads of XLA's while it waits for another warpgroup. XLA has as many as
# there are devices or cores, and a kernel of three warpgroups has hung with eight on a busy machine.
os.environ.setdefault("PJRT_NPROC", "16")

import ctypes
import functools
import gc
import importlib.metadata
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
import short_run
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _dispatch, _settings
from jflash_metal import _ffi

EMULATED = _ffi.available() is None and _ffi.host() == "emulator"

# The fixtures below only name a backend, so one of them may serve all examples of a test.
_ALWAYS = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
hypothesis.settings.register_profile("default", max_examples=3, derandomize=True, database=None, **_ALWAYS)
hypothesis.settings.register_profile("short", hypothesis.settings.get_profile("default"), max_examples=1)
hypothesis.settings.register_profile("deep", max_examples=300, print_blob=True, **_ALWAYS)
hypothesis.settings.load_profile(os.environ.get("JFLASH_TEST_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """The short run has one example of each property: the simplest, which hypothesis begins with."""
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("short")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the short run leaves out, before `-m` is looked at."""
    plain = [jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)] * 3
    explain = functools.partial(jflash.explain, *plain)
    refusing = {name for name in _dispatch.BACKENDS if "serves" not in explain(implementation=name)}
    short_run.mark_slow(items, lambda value: isinstance(value, str) and value in refusing)


def pytest_collection_finish() -> None:
    """Imported objects stay alive; looking for cycles as often as usual would take a seventh of the time of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def _programs_are_forgotten() -> Iterator[None]:
    """JAX keeps what it traced and compiled for every call, and glibc what was freed: both would come to gigabytes."""
    yield
    if resident_bytes() > 1.5 * 2**30:
        jax.clear_caches()
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else 0


@pytest.fixture(
    params=[pytest.param(name, marks=cover(0) if name == "reference" else ()) for name in _dispatch.BACKENDS]
)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn; the short run has no more of the definition than others are held against."""
    return request.param


@pytest.fixture(params=[name for name, module in _dispatch.BACKENDS.items() if hasattr(module, "backward")])
def split_backend(request: pytest.FixtureRequest) -> str:
    """The backends that jflash splits over devices; `reference` is left to XLA."""
    skip_refused(request.param, *[jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)] * 3)
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
