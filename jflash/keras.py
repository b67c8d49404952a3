"""`jflash.attention` as Keras layers, for Keras' JAX backend.

    jflash.keras.MultiHeadAttention(8, 64, dropout=0.1)
    jflash.keras.GroupedQueryAttention(64, 8, 2)

stand in place of `keras.layers.MultiHeadAttention` and `keras.layers.GroupQueryAttention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jflash._api import attention

try:
    import keras
except ModuleNotFoundError as error:
    if error.name in ("tensorflow", "torch", "openvino"):
        raise ImportError(
            "jflash.keras needs Keras' JAX backend: set KERAS_BACKEND=jax before Keras is first imported. "
            f"Keras is set to another backend, whose package {error.name!r} is not installed."
        ) from error
    raise ModuleNotFoundError("jflash.keras needs Keras: pip install 'jflash[keras]'", name=error.name) from error

if keras.config.backend() != "jax":
    raise ImportError(
        "jflash.keras needs Keras' JAX backend: set KERAS_BACKEND=jax before Keras is first imported. "
        f"Keras is set to {keras.config.backend()!r}."
    )

__all__ = ["GroupQueryAttention", "GroupedQueryAttention", "MultiHeadAttention"]


class _Visible(NamedTuple):
    """The rule of which query sees which key, in the form in which it travels through Keras' `call`."""

    mask: Shaped[Array, "..."] | None
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    is_causal: bool
    window: int | None


class _Axes(NamedTuple):
    """The axes of projected queries, keys or values `[B, ..., heads, features]` over which a layer attends."""

    attended: tuple[int, ...]
    batch: tuple[int, ...]

    def flatten(self, array: Shaped[Array, "B ... N H"]) -> Shaped[Array, "*B T N H"]:
        """Return the array with the attended axes as one, behind those of the batch."""
        moved = jnp.moveaxis(array, (*self.batch, *self.attended), range(array.ndim - 2))
        length = math.prod(array.shape[axis] for axis in self.attended)
        return moved.reshape(*moved.shape[: len(self.batch)], length, *array.shape[-2:])

    def restore(self, out: Shaped[Array, "*B T N D"], query: Shaped[Array, "B ... N H"]) -> Shaped[Array, "B ... N D"]:
        """Return the output with its axes where those of the `query` are."""
        lengths = [query.shape[axis] for axis in self.attended]
        split = out.reshape(*out.shape[: len(self.batch)], *lengths, *out.shape[-2:])
        return jnp.moveaxis(split, range(query.ndim - 2), (*self.batch, *self.attended))

    def of_pairs(self, mask: Any, query: Any, key: Any) -> Bool[Array, "*#B #N #T #S"] | None:
        """Return a mask of Keras' with the attended axes of queries as one, and those of keys.

        They are the mask's last axes. Before them are those of the batch and that of heads, of which the last may be
        missing, as in Keras' own layer.
        """
        if mask is None:
            return None
        mask = jnp.asarray(mask).astype(bool)
        front = max(mask.ndim - 2 * len(self.attended), 0)
        shape = (*mask.shape[:front], *[1] * (len(self.batch) + 1 - front))
        if len(self.attended) == 1:
            return mask.reshape(*shape, *mask.shape[front:])
        sides = [[array.shape[axis] for axis in self.attended] for array in (query, key)]
        mask = jnp.broadcast_to(mask, (*mask.shape[:front], *sides[0], *sides[1]))
        return mask.reshape(*shape, *map(math.prod, sides))

    def of_rows(self, ids: Int[Array, "B L"]) -> Int[Array, "*#B L"]:
        """Return what is known of the positions of the first axis for each entry of the batch."""
        return ids.reshape(ids.shape[0], *[1] * (len(self.batch) - 1), ids.shape[1])


def _segments(query: Any, value: Any, query_mask: Any, key_masks: list[Any]) -> Any:
    """Return padding as segments, which take no [T, S] array: 1 is a token, 0 a padded key, -1 a padded query."""
    key_masks = [mask for mask in key_masks if mask is not None]
    if query_mask is None and not key_masks:
        return None
    queries = jnp.ones(query.shape[:2], jnp.int32)
    keys = jnp.ones(value.shape[:2], jnp.int32)
    if query_mask is not None:
        queries = jnp.where(query_mask, queries, -1)
    for mask in key_masks:
        keys = jnp.where(mask, keys, 0)
    return queries, keys


def _attend(
    query: Float[Array, "B ... N H"],
    key: Float[Array, "B ... K H"],
    value: Float[Array, "B ... K D"],
    visible: _Visible,
    dropout: Any,
    training: Any,
    return_attention_scores: bool,
    attended: Iterable[int] | None = (1,),
) -> Float[Array, "B ... N D"]:
    if return_attention_scores:
        raise NotImplementedError(
            "`return_attention_scores=True` asks for the attention weights, which jflash never has as an array. "
            "Keras' own layer gives them, from the same weights."
        )
    mask, segments, is_causal, window = visible
    attended = tuple(attended or range(1, query.ndim - 2))
    if attended != (1,) and (is_causal or segments is not None or window is not None):
        raise NotImplementedError(
            "`use_causal_mask`, a window and masks of padding are of the first axis after the batch's, and this layer "
            f"attends over {attended} of heads of shape {query.shape}. Give it an `attention_mask`."
        )
    axes = _Axes(attended, tuple(axis for axis in range(query.ndim - 2) if axis not in attended))
    dtype = jnp.result_type(query, key, value)
    flat_query, flat_key, flat_value = (axes.flatten(array).astype(dtype) for array in (query, key, value))
    if segments is not None:
        of_queries, of_keys = map(axes.of_rows, segments)
        segments = jnp.broadcast_to(of_queries, flat_query.shape[:-2]), jnp.broadcast_to(of_keys, flat_key.shape[:-2])
    rate = float(dropout.rate) if training else 0.0
    out = attention(
        flat_query, flat_key, flat_value,
        mask=axes.of_pairs(mask, query, key),
        segment_ids=segments,
        is_causal=is_causal,
        # Keras counts the query's own position in its window.
        local_window_size=None if window is None else window - 1,
        dropout_rate=rate,
        dropout_key=_key(dropout) if rate > 0 else None,
    )  # fmt: skip
    return axes.restore(out, query)


