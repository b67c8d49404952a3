"""A report of what jflash finds on this machine, as text to paste.

    python -m jflash.doctor               versions, devices, what each implementation serves or why it refuses
    python -m jflash.doctor --selfcheck   and a short numeric check of every implementation that accepts

The doctor needs nothing that jflash itself does not need, as it is for machines on which something is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflash
from jflash import _dispatch, _platform, _tuning, _versions
from jflash_metal import _ffi

PACKAGES = (
    "jflash", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "jax-graft", "metal-pjrt-core", "jax-metal", "jax-mps",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and return 1 if a check failed, else 0.

    Args:
      arguments: the arguments of the command line, `--selfcheck` or none; None for what the program was called with.

    Raises:
      SystemExit: for `--help`, and for arguments that do not exist.

    Example:
      >>> from jflash import doctor
      >>> doctor.main([])
      python ...
      jax ...
      platform: cpu
      ...
      a call in bfloat16 or float32, with heads of 64 and no options:
        mosaic_gpu: it needs an NVIDIA Hopper GPU (compute capability 9.0), and this is cpu.
        mosaic_gpu_mma: it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is cpu.
        cudnn: it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is cpu.
        xla: serves, by default
        reference: serves, if named
      ...
      0
    """
    about = "What jflash finds on this machine: versions, devices, and which implementations serve."
    check = "also compute something with every implementation, and compare it with float64"
    parser = argparse.ArgumentParser(prog="python -m jflash.doctor", description=about)
    parser.add_argument("--selfcheck", action="store_true", help=check)
    chosen = parser.parse_args(arguments)
    for line in report():
        print(line)
    if not chosen.selfcheck:
        return 0
    print("\nselfcheck: the largest error of each result, as a share of what is allowed")
    passed: list[bool] = []
    for check in selfcheck():
        print(f"  {check}")
        passed.append(check.passed)
    print(f"  {sum(passed)} of {len(passed)} are ok")
    return int(not all(passed))


def report() -> Iterator[str]:
    """Yield the lines of the report: versions, devices, implementations, the native library."""
    yield f"python {platform.python_version()} on {platform.platform()}, {platform.machine()}"
    for name in PACKAGES:
        version = _versions.installed(name)
        if version is not None:
            yield f"{name} {version}"
    yield f"platform: {_platform.current()}"
    yield f"devices: {', '.join(str(device) for device in jax.devices())}"
    if _platform.current().name == "cpu" and shutil.which("nvidia-smi"):
        yield "an NVIDIA GPU seems to be here, and JAX sees only the CPU: pip install 'jax[cuda13]'"
    verdicts = {dtype: list(_verdicts(dtype)) for dtype in ("bfloat16", "float32")}
    alike = len({tuple(lines) for lines in verdicts.values()}) == 1
    for dtype, lines in verdicts.items() if not alike else [(" or ".join(verdicts), verdicts["float32"])]:
        yield f"a call in {dtype}, with heads of 64 and no options:"
        yield from lines
    device = _platform.device_name()
    yield f"tuned tiles: {_tuning.path(device) if _tuning.is_tuned(device) else 'none; the defaults serve'}"
    if _ffi.available() is None:
        yield f"native library of metal: loaded; it runs shaders on: {_ffi.host()}"


def _verdicts(dtype: str) -> Iterator[str]:
    """Yield for each implementation whether it serves a plain call, or why not."""
    arrays = [jax.ShapeDtypeStruct((1, 128, 2, 64), dtype)] * 3
    default = jflash.explain(*arrays).split()[0]
    for name in _dispatch.BACKENDS:
        verdict, *others = jflash.explain(*arrays, implementation=name).splitlines()
        serves = f"  {name}: serves, {'by default' if name == default else 'if named'}"
        yield serves if verdict.startswith(f"{name} serves") else others[0]


@dataclasses.dataclass(frozen=True)
class Check:
    """One call by one implementation, its output and all gradients, against `reference` in float64."""

    implementation: str
    call: str
    errors: dict[str, float]
    """The largest error of each result, in units of what is allowed."""
    failure: str | None = None
    """The exception that the call raised, as text; `None` if it gave results."""

    @property
    def passed(self) -> bool:
        """Whether all errors are allowed. NaN is not."""
        return self.failure is None and all(error <= 1 for error in self.errors.values())

    def __str__(self) -> str:
        """Return the check's line of the report."""
        errors = self.failure or ", ".join(f"{name} {error:.2f}" for name, error in self.errors.items())
        return f"{'ok' if self.passed else 'WRONG':5} {self.implementation}, {self.call}: {errors}"


