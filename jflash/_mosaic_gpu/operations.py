"""What a warpgroup does with its tiles, on the hardware and in Pallas' interpreter.

A tile of logits is `[64, columns]` in the layout in which Hopper's matrix unit leaves it. The interpreter knows no
layouts, and neither the scopes in which products overlap with other work nor copies that add: `Interpreter` does the
same in the plain way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

Ref = Any
"""A reference to shared or device memory, or a part of one."""

_TILE = plgpu.Layout.WGMMA
_ROWS = _TILE.reduce(1)
_COLUMNS = _TILE.reduce(0)


def along_rows(vector: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each row, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each column, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [1])


class Hardware:
    """Tiles in registers, products by the matrix unit, copies by the tensor memory accelerator."""

    interpret: Any = None
    margin = 0

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        """A tile, or with one axis a vector along a tile's rows, of one value."""
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _TILE if len(shape) == 2 else _ROWS)

    def index(self, shape: tuple[int, int], axis: int) -> Int[Array, "rows columns"]:
        """Each element's index along `axis`."""
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        """A tile; or a vector along a tile's rows (axis 0) or columns (1)."""
        layout = _TILE if axis is None else (_ROWS, _COLUMNS)[axis]
        return plgpu.load(ref, layout=layout, optimized=False)

    def product(self, left: Any, right: Ref, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
        """left @ right."""

        def multiply(sums: Any) -> Array:
            plgpu.wgmma(sums, left, right)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def add_product(self, sums: Float[Array, "rows columns"], left: Any, right: Ref) -> Float[Array, "rows columns"]:
        """sums + left @ right."""
        result: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.ACC.init(sums))
        return result

    def add_to(self, destination: Ref, source: Ref) -> None:
        """Add shared memory to device memory, in the background."""
        plgpu.copy_smem_to_gmem(source, destination, reduction_op="add")

    def commit(self) -> None:
        """Let copies and products see what was written to shared memory."""
        plgpu.commit_smem()

    def overlap[Results](
        self,
        first: tuple[Ref, Ref, tuple[int, int]],
        second: tuple[Any, Ref, Float[Array, "rows columns"]],
        ready: Callable[[], None],
        use: Callable[[Float[Array, "rows columns"]], Results],
        like: Results,
    ) -> tuple[Results, Float[Array, "rows columns"]]:
        """`use(a @ b)` for first = (a, b, shape) while c + d @ e runs, for second = (d, e, c) once it is `ready`.

        Returns what `use` did, which has the types of `like`, and c + d @ e.
        """
        a, b, shape = first
        d, e, c = second
        leaves, tree = jax.tree.flatten(like)

        def body(refs: Any) -> None:
            products, sums, *results = refs
            plgpu.wgmma(products, a, b)
            ready()
            plgpu.wgmma(sums, d, e)
            values = jax.tree.leaves(use(plgpu.wgmma_accumulator_load(products, wait_n=1)))
            for ref, value in zip(results, values, strict=True):
                ref[...] = value

        zeros = plgpu.ACC.init(self.full(shape, 0))
        done: Any = pl.run_state(body)((zeros, plgpu.ACC.init(c), *leaves))
        _, sums, *results = done
        return jax.tree.unflatten(tree, results), sums

    def pair[Saved, Results](
        self,
        first: tuple[Ref, Ref],
        second: tuple[Ref, Ref],
        shape: tuple[int, int],
        ready: Callable[[], None],
        weigh: Callable[[Float[Array, "rows columns"]], Saved],
        use: Callable[[Saved, Float[Array, "rows columns"]], Results],
    ) -> Results:
        """use(weigh(a @ b), c @ d), c @ d running behind weigh, for first = (a, b) and second = (c, d).

        All that weigh and the second product need is there when `ready` returns.
        """

        def body(products: Any, others: Any) -> Results:
            plgpu.wgmma(products, *first)
            ready()
            plgpu.wgmma(others, *second)
            saved = weigh(plgpu.wgmma_accumulator_load(products, wait_n=1))
            return use(saved, others[...])

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The same on any machine, slowly; finds races if asked. It needs a thread for every warpgroup of a block."""

    interpret: plgpu.InterpretGPUParams
    margin = 256
    """Rows and columns that `add_to` needs past the end of an array: it reads what it adds to."""

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        return jnp.full(shape, value, jnp.float32)

    def index(self, shape: tuple[int, int], axis: int) -> Int[Array, "rows columns"]:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        return ref[...]

    def product(self, left: Any, right: Ref, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
        return self.add_product(jnp.zeros(shape, jnp.float32), left, right)

    def add_product(self, sums: Float[Array, "rows columns"], left: Any, right: Ref) -> Float[Array, "rows columns"]:
        a = left if isinstance(left, jax.Array) else left[...]
        b = right[...]
        plgpu.commit_smem()
        return sums + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def add_to(self, destination: Ref, source: Ref) -> None:
        destination[...] = destination[...] + source[...]

    def commit(self) -> None:
        plgpu.commit_smem()

    def overlap(self, first: Any, second: Any, ready: Any, use: Any, like: Any) -> Any:
        a, b, shape = first
        d, e, c = second
        products = self.product(a, b, shape)
        ready()
        return use(products), self.add_product(c, d, e)

    def pair(self, first: Any, second: Any, shape: Any, ready: Any, weigh: Any, use: Any) -> Any:
        ready()
        saved = weigh(self.product(first[0], first[1], shape))
        return use(saved, self.product(second[0], second[1], shape))


Operations = Hardware | Interpreter
