"""The machine a call will run on, as far as choosing a backend needs to know."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import pathlib
import platform
import subprocess
from collections.abc import Generator, Iterable, Sequence, Set
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.backend import backends
from jax.sharding import AbstractMesh


@dataclasses.dataclass(frozen=True)
class Platform:
    """Where JAX will put the computation."""

    name: str
    """JAX's name: "cpu", "gpu", "tpu", ..."""
    device_kind: str
    """The device as its maker names it, such as "NVIDIA H200"."""
    compute_capability: str | None
    """Of an NVIDIA GPU, such as "9.0"."""
    processors: int | None = None
    """Multiprocessors of a GPU, as far as JAX tells."""

    def __str__(self) -> str:
        return self.name if self.device_kind == self.name else f"{self.name} ({self.device_kind})"


ELSEWHERE = "default"
"""In `lowering_targets`, every platform that it does not name: the word of `jax.lax.platform_dependent`."""

_WITHOUT_DEVICES = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", ELSEWHERE: "another platform"}
"""Platforms that JAX can lower for in a process that has no such device: its names for lowering, and for devices."""

_lowered_for: contextvars.ContextVar[Platform | None] = contextvars.ContextVar("lowered_for", default=None)


def current() -> Platform:
    """The platform that a backend is being traced for; else that of `jax.default_device` or of JAX's first device."""
    return _lowered_for.get() or _platform_of([_default_device()])


@contextlib.contextmanager
def lowered_for(target: Platform) -> Generator[None]:
    """Inside, `current` is the platform that the traced program will run on, whatever the default device."""
    token = _lowered_for.set(target)
    try:
        yield
    finally:
        _lowered_for.reset(token)


def lowering_targets(arrays: Iterable[Any]) -> dict[str, Platform]:
    """The platforms that JAX may lower a call with these arrays for, by JAX's names for lowering.

    First comes the platform of the arrays that are committed to devices, else that of the default device. But JAX
    decides when it lowers: by the arrays that a compiled function is called with, or by what `jax.export` asks.
    """
    committed = _committed_devices(arrays)
    first = next(iter(committed)).platform if committed else current().name
    targets: dict[str, Platform] = {}
    for name in backends():
        devices = jax.local_devices(backend=name)
        targets[name] = _platform_of([device for device in devices if device in committed] or devices)
    absent = {name: Platform(kind, "unknown", None) for name, kind in _WITHOUT_DEVICES.items() if name not in targets}
    return dict(sorted((targets | absent).items(), key=lambda target: target[1].name != first))


def device_name() -> str:
    """The device as its maker names it; of a CPU the processor and its cores."""
    here = current()
    return f"{_processor()}, {os.cpu_count()} cores" if here.name == "cpu" else here.device_kind


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if device is None:
        return jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def _platform_of(devices: Sequence[Any]) -> Platform:
    """What is true of all these devices of one platform: a backend refuses what needs a fact that it is not told."""

    def shared(attribute: str) -> Any:
        values = {getattr(device, attribute, None) for device in devices}
        return values.pop() if len(values) == 1 else None

    return Platform(
        name=devices[0].platform,
        device_kind=" and ".join(sorted({device.device_kind for device in devices})),
        compute_capability=shared("compute_capability"),
        processors=shared("core_count"),
    )


def _committed_devices(arrays: Iterable[Any]) -> Set[Any]:
    """The devices of the first array that is bound to some."""
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct):
            bound = array.sharding is not None
        else:
            bound = isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.committed
        if bound and not isinstance(getattr(array.sharding, "mesh", None), AbstractMesh):
            return array.sharding.device_set
    return frozenset()


@functools.cache
def _processor() -> str:
    """The processor's name, as far as the system tells."""
    if platform.system() == "Darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