@dataclasses.dataclass(frozen=True)
class _Call:
    dtype: str
    head_dim: int
    everything: bool = False
    offset: int = 20

    def __str__(self) -> str:
        causal = "causal" if self.offset else "causal from the top left"
        return f"{self.dtype} d{self.head_dim} {'all options' if self.everything else causal}"

    def arrays(self) -> dict[str, Any]:
        """Return the arrays that have a gradient: 4 query heads on 2 key heads, 70 queries, 90 keys."""
        numbers = np.random.default_rng(0)
        normal = lambda *shape: numbers.standard_normal(shape).astype(np.float32)
        shapes = dict(query=(70, 4), key=(90, 2), value=(90, 2))
        arrays = {name: normal(1, *shape, self.head_dim) for name, shape in shapes.items()}
        arrays = {name: np.asarray(jnp.asarray(array).astype(self.dtype)) for name, array in arrays.items()}
        if self.everything:
            parameters = dict(bias=(1, 4, 70, 90), alibi_slopes=(4,), sinks=(4,))
            arrays |= {name: normal(*shape) / 8 for name, shape in parameters.items()}
        return arrays

    def options(self) -> dict[str, Any]:
        """Return what the call has besides its arrays."""
        options: dict[str, Any] = dict(is_causal=True, query_offset=self.offset, precision=PRECISION)
        if self.everything:
            segments = np.arange(90) // 30
            options |= dict(
                logits_soft_cap=2.0,
                local_window_size=(50, 0),
                mask=(np.arange(90) % 7 != 3)[None, None, None],
                segment_ids=(segments[None, 20:], segments[None]),
                query_seq_lengths=np.array([61], np.int32),
                key_value_seq_lengths=np.array([85], np.int32),
            )
        return options

    def attend(self, implementation: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the output and the gradients."""

        def attention(arrays: dict[str, Any]) -> Any:
            return jflash.attention(**arrays, **self.options(), implementation=implementation)

        out, pull_back = jax.vjp(attention, arrays)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return {"out": out, **{f"d_{name}": array for name, array in pull_back(weights)[0].items()}}


PRECISION = "highest"
"""The precision of the calls: by default a GPU's float32 products are less exact than is allowed here."""

_CALLS = (
    _Call("float32", 32),
    _Call("float32", 256),
    _Call("bfloat16", 128),
    _Call("bfloat16", 64, offset=0),
    _Call("float32", 40, everything=True),
    _Call("float16", 64, everything=True),
)


def accepting(arguments: dict[str, Any]) -> list[str]:
    """Return the implementations that accept a call."""
    explained = lambda name: jflash.explain(**arguments, implementation=name)
    return [name for name in _dispatch.BACKENDS if explained(name).startswith(f"{name} serves")]


def selfcheck() -> Iterator[Check]:
    """Yield a check of output and gradients for each of a few small calls, by every implementation that accepts it.

    A result may be wrong by eight roundings of the call's dtype and by what sums of thousands of float32 terms lose,
    relative to its own largest number. That is generous: the check finds out whether kernels work on a machine, and the
    tests how exact they are.
    """
    for call in _CALLS:
        arrays = call.arrays()
        with jax.enable_x64(True):
            wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
            truth = {name: np.asarray(array) for name, array in call.attend("reference", wide).items()}
        allowed = 8 * float(jnp.finfo(call.dtype).eps) + 64 * float(np.finfo(np.float32).eps)
        for name in accepting({**arrays, **call.options()}):
            try:
                got = call.attend(name, {key: jnp.asarray(array) for key, array in arrays.items()})
                got = {result: np.asarray(array, np.float64) for result, array in got.items()}
            except Exception as error:  # such as a kernel that does not compile, which the report is for
                yield Check(name, str(call), {}, f"{type(error).__name__}: {error}")
                continue
            errors = {
                result: float(np.max(np.abs(got[result] - exact)) / (allowed * np.max(np.abs(exact))))
                for result, exact in truth.items()
            }
            yield Check(name, str(call), errors)


if __name__ == "__main__":
    sys.exit(main())
