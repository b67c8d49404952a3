"""Every derivative under every transform, as a table: `ROWS`.

A row is a function of attention, itself one of its smooth operands and the keys' lengths.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Arrays = dict[str, Any]
Attention = Callable[[Arrays, Any], Any]
"""Output and log-sum-exp of the smooth operands and the keys' lengths."""
Row = Callable[[Attention], Any]

P = PartitionSpec
NUMBERS = np.random.default_rng(0)
SHAPES = dict(query=(2, 6, 4, 8), key=(2, 9, 2, 8), value=(2, 9, 2, 8), bias=(1, 4, 6, 9), scale=(), sinks=(4,))
draw = lambda shape: NUMBERS.standard_normal(shape).astype(jnp.bfloat16).astype(np.float64)
POINT: Arrays = {name: draw(shape) for name, shape in SHAPES.items()}
ALONG: Arrays = {name: draw(shape) for name, shape in SHAPES.items()}
"""Numbers that bfloat16 has too."""
LENGTHS = np.array([9, 5])


def several(tree: Any, count: int = 3) -> Any:
    return jax.tree.map(lambda array: jnp.stack([array * (1 + index / 8) for index in range(count)]), tree)


def loss(attention: Attention, lengths: Any = LENGTHS) -> Callable[[Arrays], jax.Array]:
    """Return a loss that is linear in neither result."""

    def scalar(x: Arrays) -> jax.Array:
        out, lse = attention(x, lengths)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return jnp.vdot(jnp.sin(out), weights.astype(out.dtype)).astype(lse.dtype) + jnp.sum(lse**2) / 8

    return scalar


def results(attention: Attention) -> Callable[[Arrays], Any]:
    return lambda x: attention(x, LENGTHS)


def push(function: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
    """The derivative in one direction, in forward mode."""
    return lambda x: jax.jvp(function, (x,), (like(ALONG, x),))[1]


def pull(function: Callable[[Arrays], jax.Array]) -> Callable[[Arrays], jax.Array]:
    """The derivative of a scalar in one direction, in reverse mode."""
    return lambda x: sum(map(jnp.vdot, jax.tree.leaves(jax.grad(function)(x)), jax.tree.leaves(like(ALONG, x))))


def like(tree: Any, other: Any) -> Any:
    return {name: jnp.asarray(tree[name]) for name in other}


def at_point(transform: Callable[[Attention], Callable[[Arrays], Any]]) -> Row:
    return lambda attention: transform(attention)(POINT)


def nested(*steps: Callable[..., Any]) -> Row:
    """The steps from the outside in; where the first is reverse mode, all of its gradient."""

    def row(attention: Attention) -> Any:
        function = functools.reduce(lambda function, step: step(function), reversed(steps[1:]), loss(attention))
        return (jax.grad(function) if steps[0] is pull else push(function))(POINT)

    return row


def of_one(name: str) -> Row:
    def row(attention: Attention) -> Any:
        return jax.jvp(lambda one: attention({**POINT, name: one}, LENGTHS), (POINT[name],), (ALONG[name],))

    return row


def query_alone(function: Callable[[Arrays], Any]) -> Callable[[Any], Any]:
    return lambda query: function({**POINT, "query": query})


def float0(attention: Attention) -> Any:
    tangents = (ALONG, np.zeros(LENGTHS.shape, jax.dtypes.float0))
    return jax.jvp(attention, (POINT, LENGTHS), tangents)


def symbolic_zeros(attention: Attention) -> Any:
    """A derivative that is asked for some operands, through a function that says which."""

    @functools.partial(jax.custom_jvp)
    def call(x: Arrays) -> Any:
        return attention(x, LENGTHS)

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        moving = {name: t for name, t in dx.items() if not isinstance(t, jax.custom_derivatives.SymbolicZero)}
        some = lambda moving: attention({**x, **moving}, LENGTHS)
        return jax.jvp(some, ({name: x[name] for name in moving},), (moving,))

    call.defjvp(rule, symbolic_zeros=True)
    some = {name: POINT[name] for name in ("query", "bias")}
    return jax.jvp(lambda some: call({**POINT, **some}), (some,), (like(ALONG, some),))


def linearized(attention: Attention) -> Any:
    value, linear = jax.linearize(results(attention), POINT)
    return value, linear(ALONG), jax.linear_transpose(linear, POINT)(value)


def transposed_tangent(attention: Attention) -> Any:
    tangent = lambda dx: jax.jvp(results(attention), (POINT,), (dx,))[1]
    return jax.linear_transpose(tangent, ALONG)(attention(POINT, LENGTHS))


def both_arguments(attention: Attention) -> Any:
    """Return gradients for the point and for the direction, in which the tangent is linear."""
    return jax.grad(lambda x, dx: jax.jvp(loss(attention), (x,), (dx,))[1], (0, 1))(POINT, ALONG)


def mean_flow(attention: Attention) -> Any:
    """The loss of arXiv:2505.13447: a gradient of a function and of its stopped tangent."""

    def objective(x: Arrays) -> jax.Array:
        out, moved = jax.jvp(lambda x: attention(x, LENGTHS)[0], (x,), (like(ALONG, x),))
        return jnp.sum((out + lax.stop_gradient(moved)) ** 2)

    return jax.grad(objective)(POINT)


def layers(attention: Attention, wrap: Callable[..., Any] = lambda layer: layer) -> Callable[[Arrays], jax.Array]:
    """Two of them in a scan."""

    def scalar(x: Arrays) -> jax.Array:
        def layer(query: jax.Array, _: None) -> tuple[jax.Array, None]:
            return query + jnp.tanh(attention({**x, "query": query}, LENGTHS)[0]), None

        return jnp.sum(lax.scan(wrap(layer), x["query"], None, length=2)[0] ** 2)

    return scalar


def branch(attention: Attention) -> Callable[[Arrays], jax.Array]:
    return lambda x: lax.cond(jnp.sum(x["scale"]) > -99, loss(attention), lambda x: jnp.sum(x["query"]), x)


def loop(attention: Attention) -> Callable[[Arrays], jax.Array]:
    """Return derivatives through a loop of which JAX has no reverse mode."""
    step = lambda carry: (carry[0] + 1, carry[1] + attention({**POINT, "query": carry[1]}, LENGTHS)[0])
    return lambda x: lax.while_loop(lambda carry: carry[0] < 2, step, (0, x["query"]))[1]


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("out"),
    "any names but": jax.checkpoint_policies.save_any_names_but_these("out"),
    "anything but": jax.checkpoint_policies.save_anything_except_these_names("out"),
}


