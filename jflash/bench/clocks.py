"""One piece of work: compiled, with what the compiler says of its memory, and ready to be timed."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jflash import _platform
from jflash.bench.record import Figures

SAMPLE_MS = 200
"""The approximate time that a sample by the wall clock takes."""
REST_S = 0.25
"""The pause before a sample: threads of the library that ran before may still be looking out for work, and fall
asleep."""
ITERATIONS = 8
"""The number of runs in a sample of kernel times."""
WARM_UP = 8
"""The number of uncounted runs before a sample of kernel times.

After a pause the first few runs are faster or slower than the later ones: a GPU's clocks fall when it draws more power
than it may, some milliseconds later.
"""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Work that was done once already."""

    sample: Callable[[], Sequence[float]]
    """A function that runs the work once or several times more and returns milliseconds."""
    figures: Figures
    """The figures of the work without the times."""


def on_nvidia() -> bool:
    """Return whether JAX computes on an NVIDIA GPU."""
    here = _platform.current()
    return here.name == "gpu" and here.device_kind.startswith("NVIDIA")


def clock_name() -> str:
    """Return the name of the clock that `prepare` reads."""
    if not on_nvidia():
        return "wall clock"
    return f"kernel times by CUPTI (torch by CUDA events), {ITERATIONS} a round after {WARM_UP} uncounted"


def prepare(function: Callable[..., Any], *arguments: Any) -> Prepared:
    """Compile a function of arrays for these, and run it once.

    Raises:
      MemoryError: if it needs more memory than there is. This is checked before it runs: a CPU's operating system may
        end the whole process instead.
    """
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    temporary, peak = memory(compiled)
    limit = _memory_limit()
    if peak is not None and limit is not None and peak > limit:
        raise MemoryError(f"It needs {peak / 2**30:,.1f} GiB, and there are {limit / 2**30:,.1f}.")

    def call() -> object:
        return jax.block_until_ready(compiled(*arguments))

    before = _high_water_mark()
    call()
    after = _high_water_mark()
    figures = Figures(
        compile_s=compile_s,
        temporary_mib=_mib(temporary),
        peak_mib=_mib(peak),
        device_peak_mib=_mib(after) if before is not None and after is not None and after > before else None,
    )
    return Prepared(kernel_times(compiled, *arguments) if on_nvidia() else wall_clock(call), figures)


def memory(compiled: Any) -> tuple[int | None, int | None]:
    """Return the temporary bytes, and all bytes held at once: XLA allocates what is temporary in one piece."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None, None
    temporary: int = sizes.temp_size_in_bytes
    others = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return temporary, temporary + others


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def kernel_times(compiled: Any, *arguments: Array) -> Callable[[], Sequence[float]]:
    """Return samples of the summed times of a call's kernels on an NVIDIA GPU, without launches and gaps between
    them."""
    # This is a large import, and of no use elsewhere.
    from jax.experimental.mosaic.gpu import profiler

    run = profiler.measure(compiled, aggregate=True, iterations=WARM_UP + ITERATIONS)

    def sample() -> Sequence[float]:
        times = run(*arguments)[1]
        if times is None:
            raise RuntimeError("CUPTI saw no kernel.")
        return times[WARM_UP:]

    return sample


def wall_clock(call: Callable[[], object]) -> Callable[[], Sequence[float]]:
    """Return samples of a call that waits for its results, each the mean of the calls that fit into `SAMPLE_MS`.

    There are at least three, as memory that one call gave back may cost the next. The call should have been made
    before, as a first one may take longer.
    """
    times = max(3, round(SAMPLE_MS / mean_ms(call, 1)))

    def sample() -> Sequence[float]:
        time.sleep(REST_S)
        # After a rest, and after another library's work, cores and caches have to warm up.
        call()
        return [mean_ms(call, times)]

    return sample


def mean_ms(call: Callable[[], object], times: int) -> float:
    """Return the mean time of a call, in milliseconds."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return 1e3 * (time.perf_counter() - start) / times


def timed(prepared: Prepared, samples: Sequence[float]) -> Figures:
    """Return the figures of the work with its times."""
    rounded = [float(f"{sample:.6g}") for sample in samples]
    return dataclasses.replace(prepared.figures, ms=statistics.median(samples), samples_ms=rounded)


def _high_water_mark() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _memory_limit() -> int | None:
    """Return the device's memory in bytes, on a CPU the machine's; `None` where it is not known."""
    if _platform.current().name != "cpu":
        return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
