"""What comes back to a query that sees no key goes nowhere, also where it is NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from operands import PLAIN, assert_same
from refusals import skip_refused
from short_run import cover

import jflash

ROW = 2
"""The query that sees nothing."""
HIDE: dict[str, dict[str, Any]] = {
    "mask": dict(mask=np.arange(5)[:, None] != np.full(7, ROW)),
    "bias": dict(bias=np.where(np.arange(5)[:, None] == ROW, -np.inf, np.zeros(7)).astype(np.float32)),
    "score_mod": dict(score_mod=lambda logit, batch, head, query, key: jnp.where(query == ROW, -jnp.inf, logit)),
    "window": dict(is_causal=True, query_offset=np.array([-1 - ROW, 0], np.int32)),
    "key lengths": dict(key_value_seq_lengths=np.array([0, 7])),
    "query lengths": dict(query_seq_lengths=np.array([ROW, 5])),
    "segments": dict(segment_ids=(np.array([[0, 0, 9, 0, 0]] * 2), np.zeros((2, 7), int))),
}


@cover(1, every=3, rest=2)
@pytest.mark.parametrize("hide", [*HIDE])
@pytest.mark.parametrize("derivative", ["gradient", "gradient of gradient"])
def test_cotangent_of_a_query_that_sees_nothing(backend: str, hide: str, derivative: str) -> None:
    options = HIDE[hide]
    skip_refused(backend, **PLAIN, **options)
    arrays = {**PLAIN, **{name: array for name, array in options.items() if name == "bias"}}
    rest = {name: option for name, option in options.items() if name != "bias"}

    def attend(arrays: Any) -> Any:
        return jflash.attention(**arrays, **rest, implementation=backend, return_residual=True)

    @jax.jit
    def gradients(cotangents: Any) -> Any:
        if derivative == "gradient":
            return jax.vjp(attend, arrays)[1](cotangents)[0]
        squared = lambda arrays: sum(jnp.vdot(g, g) for g in jax.vjp(attend, arrays)[1](cotangents)[0].values())
        return jax.grad(squared)(arrays)

    results = jax.tree.map(np.asarray, jax.jit(attend)(arrays))
    unseeing = results[1] == -np.inf
    assert unseeing[0, ROW].all()
    of_hidden = lambda value: tuple(
        np.where(unseeing.reshape(*unseeing.shape, *[1] * (r.ndim - 3)), np.float32(value), np.ones_like(r))
        for r in results
    )
    got, want = (gradients(of_hidden(value)) for value in (np.nan, 0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want))
    assert_same(got, want)


def test_cotangent_of_a_query_whose_sequence_is_split() -> None:
    """A window of which the last queries are past all keys, though a device's queries are not past as many keys."""
    split: dict[str, Any] = dict(sequence_axis="x", sequence_strategy="ring")
    mesh, rows = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec(None, "x")
    normal = lambda seed, length: jax.random.normal(jax.random.key(seed), (1, length, 1, 4))
    arrays = normal(0, 8), normal(1, 4), normal(2, 4)

    @jax.jit
    def gradients(d_out: Any) -> Any:
        attend = lambda *arrays: jflash.attention(*arrays, local_window_size=(2, 1), **split)
        return jax.vjp(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows), *arrays)[1](d_out)

    sees = np.arange(8)[None, :, None, None] < 6
    got, want = (gradients(jnp.where(sees, arrays[0], value)) for value in (np.nan, 0))
    jax.tree.map(np.testing.assert_array_equal, got, want)
