"""A reference of a kernel's over an array, for code of kernels that runs as array code."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array


class ArrayRef:
    """What `ref[...]`, `ref[...] = values` and `ref.at[...]` mean, on an array that assignments replace."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self[...].shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def at(self) -> _At:
        return _At(self)

    def __getitem__(self, index: Any) -> Array:
        return self.array[_plain(index)]

    def __setitem__(self, index: Any, values: Array) -> None:
        self.array = self.array.at[_plain(index)].set(values)


class _At:
    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> _Part:
        return _Part(self.ref, index)


class _Part(ArrayRef):
    """Part of a reference."""

    def __init__(self, whole: ArrayRef, index: Any) -> None:
        self.whole, self.index = whole, index

    @property
    def array(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole[self.index]

    @array.setter
    def array(self, values: Array) -> None:
        self.whole[self.index] = values


def _plain(index: Any) -> Any:
    """An index of arrays, with the places that `pl.ds` names for it."""
    each = lambda one: one.start + jnp.arange(one.size) if isinstance(one, pl.Slice) else one
    return tuple(map(each, index)) if isinstance(index, tuple) else each(index)