def checkpointed(policy: Any) -> Callable[[Attention], Callable[[Arrays], jax.Array]]:
    def named(attention: Attention) -> Attention:
        def call(x: Arrays, lengths: Any) -> Any:
            out, lse = attention(x, lengths)
            return checkpoint_name(out, "out"), lse

        return call

    return lambda attention: jax.checkpoint(loss(named(attention)), policy=policy)


def each_mode(objective: Callable[[Attention], Callable[[Arrays], jax.Array]]) -> Row:
    """Return derivatives of a scalar: both modes, and forward over reverse and reverse over forward."""

    def row(attention: Attention) -> Any:
        function = objective(attention)
        return (
            jax.jvp(function, (POINT,), (ALONG,)),
            jax.jvp(jax.grad(function), (POINT,), (ALONG,)),
            jax.grad(push(function))(POINT),
        )

    return row


def exported(attention: Attention) -> Any:
    """Tangent and Hessian-vector product inside; and two more derivatives of what was read back."""
    inside = jax.jit(lambda x: (push(results(attention))(x), push(jax.grad(loss(attention)))(x)))
    read = jax.export.deserialize(jax.export.export(inside)(POINT).serialize())
    scalar = jax.export.deserialize(jax.export.export(jax.jit(loss(attention)))(POINT).serialize(vjp_order=2))
    return read.call(POINT), jax.grad(pull(scalar.call))(POINT)


def three(attention: Attention, x: Arrays = POINT, dx: Arrays = ALONG, lengths: Any = LENGTHS) -> Any:
    """A tangent, a Hessian-vector product, and a gradient of a tangent."""
    scalar = loss(attention, lengths)
    return (
        jax.jvp(lambda x: attention(x, lengths), (x,), (dx,)),
        jax.jvp(jax.grad(scalar), (x,), (dx,)),
        jax.grad(lambda x: jax.jvp(scalar, (x,), (dx,))[1])(x),
    )


def over_devices(kind: AxisType, *, by_hand: bool = False) -> Row:
    """The same with the batch over two devices."""

    def row(attention: Attention) -> Any:
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(kind,))
        specs = {name: P("x") if name in ("query", "key", "value") else P() for name in POINT}
        if by_hand:
            attention = jax.shard_map(attention, mesh=mesh, in_specs=(specs, P("x")), out_specs=P("x"))
        put = lambda tree: {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}
        with jax.set_mesh(mesh):
            lengths = jax.device_put(LENGTHS, NamedSharding(mesh, P("x")))
            return jax.jit(functools.partial(three, attention))(put(POINT), put(ALONG), lengths)

    return row


def within(context: Callable[[], Any]) -> Row:
    def row(attention: Attention) -> Any:
        with context():
            return jax.jvp(jax.grad(loss(attention)), (POINT,), (ALONG,))

    return row


