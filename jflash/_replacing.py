"""The block in which jflash serves the calls that other libraries make of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, override

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jflash import _arguments
from jflash._api import attention
from jflash._semantics.dtypes import widened

_ARRAYS = ("query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths")
_STATIC = ("is_causal", "local_window_size", "implementation", "return_residual")
_KNOWN = (*_ARRAYS, *_STATIC, "scale")


_UNSEEN = (
    "Programs that were traced before it, and code that imported the function by name, are out of its reach: "
    "jax.clear_caches() before the block has them traced again, also those that a model keeps by a jit of its own, as "
    "flax.linen.jit does."
)
_NO_CALL = (
    "Many models compute attention by einsums: call jflash.attention in their place, as in jflash's "
    "examples/other_models for some libraries. So do the layers of flax.linen, and those of flax.nnx with dropout: "
    "make them with attention_fn=jflash.flax.attention_fn. So do Keras' layers with dropout: make them of jflash.keras."
)


class LeftCall(NamedTuple):
    """A call that jax.nn served inside a block of `replacing_jax_nn`."""

    call: str
    """The call's arguments in words."""
    reason: str
    """The reason why jflash did not serve the call."""
    times: int
    """The number of times the call was made."""


def replacing_jax_nn(*, cudnn: bool = False) -> Replacement:
    """Return a context manager, also a decorator, in which jflash serves calls of `jax.nn.dot_product_attention`.

    The block gives an object whose `report()` says how many calls jflash served, which it left to jax.nn, and why. Its
    `served` is the number of calls served, its `left` a list of the others.

      >>> import jax, jax.numpy as jnp, jflash
      >>> query = key = value = jnp.ones((2, 64, 4, 16))
      >>> with jflash.replacing_jax_nn() as replaced:  # a training step of any library that makes such calls
      ...     out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
      ...     integers = jax.nn.dot_product_attention(*[jnp.ones((8, 1, 4), jnp.int8)] * 3)
      >>> print(replaced.report())
      jflash served 1 call of jax.nn.dot_product_attention and left 1.
        1 call left, because jflash takes float32, bfloat16, float16, float64, not int8: query int8[8, 1, 4], ...
      >>> @jflash.replacing_jax_nn()
      ... def train_step(batch):
      ...     return jax.nn.dot_product_attention(batch, batch, batch)

    A call means what it means to jax.nn: the same arguments, shapes and dtypes, errors of the same kinds, the
    log-sum-exp in the key's dtype and without a gradient. These things differ:

    - A query that sees no key gets 0, log-sum-exp -inf and zero gradients; from jax.nn it gets the mean of the values
      (NaN where a bias of -inf hides all keys).
    - NaN in padding (`query_seq_lengths`, `key_value_seq_lengths`) reaches no result and no gradient.
    - Results are rounded differently. The gradients of a query differ if its visible keys all have a bias of -1e9 or
      so: the float32 log-sum-exp cannot hold how many keys there are. A bias of -inf, or a mask, hides keys exactly.
    - jax.nn's `implementation=None` and "xla" are alike here: the fastest implementation of jflash serves.

    jflash leaves to jax.nn the calls with `implementation="cudnn"`, which it serves with `cudnn=True` as if they named
    nothing, also where cuDNN could not. It leaves those with arguments that jax.nn has and jflash does not know, and
    those that jflash does not take: dtypes other than float32, bfloat16, float16 and float64, a `scale` that is not one
    finite number, a window that is negative or not known when the call is traced, symbolic sizes, and arrays without
    heads or features. `left` and `report` list them.

    A block reaches:

    - The attribute `jax.nn.dot_product_attention`, in all threads: blocks in several threads hold as long as one of
      them is open, and a call counts for the block that was entered last. Code that took the function before, by
      `from jax.nn import dot_product_attention`, keeps jax.nn's.
    - Calls that are traced inside it. A function under `jax.jit` that was traced before is not traced anew and keeps
      jax.nn's attention; one that is traced inside keeps jflash's when the block is over. `jax.clear_caches()` forgets
      both. A call under `jax.jit` counts when it is traced, not when it runs, and a transform may trace it several
      times.

    Blocks may be nested, and a block entered again goes on counting. The attribute is restored when the last one is
    over, whatever was raised.

    Args:
      cudnn: whether jflash also serves calls that name cuDNN.

    Raises:
      TypeError: if `cudnn` is not a bool, or if the block decorates a coroutine or a generator, whose body would run
        when the block is over.
    """
    return Replacement(_arguments.static_bool("cudnn", cudnn))


