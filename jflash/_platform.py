"""The machine that a call will run on, as far as choosing a backend needs to know."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Generator, Iterable, Sequence, Set
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.backend import backends
from jax.sharding import AbstractMesh


@dataclasses.dataclass(frozen=True)
class Platform:
    """The kind of devices on which JAX will put the computation."""

    name: str
    """JAX's name: "cpu", "gpu", "tpu", ..."""
    device_kind: str
    """The maker's name of the device, such as "NVIDIA H200"."""
    compute_capability: str | None
    """The compute capability of an NVIDIA GPU, such as "9.0"."""
    processors: int | None = None
    """The number of a GPU's multiprocessors, if JAX tells it."""

    def is_nvidia_since(self, compute_capability: float) -> bool:
        """Say whether the platform is an NVIDIA GPU of this compute capability or a newer one."""
        own = self.compute_capability
        return own is not None and re.fullmatch(r"\d+\.\d+", own) is not None and float(own) >= compute_capability

    def __str__(self) -> str:
        return self.name if self.device_kind == self.name else f"{self.name} ({self.device_kind})"


ELSEWHERE = "default"
"""The name of every other platform in `lowering_targets`: the word of `jax.lax.platform_dependent`."""

_WITHOUT_DEVICES = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", ELSEWHERE: "another platform"}
"""The platforms that JAX can lower for without such a device: its names for lowering, and for devices."""

_lowered_for: contextvars.ContextVar[Platform | None] = contextvars.ContextVar("lowered_for", default=None)


def current() -> Platform:
    """Return the platform that a backend is traced for, or else of `jax.default_device` or JAX's first device."""
    return _lowered_for.get() or _platform_of([_default_device()])


@contextlib.contextmanager
def lowered_for(target: Platform) -> Generator[None]:
    """Make `current`, inside the block, the platform on which the traced program will run."""
    token = _lowered_for.set(target)
    try:
        yield
    finally:
        _lowered_for.reset(token)


def lowering_targets(arrays: Iterable[Any]) -> dict[str, Platform]:
    """Return the platforms that JAX may lower a call with these arrays for, by JAX's names for lowering.

    The platform of the arrays that are committed to devices comes first, or else that of the default device. But JAX
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
    """Return the maker's name of the device, or of a CPU the processor and its cores."""
    here = current()
    return f"{_processor()}, {os.cpu_count()} cores" if here.name == "cpu" else here.device_kind


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if device is None:
        return jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def _platform_of(devices: Sequence[Any]) -> Platform:
    """Return what is true of all these devices of one platform: a backend refuses a call that needs a missing fact."""

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
    """Return the devices of the first array that is bound to some."""
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
    """Return the processor's name, as far as the system tells."""
    if platform.system() == "Darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