def leak_free(attention: Attention) -> Any:
    with jax.checking_leaks():
        return jax.jit(lambda: nested(push, pull)(attention))()


vmapped = lambda function, *trees: jax.vmap(function)(*map(several, trees))
hvp = lambda attention: lambda x, dx: jax.jvp(jax.grad(loss(attention)), (x,), (dx,))
THREE_DEEP = {
    f"three deep: {' of '.join(step.__name__ for step in steps)}": nested(*steps)
    for steps in itertools.product((push, pull), repeat=3)
}
ROWS: dict[str, Row] = {
    "jvp": at_point(lambda attention: lambda x: jax.jvp(results(attention), (x,), (ALONG,))),
    **{f"jvp of {name}": of_one(name) for name in SHAPES},
    "float0": float0,
    "symbolic zeros": symbolic_zeros,
    "grad": lambda attention: jax.value_and_grad(loss(attention))(POINT),
    "grad of the log-sum-exp": at_point(lambda attention: jax.grad(lambda x: jnp.sum(attention(x, LENGTHS)[1] ** 2))),
    "jvp of grad": lambda attention: hvp(attention)(POINT, ALONG),
    "grad of jvp": both_arguments,
    "grad of grad": nested(pull, pull),
    "jvp of jvp": nested(push, push),
    **THREE_DEEP,
    "MeanFlow": mean_flow,
    "jacfwd": lambda attention: jax.jacfwd(query_alone(results(attention)))(POINT["query"]),
    "jacrev": lambda attention: jax.jacrev(query_alone(results(attention)))(POINT["query"]),
    "hessian": lambda attention: jax.hessian(query_alone(loss(attention)))(POINT["query"]),
    "jacrev of jacfwd": lambda attention: jax.jacrev(jax.jacfwd(query_alone(loss(attention))))(POINT["query"]),
    "linearize": linearized,
    "linear_transpose": transposed_tangent,
    "vmap": lambda attention: vmapped(results(attention), POINT),
    "vmap of jvp": lambda attention: vmapped(lambda x, dx: jax.jvp(results(attention), (x,), (dx,)), POINT, ALONG),
    "vmap of jvp over directions": lambda attention: vmapped(lambda dx: hvp(attention)(POINT, dx), ALONG),
    "vmap of jvp over one operand": lambda attention: vmapped(
        lambda bias: jax.jvp(results(attention), ({**POINT, "bias": bias},), (ALONG,)), POINT["bias"]
    ),
    "vmap of grad": lambda attention: vmapped(jax.grad(loss(attention)), POINT),
    "vmap of jvp of grad": lambda attention: vmapped(hvp(attention), POINT, ALONG),
    "vmap of grad of jvp": lambda attention: vmapped(jax.grad(push(loss(attention))), POINT),
    "vmap of vmap of jvp": lambda attention: jax.vmap(
        lambda query: vmapped(lambda dx: jax.jvp(query_alone(results(attention)), (query,), (dx,)), ALONG["query"])
    )(several(POINT["query"], 2)),
    "vmap over lengths": lambda attention: jax.vmap(
        lambda lengths: jax.jvp(lambda x: attention(x, lengths), (POINT,), (ALONG,))
    )(np.array([[3, 4], [9, 1]])),
    "jvp of vmap": lambda attention: jax.jvp(jax.vmap(results(attention)), (several(POINT),), (several(ALONG),)),
    "grad of vmap": lambda attention: jax.grad(lambda xs: jnp.sum(jax.vmap(loss(attention))(xs)))(several(POINT)),
    "grad of vmap of jvp, shared": lambda attention: jax.grad(
        lambda x: jnp.sum(vmapped(lambda dx: jax.jvp(loss(attention), (x,), (dx,))[1] ** 2, ALONG))
    )(POINT),
    **{f"checkpoint, {name}": each_mode(checkpointed(policy)) for name, policy in POLICIES.items()},
    "scan": each_mode(layers),
    "scan of checkpoint": each_mode(functools.partial(layers, wrap=jax.checkpoint)),
    "cond": each_mode(branch),
    "while": lambda attention: jax.jvp(loop(attention), (POINT,), (ALONG,)),
    "export": exported,
    "shard_map": over_devices(AxisType.Auto, by_hand=True),
    "sharded jit": over_devices(AxisType.Auto),
    "explicit mesh": over_devices(AxisType.Explicit),
    "one device": three,
    "disable_jit": within(jax.disable_jit),
    "debug_nans": within(lambda: jax.debug_nans(True)),
    "checking_leaks": leak_free,
}
DEVICES = ("shard_map", "sharded jit", "explicit mesh")
EAGER = (*DEVICES, "export", "disable_jit", "debug_nans", "checking_leaks")
"""Rows that say themselves what is compiled; the others are compiled whole, and some of them not at all, too."""