class Replacement(contextlib.ContextDecorator):
    """A block of `replacing_jax_nn`, with the counts of the calls that were made in it."""

    def __init__(self, cudnn: bool) -> None:
        self.cudnn = cudnn
        """Whether calls that name cuDNN are served too."""
        self._served = 0
        self._left: dict[tuple[str, str], int] = {}

    @property
    def served(self) -> int:
        """The number of calls that jflash served. Calls that raised do not count."""
        return self._served

    @property
    def left(self) -> list[LeftCall]:
        """The calls that jax.nn served, equal ones together, in the order in which they first came."""
        with _patch.lock:
            return [LeftCall(call, reason, times) for (call, reason), times in self._left.items()]

    def report(self) -> str:
        """Return the counts in a sentence, and a line for each kind of call that was left."""
        left = self.left
        many = sum(each.times for each in left)
        if not self.served + many:
            return f"No call of jax.nn.dot_product_attention was made in the block. {_NO_CALL} {_UNSEEN}"
        lines = [f"jflash served {_calls(self.served)} of jax.nn.dot_product_attention and left {many or 'none'}."]
        lines += [f"  {_calls(each.times)} left, because {each.reason}: {each.call}." for each in left]
        return "\n".join([*lines, f"These are the calls that the block saw. {_UNSEEN}"])

    def __str__(self) -> str:
        return self.report()

    def __enter__(self) -> Replacement:
        _patch.enter(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _patch.leave(self)

    @override
    def __call__[Function: Callable[..., Any]](self, func: Function) -> Function:
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"`replacing_jax_nn` cannot decorate {func.__qualname__}: the body of a coroutine or a generator runs "
                "after the call that makes it. Open the block inside it."
            )
        return super().__call__(func)

    def count(self, left: tuple[str, str] | None) -> None:
        """Count one more call: served if `left` is None, else left (what it was, why)."""
        with _patch.lock:
            if left is None:
                self._served += 1
            else:
                self._left[left] = self._left.get(left, 0) + 1


