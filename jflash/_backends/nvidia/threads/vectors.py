"""A number for each thread of a warpgroup, `[128]`, from and to a place in device memory that the thread chooses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder, array_type, by_thread, strided

_EACH = strided((THREADS,), 1)
_utils: Any = mgpu.utils


def indices() -> Int[Array, "128"]:
    """Return each thread's index in its warpgroup."""
    returns = array_type((THREADS,), jnp.int32, _EACH)
    return ThreadBuilder.emit(lambda o: by_thread(o, o.thread), returns=returns)


def gather(table: Any, index: Int[Array, "128"]) -> Int[Array, "128"]:
    """Return the integers of `table`, `[numbers]`, at indices that must be inside."""

    def make(o: ThreadBuilder, table: Any, index: Any) -> Any:
        place = o.arith.index_cast(o.ir.IndexType.get(), _word(o, index))
        return by_thread(o, _utils.memref.load(table, [place]))

    returns = array_type((THREADS,), jnp.int32, _EACH)
    return ThreadBuilder.emit(make, table, index, returns=returns, layout=_EACH)


def scatter(
    table: Any,
    row: Int[Array, "128"],
    condition: Bool[Array, "128"],
    *numbers: Int[Array, "128"] | Int[Array, ""] | int,
) -> None:
    """Store each thread's numbers in its row of `table`, `[rows, numbers]`, where a condition holds."""

    def make(o: ThreadBuilder, table: Any, row: Any, condition: Any, *numbers: Any) -> None:
        address = o.arith.addi(o.device_address(table), o.distance(_word(o, row), 4 * len(numbers)))
        for column, number in enumerate(numbers):
            # On a condition, not in a branch: so lanes never part ways.
            store = f"st.global.b32 [$0 + {4 * column}], $1;"
            _utils.inline_ptx(store, address, _word(o, number), predicate=_word(o, condition), has_side_effects=True)

    ThreadBuilder.emit(make, table, row, condition, *numbers, layout=_EACH)


def _word(o: ThreadBuilder, number: Any) -> Any:
    """Return a thread's own number, or the one of all threads."""
    return o.extract(number.registers.item(), 0) if isinstance(number, mgpu.FragmentedArray) else number
