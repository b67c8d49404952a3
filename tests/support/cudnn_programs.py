"""What jax.nn makes of calls by cuDNN where they are lowered for CUDA, in a process in which JAX finds a cuDNN."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import jflash
from jflash import _canonical, _platform
from jflash._backends import cudnn
from jflash._platform import Platform
from jflash._semantics.spec import Residuals

OTHERS = {"cpu": Platform("cpu", "cpu", None), "default": Platform("another", "unknown", None)}
QUERY, KEY = (jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16) for length, heads in ((128, 4), (256, 2)))
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


def custom_calls(function: Callable[..., Any], *args: Any) -> list[str]:
    """The names of cuDNN's, and what each is told of masks, in order."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [
        f"{name} {mask} {window}"
        for name, mask, window in re.findall(
            r"custom_call @__cudnn\$(\w+).*?mask_type\\22: \\22(\w+).*?sliding_window_length\\22: (\d+)", text
        )
    ]


def gradient(**options: Any) -> Callable[..., Any]:
    """The gradient of a call's output."""
    attention = lambda *arrays: jflash.attention(*arrays, **options).astype(jnp.float32).sum()
    return jax.grad(attention, (0, 1, 2))


def backward_operands() -> list[str]:
    """Return the operands of cuDNN's backward in a program of query, key, value, out, lse and d_out, in this order."""
    out, lse = QUERY, jax.ShapeDtypeStruct((2, 4, 128), jnp.float32)

    def backward(query: Any, key: Any, value: Any, out: Any, lse: Any, d_out: Any) -> Any:
        spec, operands, _ = _canonical.canonicalize(query, key, value, is_causal=True)
        found = cudnn.backward(spec, operands, Residuals(out, lse, d_out, jnp.zeros_like(lse)))
        return found.query, found.key, found.value

    lowered = jax.jit(backward).trace(QUERY, KEY, KEY, out, lse, out).lower(lowering_platforms=("cuda",))
    (operands,) = re.findall(r"custom_call @__cudnn\$fmhaSoftmaxBackward\(([^)]*)\)", lowered.as_text())
    return operands.split(", ")


def programs() -> Iterator[tuple[str, Any]]:
    """What is lowered, by name."""
    with_lengths = lambda query, key, value, lengths: jflash.attention(
        query, key, value, is_causal=True, key_value_seq_lengths=lengths
    )
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    batch = PartitionSpec("x")
    mapped = jax.shard_map(gradient(is_causal=True), mesh=mesh, in_specs=batch, out_specs=batch)
    stacked = lambda array: jax.ShapeDtypeStruct((3, *array.shape), array.dtype)
    arrays = QUERY, KEY, KEY
    yield "forward", custom_calls(jflash.attention, *arrays)
    yield "gradient", custom_calls(gradient(is_causal=True), *arrays)
    yield "window", custom_calls(gradient(local_window_size=(40, 0)), *arrays)
    yield "lengths", custom_calls(with_lengths, *arrays, LENGTHS)
    yield "vmap", custom_calls(jax.vmap(gradient()), *map(stacked, arrays))
    yield "shard_map", custom_calls(mapped, *arrays)
    with jflash.replacing_jax_nn(cudnn=True):
        yield (
            "replaced",
            custom_calls(lambda *arrays: jax.nn.dot_product_attention(*arrays, implementation="cudnn"), *arrays),
        )
    of_lengths = lambda *arrays: with_lengths(*arrays).astype(jnp.float32).sum()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield "strict", custom_calls(jax.grad(of_lengths, (0, 1, 2)), *arrays, LENGTHS)
    yield "backward operands", backward_operands()


def main() -> None:
    """Prints them as JSON."""
    jax.config.update("jax_num_cpu_devices", 2)
    _platform.lowering_targets = lambda _: {"cuda": Platform("gpu", "NVIDIA B200", "10.0", 148), **OTHERS}
    print(json.dumps(dict(programs())))
