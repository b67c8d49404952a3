"""`jflash.attention` as Keras layers, for Keras' JAX backend.

    jflash.keras.MultiHeadAttention(8, 64, dropout=0.1)
    jflash.keras.GroupedQueryAttention(64, 8, 2)

stand in place of `keras.layers.MultiHeadAttention` and `keras.layers.GroupQueryAttention`.
"""

from __future__ import annotations

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

    mask: Bool[Array, "*#B #N #T #S"] | None
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    is_causal: bool
    window: int | None


def _of_pairs(mask: Any) -> Bool[Array, "*#B #N #T #S"] | None:
    """A mask [B, T, S], or with heads, of any dtype."""
    if mask is None:
        return None
    mask = jnp.asarray(mask).astype(bool)
    return mask[:, None] if mask.ndim == 3 else mask


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
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    visible: _Visible | Shaped[Array, "..."] | None,
    use_causal_mask: bool,
    dropout: Any,
    training: Any,
    return_attention_scores: bool,
) -> Float[Array, "B T N D"]:
    if return_attention_scores:
        raise NotImplementedError(
            "`return_attention_scores=True` asks for the attention weights, which jflash never has as an array. "
            "Keras' own layer gives them, from the same weights."
        )
    if query.ndim != 4:
        raise NotImplementedError(
            f"jflash's layers attend over one axis, of inputs [B, T, features]. Got heads of shape {query.shape}."
        )
    if not isinstance(visible, _Visible):
        # Who calls `_compute_attention` directly, or gives it a mask of their own, has the layer's window in that.
        visible = _Visible(_of_pairs(visible), None, False, None)
    dtype = jnp.result_type(query, key, value)
    query, key, value = (array.astype(dtype) for array in (query, key, value))
    rate = float(dropout.rate) if training else 0.0
    window = visible.window
    return attention(
        query, key, value,
        mask=visible.mask,
        segment_ids=visible.segment_ids,
        is_causal=visible.is_causal or use_causal_mask,
        # Keras counts the query's own position in its window.
        local_window_size=None if window is None else window - 1,
        dropout_rate=rate,
        dropout_key=_key(dropout) if rate > 0 else None,
    )  # fmt: skip


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
        return _Visible(_of_pairs(attention_mask), segments, bool(use_causal_mask), window)


@keras.saving.register_keras_serializable(package="jflash")
class MultiHeadAttention(_MasksAsOptions, keras.layers.MultiHeadAttention):
    """A `keras.layers.MultiHeadAttention` with `jflash.attention` inside, with dropout as without.

    Constructor, call, configuration and weights are those of the base class, so that either layer's weights serve the
    other. Inputs are `[B, T, features]`. Keras' padding masks, `use_causal_mask` and `sliding_window` take no `[T, S]`
    array; `attention_mask`, `[B, T, S]` or broadcastable to `[B, N, T, S]`, is used as it is.

    It differs from the base class in three ways: a query that sees no key gets 0 instead of the mean of the values
    before the output projection; logits, softmax and sums are computed in float32 at least; dropout draws other bits
    from the same seed. `flash_attention` changes nothing, but with dropout Keras' constructor refuses it.

    Raises, when called:
      NotImplementedError: for `return_attention_scores=True`, and for inputs that attend over several axes.
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
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        value: Float[Array, "B S N D"],
        attention_mask: _Visible | Shaped[Array, "B #T #S"] | Shaped[Array, "B #N #T #S"] | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Float[Array, "B T N D"], None]:
        visible, dropout, scores = attention_mask, self._dropout_layer, return_attention_scores
        return _attend(query, key, value, visible, use_causal_mask, dropout, training, scores), None


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
        visible, dropout, scores = attention_mask, self._dropout_layer, self._return_attention_scores
        return _attend(query, key, value, visible, use_causal_mask, dropout, training, scores), None


GroupQueryAttention = GroupedQueryAttention
"""The layer by the name under which Keras exports it."""
