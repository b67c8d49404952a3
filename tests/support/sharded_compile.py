"""Compiles one attention call, with its gradients, for all devices that JAX has.

    python sharded_compile.py SPLIT

A program of its own: it may take 30 seconds of processor time, which do not depend on what else the machine does, and
what XLA makes of source lines depends on the stack that traced them.
"""

import resource
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash

BATCH, HEADS, SEQUENCE = P("x"), P(None, None, "x"), P(None, "x")
SPLITS = {
    "batch": (8, 4, 4, BATCH, BATCH),
    "heads": (1, 16, 8, HEADS, HEADS),
    "heads_equal": (1, 8, 8, HEADS, HEADS),
    "one_key_head": (1, 8, 1, HEADS, P()),
    "two_key_heads": (1, 8, 2, HEADS, P()),
    "ring": (1, 8, 2, SEQUENCE, SEQUENCE),
    "all_to_all": (1, 16, 8, SEQUENCE, SEQUENCE),
    "keys": (1, 8, 2, P(), SEQUENCE),
}
"""The splits over eight devices: batch, heads, key heads, and how queries and keys are split."""


def main(split: str) -> None:
    """Lower and compile, and run nothing."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    batch, heads, key_heads, of_queries, of_keys = SPLITS[split]

    def array(heads: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, 1024, heads, 64), jnp.float32, sharding=NamedSharding(mesh, spec))

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sin(jflash.attention(query, key, value, is_causal=True)).sum()

    key = array(key_heads, of_keys)
    jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(array(heads, of_queries), key, key).compile()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    main(sys.argv[1])
