"""`jflash.attention` as an Equinox layer: `jflash.equinox.MultiheadAttention`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jflash._api import CheckpointName, Implementation, Scale, SequenceStrategy, Window, attention
from jflash._semantics.score_mod import ScoreModFunction
from jflash._tile_map import MaskModArgument

try:
    import equinox
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jflash.equinox needs Equinox: pip install 'jflash[equinox]'", name=error.name) from error

__all__ = ["MultiheadAttention"]


class Options(TypedDict, total=False):
    """The arguments of `attention` that the layer does not have of its own, without batch axes."""

    bias: Float[Array, "#N #T #S"] | None
    scale: Scale | None
    is_causal: bool
    query_seq_lengths: Int[Array, ""] | None
    key_value_seq_lengths: Int[Array, ""] | None
    local_window_size: Window | None
    implementation: Implementation
    logits_soft_cap: float | None
    alibi_slopes: Float[Array, " N"] | None
    score_mod: ScoreModFunction | None
    mask_mod: MaskModArgument | None
    query_offset: int | Int[Array, ""]
    segment_ids: Int[Array, " T"] | tuple[Int[Array, " T"], Int[Array, " S"]] | None
    sinks: Float[Array, " N"] | None
    precision: Any
    sequence_axis: str | tuple[str, ...] | None
    sequence_strategy: SequenceStrategy | None
    residual_checkpoint_name: CheckpointName


class MultiheadAttention(equinox.nn.MultiheadAttention):
    """An `equinox.nn.MultiheadAttention` with `jflash.attention` inside.

    Constructor, fields and parameters are those of the base class, so that either layer's weights serve the other.

    Example:
      >>> import jax, jax.numpy as jnp, jflash.equinox
      >>> layer = jflash.equinox.MultiheadAttention(num_heads=4, query_size=32, key=jax.random.key(0))
      >>> tokens = jnp.ones((64, 32))
      >>> layer(tokens, tokens, tokens, is_causal=True).shape
      (64, 32)
    """

    def __call__(
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        mask: Shaped[Array, "T S"] | Shaped[Array, "N T S"] | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
        reproducible: bool = False,
        **options: Unpack[Options],
    ) -> Float[Array, "T output_size"]:
        """Attend within one sequence; `jax.vmap` gives it a batch.

        It differs from the base class in two ways: a query that sees no key gets 0 instead of the mean of the values
        before the output projection, and logits, softmax and sums are computed in float32 at least.

        Args:
          query: `[T, query_size]`.
          key_: `[S, key_size]`.
          value: `[S, value_size]`.
          mask: `[T, S]`, or `[N, T, S]` with one for each of the N heads; True where the query may attend, or of
            numbers, of which 0 hides the key and any other shows it.
          key: a JAX random key, needed for dropout.
          inference: True turns dropout off; None for what the layer was set to.
          deterministic: Equinox's deprecated name for `inference`. The `deterministic` of `jflash.attention` is
            `reproducible` here.
          process_heads: a function of the query, key and value heads, `[T, N, qk_size]`, `[S, N, qk_size]` and
            `[S, N, vo_size]`, that gives new ones of the same shapes: rotary embeddings, for example.
          reproducible: promise the same bits on every run, which costs speed on some machines.
          **options: other arguments of `jflash.attention`, such as `is_causal`, `local_window_size` and `segment_ids`,
            for one sequence: without batch axes.

        Returns:
          `[T, output_size]`.

        Raises:
          RuntimeError: dropout is on and there is no `key`.
          ValueError: `process_heads` changed a shape.
          What `jflash.attention` raises, besides.
        """
        if deterministic is not None:
            warnings.warn("`deterministic` is deprecated in favour of `inference`.", stacklevel=2)
            inference = deterministic
        if inference is None:
            inference = self.dropout.inference
        dropout_rate = 0.0 if inference else self.dropout.p
        if dropout_rate > 0 and key is None:
            raise RuntimeError(f"Dropout needs a `key` when it is on. Got dropout_p={dropout_rate} and no key.")

        heads = (
            self._heads(self.query_proj, query),
            self._heads(self.key_proj, key_),
            self._heads(self.value_proj, value),
        )
        if process_heads is not None:
            shapes = [array.shape for array in heads]
            heads = process_heads(*heads)
            if [array.shape for array in heads] != shapes:
                raise ValueError(
                    f"`process_heads` must not change the shapes of the heads. Got {[array.shape for array in heads]} "
                    f"for {shapes}."
                )
        # The three may have different dtypes after projections of unlike dtypes or a `process_heads` with tables.
        dtype = jnp.result_type(*heads)
        query_heads, key_heads, value_heads = (array.astype(dtype) for array in heads)
        attended = attention(
            query_heads,
            key_heads,
            value_heads,
            mask=None if mask is None else jnp.asarray(mask).astype(bool),
            dropout_rate=dropout_rate,
            dropout_key=key,
            deterministic=reproducible,
            **options,
        )
        return jax.vmap(self.output_proj)(attended.reshape(len(attended), -1))

    def _heads(self, projection: equinox.nn.Linear, inputs: Float[Array, "T size"]) -> Float[Array, "T N H"]:
        return jax.vmap(projection)(inputs).reshape(len(inputs), self.num_heads, -1)