def _visible(mask: _Visible | Shaped[Array, "..."] | None, use_causal_mask: bool) -> _Visible:
    """Return the rule for what `_compute_attention` is given, by Keras' `call` or by a subclass."""
    if not isinstance(mask, _Visible):
        # Who calls `_compute_attention` directly, or gives it a mask of their own, has the layer's window in that.
        mask = _Visible(mask, None, False, None)
    return mask._replace(is_causal=mask.is_causal or use_causal_mask)


def _key(dropout: Any) -> Array:
    """Return the next key of the layer's own seed generator, two 32-bit words."""
    return jax.random.wrap_key_data(jnp.asarray(dropout.seed_generator.next()), impl="threefry2x32")


class _MasksAsOptions:
    """The masks of Keras' layers, told to jflash without an array of all pairs where there is none."""

    _window_name: str
    """The name of the attribute that has the layer's window, since Keras 3.15."""

    # Keras calls this method wherever `_compute_attention` is overridden, and passes the result on unread.
    def _compute_attention_mask(
        self,
        query: Shaped[Array, "B T ..."],
        value: Shaped[Array, "B S ..."],
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> _Visible:
        segments = _segments(query, value, query_mask, [value_mask, key_mask])
        window = getattr(self, self._window_name, None)
        return _Visible(attention_mask, segments, bool(use_causal_mask), window)


@keras.saving.register_keras_serializable(package="jflash")
class MultiHeadAttention(_MasksAsOptions, keras.layers.MultiHeadAttention):
    """A `keras.layers.MultiHeadAttention` with `jflash.attention` inside, with dropout as without.

    Constructor, call, configuration and weights are those of the base class, so that either layer's weights serve the
    other. Inputs are `[B, T, features]`, or have more axes, of which `attention_axes` are attended over as one. Keras'
    padding masks, `use_causal_mask` and `sliding_window` take no `[T, S]` array; `attention_mask`, `[B, T, S]` or
    broadcastable to `[B, N, T, S]`, is used as it is.

    It differs from the base class in three ways: a query that sees no key gets 0 instead of the mean of the values
    before the output projection; logits, softmax and sums are computed in float32 at least; dropout draws other bits
    from the same seed. `flash_attention` changes nothing, but with dropout Keras' constructor refuses it.

    Raises, when called:
      NotImplementedError: for `return_attention_scores=True`; for padding masks, `use_causal_mask` and `sliding_window`
        where it attends over other axes than the first after the batch's.
      What `jflash.attention` raises, besides.

    Example:
      >>> import jax.numpy as jnp, jflash.keras
      >>> layer = jflash.keras.MultiHeadAttention(num_heads=4, key_dim=8, dropout=0.1)
      >>> tokens = jnp.ones((2, 64, 32))
      >>> layer(tokens, tokens, use_causal_mask=True, training=True).shape
      (2, 64, 32)
    """

    _window_name = "_sliding_window"

    def _compute_attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Float[Array, "B ... N H"],
        key: Float[Array, "B ... N H"],
        value: Float[Array, "B ... N D"],
        attention_mask: _Visible | Shaped[Array, "..."] | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Float[Array, "B ... N D"], None]:
        visible, dropout = _visible(attention_mask, use_causal_mask), self._dropout_layer
        scores, axes = return_attention_scores, self._attention_axes
        return _attend(query, key, value, visible, dropout, training, scores, axes), None


@keras.saving.register_keras_serializable(package="jflash")
class GroupedQueryAttention(_MasksAsOptions, keras.layers.GroupQueryAttention):
    """A `keras.layers.GroupQueryAttention` with `jflash.attention` inside, with dropout as without.

    Keys and values are not repeated for the query heads that share them. Inputs, masks and differences from the base
    class are those of `MultiHeadAttention`.

    Example:
      >>> import jax.numpy as jnp, jflash.keras
      >>> layer = jflash.keras.GroupedQueryAttention(head_dim=8, num_query_heads=4, num_key_value_heads=2)
      >>> tokens = jnp.ones((2, 64, 32))
      >>> layer(tokens, tokens, use_causal_mask=True).shape
      (2, 64, 32)
    """

    _window_name = "sliding_window"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_repeats = 1  # Keras' `call` repeats every key head so often.

    def _compute_attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        attention_mask: _Visible | Shaped[Array, "B #T #S"] | Shaped[Array, "B #N #T #S"] | None = None,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tuple[Float[Array, "B T N H"], None]:
        visible, dropout = _visible(attention_mask, use_causal_mask), self._dropout_layer
        return _attend(query, key, value, visible, dropout, training, self._return_attention_scores), None


GroupQueryAttention = GroupedQueryAttention
"""The layer by the name under which Keras exports it."""
