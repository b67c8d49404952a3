"""What jflash finds on this machine, as text to paste into a report.

    python -m jflash.doctor               versions, devices, who serves and who refuses and why, the native library
    python -m jflash.doctor --selfcheck   and a short numeric check of every implementation that accepts

It needs nothing that jflash itself does not need, as it is for machines on which something is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import jflash
from jflash import _dispatch, _platform
from jflash_metal import _ffi

PACKAGES = ("jflash", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "jax-metal", "jax-mps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns 1 if a check failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jflash.doctor", description="What jflash finds here.")
    parser.add_argument("--selfcheck", action="store_true", help="compute something with every implementation")
    chosen = parser.parse_args(arguments)
    for line in report():
        print(line)
    if not chosen.selfcheck:
        return 0
    print("\nselfcheck: largest error, and what plain attention in the same dtype has")
    failed = False
    for check in selfcheck():
        print(f"  {check}")
        failed |= not check.passed
    return int(failed)


def report() -> Iterator[str]:
    """Versions, devices, implementations, the native library: a line each."""
    yield f"python {platform.python_version()} on {platform.platform()}, {platform.machine()}"
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            yield f"{name} {version}"
    yield f"platform: {_platform.current()}"
    yield f"devices: {', '.join(str(device) for device in jax.devices())}"
    arrays = [jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)] * 3
    yield "implementations, for float32 and 2 heads of 64:"
    for name, backend in _dispatch.BACKENDS.items():
        verdict, *refusals = jflash.explain(*arrays, implementation=name).splitlines()
        by_name = " (only when named)" if getattr(backend, "ONLY_BY_NAME", False) else ""
        yield refusals[0] if refusals else f"  {verdict}{by_name}"
    reason = _ffi.available()
    yield f"native library: {f'loaded; it runs shaders on: {_ffi.host()}' if reason is None else reason}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Check:
    """One result of one implementation against float64."""

    implementation: str
    what: str
    error: float
    plain: float
    """The error of plain attention in the call's own dtype."""

    @property
    def passed(self) -> bool:
        """At most twice plain attention's error, and a few roundings. NaN fails."""
        return self.error <= 2 * self.plain + 8 * float(np.finfo(np.float32).eps)

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "WRONG"
        return f"{verdict:5} {self.implementation}, {self.what}: {self.error:.1e} ({self.plain:.1e})"


Arrays = dict[str, Float[np.ndarray, "..."]]


def selfcheck() -> Iterator[Check]:
    """Output and gradients of a small causal call with grouped heads, by every implementation that accepts it."""
    numbers = np.random.default_rng(0)
    shapes = dict(query=(1, 70, 4, 32), key=(1, 90, 2, 32), value=(1, 90, 2, 32), d_out=(1, 70, 4, 32))
    arrays: Arrays = {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    exact = _plain(arrays, np.dtype(np.float64))
    plain = _plain(arrays, np.dtype(np.float32))
    errors = lambda results: {name: float(np.max(np.abs(results[name] - exact[name]))) for name in exact}
    yardstick = errors(plain)
    primals = [jnp.asarray(arrays[name]) for name in ("query", "key", "value")]
    for implementation in _dispatch.BACKENDS:

        def attend(*primals: Array, implementation: str = implementation) -> Array:
            return jflash.attention(*primals, is_causal=True, query_offset=20, implementation=implementation)

        if len(jflash.explain(*primals, implementation=implementation).splitlines()) > 1:
            continue
        out, pull_back = jax.vjp(attend, *primals)
        results: Any = zip(exact, (out, *pull_back(jnp.asarray(arrays["d_out"]))), strict=True)
        got = errors({name: np.asarray(result, np.float64) for name, result in results})
        for name, error in got.items():
            yield Check(implementation, name, error, yardstick[name])


def _plain(arrays: Arrays, dtype: np.dtype[Any]) -> Arrays:
    """Output and gradients by the formulas, `[T, S]` arrays and all."""
    query, key, value, d_out = (arrays[name][0].swapaxes(0, 1).astype(dtype) for name in arrays)
    group = len(query) // len(key)
    key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
    scale = dtype.type(query.shape[-1] ** -0.5)
    logits = query @ key.swapaxes(1, 2) * scale
    position = np.arange(logits.shape[1])[:, None] + 20
    logits = np.where(np.arange(logits.shape[2]) <= position, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ value
    d_logits = weights * (d_out @ value.swapaxes(1, 2) - np.sum(d_out * out, axis=-1, keepdims=True)) * scale
    shared = lambda array: array.reshape(-1, group, *array.shape[1:]).sum(axis=1)
    results = dict(
        out=out,
        d_query=d_logits @ key,
        d_key=shared(d_logits.swapaxes(1, 2) @ query),
        d_value=shared(weights.swapaxes(1, 2) @ d_out),
    )
    return {name: array.swapaxes(0, 1)[None] for name, array in results.items()}


if __name__ == "__main__":
    sys.exit(main())
