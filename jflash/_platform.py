"""The machine a call will run on, as far as choosing a backend needs to know."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import subprocess

import jax


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
        return f"{self.name} ({self.device_kind})"


def current() -> Platform:
    """The platform of `jax.default_device` where one is set, else of JAX's first device."""
    device = jax.config.jax_default_device
    if device is None:
        device = jax.devices()[0]
    elif isinstance(device, str):
        device = jax.devices(device)[0]
    return Platform(
        name=device.platform,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        processors=getattr(device, "core_count", None),
    )


def device_name() -> str:
    """The device as its maker names it; of a CPU the processor and its cores."""
    here = current()
    return f"{_processor()}, {os.cpu_count()} cores" if here.name == "cpu" else here.device_kind


@functools.cache
def _processor() -> str:
    """The processor's name, as far as the system tells."""
    if platform.system() == "Darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