class _Patch:
    """The one replacement of the attribute, in place as long as any block is open in any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: list[Replacement] = []
        self.original: Any = None

    def enter(self, block: Replacement) -> None:
        with self.lock:
            if not self.blocks:
                self.original = jax.nn.dot_product_attention
                jax.nn.dot_product_attention = _in_place_of(self.original)
            self.blocks.append(block)

    def leave(self, block: Replacement) -> None:
        """Close the block. Other threads may have entered since, so it need not be the last that leaves."""
        with self.lock:
            last = max(index for index, open_ in enumerate(self.blocks) if open_ is block)
            del self.blocks[last]
            if not self.blocks:
                jax.nn.dot_product_attention = self.original

    def innermost(self) -> Replacement | None:
        with self.lock:
            return self.blocks[-1] if self.blocks else None


_patch = _Patch()


def _in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that stands where `original` stood, with its signature."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        block = _patch.innermost()
        if block is None:  # The caller kept the function after the last block had ended.
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if block.cudnn and arguments.get("implementation") == "cudnn":
            arguments["implementation"] = None
        reason = _why_left(arguments, signature)
        result = _serve(original, arguments) if reason is None else original(*args, **kwargs)
        block.count(None if reason is None else (_in_words(arguments), reason))
        return result

    return dot_product_attention


def _why_left(arguments: Mapping[str, Any], signature: inspect.Signature) -> str | None:
    """Return the first thing in a call that jflash does not take though jax.nn may, or None.

    Calls that are wrong to jax.nn too are not its business.
    """
    for name, value in arguments.items():
        if name not in _KNOWN and value is not signature.parameters[name].default:
            return f"jflash does not know the argument `{name}`"
    if arguments.get("implementation") == "cudnn":
        return "`implementation` names cuDNN, and `replacing_jax_nn` was not called with cudnn=True"
    arrays = {name: jnp.asarray(arguments[name]) for name in _ARRAYS if arguments.get(name) is not None}
    for name, array in arrays.items():
        if any(jax.export.is_symbolic_dim(size) for size in array.shape):
            return f"`{name}` has a symbolic shape"
    for name in ("query", "key"):
        if name not in arrays:
            continue
        if arrays[name].dtype.name not in _arguments.DTYPES:
            return f"jflash takes {', '.join(_arguments.DTYPES)}, not {arrays[name].dtype}"
        if 0 in arrays[name].shape[-2:]:
            return f"`{name}` has no heads or no features"
    for name in ("bias", "mask"):
        # If there is one key, jax.nn's matrix product takes its value for all keys of `bias` or `mask`.
        if {name, "key"} <= arrays.keys() and arrays[name].shape[-1:] > (1,) == arrays["key"].shape[-3:-2]:
            return f"`{name}` has more keys than `key`"
    if "bias" in arrays and jnp.issubdtype(arrays["bias"].dtype, jnp.complexfloating):
        return "`bias` is complex"
    return _why_static_left(arguments)


def _why_static_left(arguments: Mapping[str, Any]) -> str | None:
    scale = arguments.get("scale")
    if isinstance(scale, jax.Array):
        if scale.shape != () or jnp.issubdtype(scale.dtype, jnp.complexfloating):
            return "`scale` is not one real number"
    elif scale is not None and not (_is_real(scale) and math.isfinite(scale)):
        return "`scale` is not one finite number"
    window = arguments.get("local_window_size")
    sides = window if isinstance(window, tuple | list) else (window,)
    if window is not None and not all(isinstance(side, int | np.integer) and side >= 0 for side in sides):
        return "`local_window_size` is not one or two numbers, known when the call is traced and not negative"
    return None


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (
        isinstance(value, np.ndarray) and value.shape == () and not np.iscomplexobj(value)
    )


def _serve(original: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return jflash's results for a call for which `_why_left` returned None.

    jax.nn itself checks the arguments, and says what the results look like: what it refuses raises here.
    """
    arrays = {name: jnp.asarray(arguments[name]) for name in _ARRAYS if arguments.get(name) is not None}
    window = arguments.get("local_window_size")
    return_residual = bool(arguments.get("return_residual", False))
    static = dict(
        is_causal=bool(arguments.get("is_causal", False)),
        local_window_size=tuple(window) if isinstance(window, list) else window,
        return_residual=return_residual,
    )
    shapes = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
    given = {**arguments, **static}
    want = _results(original, shapes, tuple((name, given[name]) for name in arguments if name in _STATIC))

    query, key, value = (_four_axes(arrays[name]) for name in ("query", "key", "value"))
    accumulator = widened(query.dtype)
    bias, mask = arrays.get("bias"), arrays.get("mask")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(accumulator)
    scale = arguments.get("scale")
    if scale is not None:
        scale = jnp.asarray(scale).astype(accumulator) if isinstance(scale, jax.Array) else float(scale)
    lengths = {
        name: jnp.clip(arrays[name], 0, array.shape[1])  # jax.nn takes any length, jflash only lengths in range
        for name, array in (("query_seq_lengths", query), ("key_value_seq_lengths", key))
        if name in arrays
    }
    if window is not None:  # True is 1 to jax.nn.
        window = int(window) if isinstance(window, int) else tuple(int(side) for side in window)
    options: dict[str, Any] = {**static, **lengths, "local_window_size": window, "return_residual": True}
    out, lse = attention(query, key, value, bias, mask, scale=scale, **options)
    if not return_residual:
        return out.reshape(want.shape)
    want_out, want_lse = want
    return out.reshape(want_out.shape), jax.lax.stop_gradient(lse.astype(want_lse.dtype).reshape(want_lse.shape))


@functools.lru_cache(maxsize=256)
def _results(
    original: Callable[..., Any],
    shapes: tuple[tuple[str, tuple[int, ...], Any], ...],
    static: tuple[tuple[str, Any], ...],
) -> Any:
    """Return the shapes and dtypes of jax.nn's results; raise what it raises. Nothing is computed."""
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes}
    absent = dict.fromkeys({"query", "key", "value"} - set(arrays))
    return jax.eval_shape(functools.partial(original, **absent, **dict(static)), **arrays)


def _four_axes(array: jax.Array) -> jax.Array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _calls(number: int) -> str:
    return f"{number} call" if number == 1 else f"{number} calls"


def _in_words(arguments: Mapping[str, Any]) -> str:
    """Return the arguments that were given as text, arrays by dtype and shape."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        if name in _ARRAYS or isinstance(value, jax.Array | np.ndarray):
            array = jnp.asarray(value)
            words.append(f"{name} {array.dtype}{list(array.shape)}")
        else:
            words.append(f"{name}={value!r}")
    return ", ".join(words)
