"""The native library: it is found, loaded, and launches Metal kernels through XLA custom calls on the CPU platform.

On macOS the library runs a kernel on the Apple GPU; elsewhere, where it was built with `JFLASH_METAL_EMULATOR=1`, it
runs the same shader in an emulator (csrc/emulator/README.md), for development and tests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jflash import _settings

_LIBRARY = Path(__file__).parent / "native" / "libjflash_metal.so"
_TARGET = "jflash_metal_launch"
_HOW = (
    "On macOS install jflash with Apple's command-line tools present (xcode-select --install). Elsewhere "
    "JFLASH_METAL_EMULATOR=1 pip install . builds an emulator for tests, with a C++20 compiler such as g++ 12."
)


@dataclasses.dataclass(frozen=True)
class Counters:
    """The counts of what one launch did in the emulator. Bytes are those of all accesses, as if without a cache."""

    entry: str
    threadgroups: int
    bytes_read: tuple[int, ...]
    """The bytes read from each buffer in the order of binding, the parameters last; an aliased result counts with its
    operand."""
    bytes_written: tuple[int, ...]
    threadgroup_bytes_read: int
    threadgroup_bytes_written: int
    threadgroup_memory: int
    """The bytes that one threadgroup holds."""
    matrix_multiplications: int
    """The number of 8x8 by 8x8 products, each by one SIMD-group."""
    exponentials: int
    """The number of exp, exp2, exp10, tanh and pow, by thread."""
    logarithms: int
    threadgroup_barriers: int
    """The number of barriers of a threadgroup, counted once for the group."""
    simdgroup_barriers: int
    """The number of barriers of a SIMD-group, counted once for the group."""
    collectives: int
    """The number of reductions, shuffles and votes, counted once for the SIMD-group."""
    atomics: int


def available() -> str | None:
    """Return why kernels cannot be launched, in words for the user, or `None` if they can."""
    if not _LIBRARY.exists():
        return f"the native library of jflash_metal was not built. {_HOW}"
    try:
        _library()
    except OSError as error:
        return f"the native library of jflash_metal does not load ({error}). {_HOW}"
    return None


@functools.cache
def host() -> Literal["metal", "emulator"]:
    """Return what runs the kernels: an Apple GPU or the emulator."""
    name = _library().jflash_metal_host
    name.restype = ctypes.c_char_p
    return "metal" if name() == b"metal" else "emulator"


def launch(
    source: str,
    entry: str,
    grid: tuple[int, int, int],
    threads: tuple[int, int, int],
    parameters: bytes,
    operands: Sequence[Shaped[Array, "..."]],
    result_shapes: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> tuple[Shaped[Array, "..."], ...]:
    """Run one kernel, when the computation that this is traced into runs.

    Operands are bound at `buffer(0)` to `buffer(n - 1)`, results at `buffer(n)` to `buffer(n + m - 1)` and the
    parameters, if there are any, at `buffer(n + m)` as constant memory.

    Args:
      source: one self-contained Metal translation unit.
      entry: the kernel's name in it.
      grid: threadgroups along x, y, z.
      threads: threads of a threadgroup along x, y, z; their product is at most 1024.
      parameters: the bytes of the kernel's parameters, little endian.
      operands: what the kernel reads.
      result_shapes: what it writes, every byte of it.
      aliases: from operand to result, where the result starts with the operand's contents, in the same memory.

    Raises:
      RuntimeError: if the native library is not there. While the computation runs, JAX raises an error if the shader
        does not compile or the launch fails, or, in the emulator, breaks a rule.
    """
    _register()
    call = jax.ffi.ffi_call(_TARGET, tuple(result_shapes), input_output_aliases=dict(aliases or {}))
    return tuple(
        call(
            *operands,
            source=source,
            entry=entry,
            grid=np.asarray(grid, np.int32),
            threads=np.asarray(threads, np.int32),
            parameters=np.frombuffer(parameters, np.uint8),
        )
    )


class _Buffer(ctypes.Structure):
    """`Buffer` of csrc/launch.h: a piece of memory, and the bytes of one of its elements."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("element_bytes", ctypes.c_size_t))


def run(
    source: str,
    entry: str,
    grid: tuple[int, int, int],
    threads: tuple[int, int, int],
    parameters: bytes,
    operands: Sequence[Shaped[np.ndarray, "..."]],
    results: Sequence[Shaped[np.ndarray, "..."]],
) -> None:
    """Run one kernel at once, over arrays in the CPU's memory, and writes its results: `launch` outside of XLA.

    Args: those of `launch`; `results` are arrays that are written, every byte of them. All arrays are contiguous.

    Raises:
      RuntimeError: what `launch` raises, with the same words.
    """
    buffers = [_Buffer(array.ctypes.data, array.nbytes, array.itemsize) for array in (*operands, *results)]
    message = ctypes.create_string_buffer(4096)
    function = _library().jflash_metal_run
    function.restype = ctypes.c_size_t
    failure: int = function(
        source.encode(),
        entry.encode(),
        (ctypes.c_int32 * 3)(*grid),
        (ctypes.c_int32 * 3)(*threads),
        parameters,
        ctypes.c_size_t(len(parameters)),
        (_Buffer * len(buffers))(*buffers),
        ctypes.c_size_t(len(operands)),
        ctypes.c_size_t(len(results)),
        message,
        ctypes.c_size_t(len(message)),
    )
    if failure:
        raise RuntimeError(message.raw[:failure].decode(errors="replace"))


def counters() -> tuple[Counters, ...]:
    """Return the counts of this process's last launches in the emulator (up to 256), oldest first."""
    function = _emulator().metal_emulator_counters
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    size = 0
    buffer = ctypes.create_string_buffer(1)
    while size != len(buffer):
        size = len(buffer)
        needed = function(buffer, size)
        if needed > size:
            buffer = ctypes.create_string_buffer(needed)
    launches: list[dict[str, Any]] = json.loads(buffer.value)
    for launch in launches:
        launch.update(bytes_read=tuple(launch["bytes_read"]), bytes_written=tuple(launch["bytes_written"]))
    return tuple(Counters(**launch) for launch in launches)


def forget_counters() -> None:
    """Make `counters` start with the next launch."""
    _emulator().metal_emulator_forget_counters()


def set_schedule(seed: int) -> None:
    """Seed the order in which the emulator runs threads, and the random lane layout of matrices; the seed is 0 until it
    is set."""
    _emulator().metal_emulator_set_seed(ctypes.c_uint64(seed))


def _emulator() -> ctypes.CDLL:
    if host() != "emulator":
        raise RuntimeError("Only the emulator counts and has schedules; kernels run on an Apple GPU here.")
    return _library()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_LIBRARY))
    if sys.platform != "darwin":
        library.metal_emulator_set_cache_directory(str(_settings.metal_cache()).encode())
        library.metal_emulator_set_clang("|".join(clang()).encode())
    return library


def clang() -> tuple[str, ...]:
    """Return the clang that checks address spaces for the emulator, if need be zig's; empty if none is installed."""
    on_path = shutil.which("clang++")
    if on_path is not None:
        return (on_path,)
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is None or ziglang.origin is None:
        return ()
    return str(Path(ziglang.origin).parent / "zig"), "clang"


@functools.cache
def _register() -> None:
    reason = available()
    if reason is not None:
        raise RuntimeError(f"Metal kernels cannot run: {reason}")
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_library().jflash_metal_launch), platform="cpu")
