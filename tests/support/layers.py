"""The ground of the tests of layer adapters: running a layer forward and backward, and the rule for its numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracle import error


class Run(NamedTuple):
    """Results of one layer, and the gradients of its parameters and inputs for one cotangent."""

    out: Any
    d_parameters: Any
    d_inputs: Any


Apply = Callable[[Any, Any], Any]
"""A layer as a function of its parameters and its inputs."""


# Compiling is nearly all that these tests do, and each program runs once.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def filled(shapes: Any) -> Any:
    """A tree of numbers for a tree of shapes; none is 0 or 1, so that a lost bias or factor shows."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([(0.4 * normal(seed, leaf.shape)).astype(leaf.dtype) for seed, leaf in enumerate(leaves)])


def run(apply: Apply, parameters: Any, inputs: Any, d_out: np.ndarray) -> Run:
    @compiled
    def forward_and_backward(parameters: Any, inputs: Any, d_out: np.ndarray) -> Run:
        out, pull_back = jax.vjp(apply, parameters, inputs)
        return Run(out, *pull_back(d_out.astype(out.dtype)))

    return forward_and_backward(parameters, inputs, d_out)


def assert_same_layer(adapted: Apply, own: Apply, exact: Apply, parameters: Any, inputs: Any) -> None:
    """`adapted` gives what `own` gives, forward and backward, both as near to `exact` on float64 as their dtype is."""
    shape = jax.eval_shape(own, parameters, inputs)
    d_out = normal(99, shape.shape).astype(shape.dtype)
    ours, theirs = (run(apply, parameters, inputs, d_out) for apply in (adapted, own))
    with jax.enable_x64(True):
        truth = jax.tree.map(np.asarray, run(exact, *float64((parameters, inputs, d_out))))
    assert_within_rule(ours, theirs, truth)


def assert_same_output(adapted: Apply, own: Apply, parameters: Any, inputs: Any) -> None:
    """Likewise, forward only, `own` on float64 being exact."""
    ours, theirs = (compiled(apply)(parameters, inputs) for apply in (adapted, own))
    with jax.enable_x64(True):
        truth = np.asarray(compiled(own)(*float64((parameters, inputs))))
    assert_within_rule(ours, theirs, truth)


def assert_within_rule(ours: Any, theirs: Any, truth: Any) -> None:
    """Trees of arrays of one structure, the output first; those of `truth` in float64.

    The error may be twice that of the layer's own attention, plus four roundings (2 eps) for each of the three parts
    in a row that a layer has: projections, attention, output projection. They are relative to the largest of all the
    numbers and not to the result, whose terms may cancel: the gradient of the key's bias is nothing but that.
    """
    paths, _ = jax.tree.flatten_with_path(truth)
    mine, other = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    roundings = 3 * 2 * float(jnp.finfo(mine[0].dtype).eps) * max(np.max(np.abs(true)) for _, true in paths)
    for (path, true), m, o in zip(paths, mine, other, strict=True):
        name = jax.tree_util.keystr(path)
        assert m.dtype == o.dtype, name
        assert error(m, true) <= 2 * error(o, true) + roundings, name


def float64(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), tree)
