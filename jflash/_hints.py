"""Hints about calls that are legal and probably not what their authors meant.

Each hint is a row of `HINTS`. It looks at shapes, dtypes and Python values when the call is traced, and never at the
values of a JAX array: it adds nothing to the program, and cannot wait for a device.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jflash import _dispatch
from jflash._platform import Platform
from jflash._semantics import mask_mod_as_options
from jflash._semantics.spec import Spec


class AttentionWarning(UserWarning):
    """A call of `attention` is legal, and its result or its cost is probably not what was meant.

    The warning is for what would otherwise pass in silence: a result that is wrong, or a compilation at every call. It
    comes once per process and kind, when the call is traced, and points at the line that made the call. Where the
    result is right and could only come faster there is no warning: `explain` says it in a line "note: ...", and the
    logger "jflash" once, at level INFO, which Python does not show by default.

    `warnings.filterwarnings("ignore", category=jflash.AttentionWarning)` turns all of them off.

    Example:
      >>> import warnings, jax.numpy as jnp, jflash
      >>> query, cache = jnp.ones((1, 1, 4, 16)), jnp.ones((1, 64, 4, 16))
      >>> with warnings.catch_warnings(action="error", category=jflash.AttentionWarning):
      ...     jflash.attention(query, cache, cache, is_causal=True)
      Traceback (most recent call last):
      jflash._hints.AttentionWarning: `query_offset` was not given, so the one query ...
    """


class Call(NamedTuple):
    """The facts of a call that a hint may look at."""

    arguments: Mapping[str, Any]
    """The arguments of `attention` as they were given; those that are missing have their defaults."""
    spec: Spec
    names: _dispatch.Names
    """The names of the backends that may serve."""
    platform: Platform
    is_traced: bool
    """Whether the call becomes a part of a larger program, rather than being compiled and run by itself."""


class Hint(NamedTuple):
    """A row of the table."""

    kind: str
    warns: bool
    """Whether the hint is an `AttentionWarning`; if not, it is for `explain` and the log."""
    message: Callable[[Call], str | None]
    """A function from a call to what there is to say of it, or None."""


_MOST_HEADS = 128
"""The most heads that are taken for heads: GPT-3 has 96 (arXiv:2005.14165), DeepSeek-V3 128 (arXiv:2412.19437). More of
them are likely to be tokens."""
_WIDEST_HEAD = 256
"""The widest head that is taken for one. If each has keys of its own, wider ones are likely to be the features of all
heads."""


def _heads_first(call: Call) -> str | None:
    """Hint at [B, N, T, H] in place of [B, T, N, H].

    Such a call is legal when queries and keys are equally many, and with grouped heads too. Without a batch axis, three
    axes may be [T, B * N, H], time first, which is right.
    """
    spec, axes = call.spec, call.arguments["query"].ndim
    if axes < 4 or spec.heads != spec.key_heads or spec.sequence_axes:
        return None
    are_heads = 0 < spec.query_length <= _MOST_HEADS and spec.query_length % max(spec.key_length, 1) == 0
    if spec.heads <= _MOST_HEADS or spec.key_length == 0 or not are_heads:
        return None
    return (
        "`query`, `key` and `value` have the axes [*B, T, N, H], tokens before heads; these have more heads than "
        "tokens. If heads come first, give jnp.swapaxes(x, -3, -2) of each, and swap the result's axes back. "
        f"Got T={spec.query_length}, S={spec.key_length}, N={spec.heads} and K={spec.key_heads}."
    )


def _heads_not_split(call: Call) -> str | None:
    """Hint at [B, T, features], where three axes mean [T, N, H]."""
    spec, axes = call.spec, call.arguments["query"].ndim
    if axes != 3 or spec.query_length != spec.key_length or not 1 < spec.heads == spec.key_heads:
        return None
    if spec.head_dim <= _WIDEST_HEAD:
        return None
    return (
        "Three axes are [T, N, H], a call without a batch. If these are [B, T, features], split the features into "
        "heads first: x.reshape(B, T, N, H). "
        f"Got T={spec.query_length}, N={spec.heads} and H={spec.head_dim}."
    )


def _no_offset(call: Call) -> str | None:
    """Hint at a decoding step whose query was left at key 0. An offset of 0 that is given is taken to be meant."""
    spec = call.spec
    if call.arguments.get("query_offset") is not None or spec.sequence_axes:
        return None
    if not (call.arguments.get("is_causal") or call.arguments.get("local_window_size") is not None):
        return None
    if spec.query_length != 1 or spec.key_length <= 1 or spec.bounds[1] != 0:
        return None
    return (
        "`query_offset` was not given, so the one query stands at key 0 and sees no later key. In decoding, give the "
        "number of keys before it: the cache's length before this step. Leave out `is_causal` if the query may see "
        f"all keys, or give query_offset=0 if key 0 is meant. Got T=1 and S={spec.key_length}."
    )


_REPLACED_OFTEN = 3
_replaced: weakref.WeakKeyDictionary[types.CodeType, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()
"""The last function made of each definition of a `score_mod`, and how many before it are gone."""


def _new_score_mod(call: Call) -> str | None:
    """Hint at a function that is defined in a loop which is not compiled: each turn makes a new one, and compiles for
    it.

    Neighbouring layers also make functions that differ, but these stay: only one that is gone counts as replaced.
    """
    if call.is_traced or call.spec.score_mod is None:
        return None
    function = call.spec.score_mod.function()
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    last, times = _replaced.get(code, (weakref.ref(function), 0))
    if last() is None:
        last, times = weakref.ref(function), times + 1
    _replaced[code] = last, times
    if times < _REPLACED_OFTEN:
        return None
    return (
        "`score_mod` is a new function at each call, and outside jax.jit each is compiled anew. Define it once, "
        "before the loop, or put the loop's body under jax.jit. "
        f"Got {code.co_qualname} of line {code.co_firstlineno}, {times + 1} times."
    )


_HIDES = -1e4
"""The largest value by which a mask hides a key: masks use -1e4, -1e9, -inf, or the least number of a dtype."""
_LOOKED_AT = 1024


def _bias_as_mask(call: Call) -> str | None:
    """Hint at a bias that is a mask.

    Only a NumPy array is looked at, which is in the host's memory, and only about a thousand values of it.
    """
    bias = call.arguments.get("bias")
    if not isinstance(bias, np.ndarray):
        return None
    # Rows often have an even length: with an odd step, not all of them are looked at in one place.
    some = bias.flat[:: bias.size // _LOOKED_AT | 1]
    hides = some <= _HIDES
    if not hides.any() or not (hides | (some == 0)).all():
        return None
    unseen = (
        "" if (some[hides] == -np.inf).all() else ", and a query that sees no key gets 0, not the mean of the values"
    )
    return (
        "`bias` seems to be a mask: it is 0 or at most -1e4. Give mask=bias == 0, or is_causal=True if that is what it "
        f"says: a mask takes less memory{unseen}. Got {bias.dtype}{list(bias.shape)}."
    )


_LONG = 2048
"""The least length of keys for the hint. Shorter calls may be one tile, of which nothing can be left out."""


def _mask_of_padding(call: Call) -> str | None:
    spec = call.spec
    if spec.mask_shape is None or spec.mask_shape[1:] != (1, 1, spec.key_length) or spec.key_length < _LONG:
        return None
    if not spec.operands.isdisjoint(("key_lengths", "key_segments")):
        return None
    return (
        "`mask` hides the same keys from all queries and heads. If they are padding at the end, give "
        "`key_value_seq_lengths` instead, else `segment_ids`: both leave out tiles of hidden keys, a mask does not. "
        f"Got mask {list(call.arguments['mask'].shape)}."
    )


def _float32(call: Call) -> str | None:
    """Hint at float32 where bfloat16 would be faster. Where float32 is meant, the hint costs one line of the log."""
    if call.spec.dtype != np.float32:
        return None
    half = dataclasses.replace(call.spec, dtype=np.dtype(jax.numpy.bfloat16))
    serves, faster = (_dispatch.ask(spec, call.names, call.platform)[0] for spec in (call.spec, half))
    if serves is None or serves == faster:
        return None
    return (
        f"{serves} serves float32 here, and {faster} would serve bfloat16, faster. If bfloat16 is exact enough, give "
        "x.astype(jnp.bfloat16) of `query`, `key` and `value`; sums and softmax stay in float32. Got dtype float32."
    )


def _segments_in_mask_mod(call: Call) -> str | None:
    """Name the options that say the same, which need no map and which the kernels of every backend have."""
    spec = call.spec
    if spec.mask_mod is None or call.arguments.get("query_offset") is not None:
        return None
    said = mask_mod_as_options.says(spec.mask_mod)
    if said is None or not said.segments:
        return None
    return (
        f"`mask_mod` says what {said.options(spec.key_length)} says, which is faster where ids are sorted: no map of "
        "tiles is made for it, and the kernels of every implementation have it. "
        f"Got T={spec.query_length} and S={spec.key_length}."
    )


def _mask_mod_without_offset(call: Call) -> str | None:
    if call.spec.mask_mod is None or call.arguments.get("query_offset") is None:
        return None
    return (
        "`query_offset` does not move the indices that `mask_mod` gets: its query_index counts the rows of `query` "
        "from 0. To look at positions, close over the offset and add it there. Got both."
    )


HINTS = (
    Hint("heads first", True, _heads_first),
    Hint("heads not split", True, _heads_not_split),
    Hint("no offset", True, _no_offset),
    Hint("new score_mod", True, _new_score_mod),
    Hint("bias as mask", False, _bias_as_mask),
    Hint("mask of padding", False, _mask_of_padding),
    Hint("segments in mask_mod", False, _segments_in_mask_mod),
    Hint("mask_mod without offset", False, _mask_mod_without_offset),
    Hint("float32", False, _float32),
)

_given: set[str] = set()
_log = logging.getLogger("jflash")
_NOT_THE_CALLERS = (*jax.__path__, os.path.dirname(__file__))
"""The folders in which no line of a caller is. JAX's is one: it stands between jflash's own functions too."""


def _hints(call: Call) -> tuple[Hint, ...]:
    """Return the hints that may look at a call: none can be compared with a size that is symbolic."""
    return HINTS if call.spec.symbolic_size is None else ()


def give(call: Call) -> None:
    """Say every hint that this call gives and that was not said before.

    A warning that a filter turns into an exception does not count as said: the next such call raises it again.
    """
    for hint in _hints(call):
        if hint.kind in _given or not (hint.warns or _log.isEnabledFor(logging.INFO)):
            continue
        message = hint.message(call)
        if message is None:
            continue
        if hint.warns:
            warnings.warn(message, AttentionWarning, skip_file_prefixes=_NOT_THE_CALLERS)
        else:
            _log.info("%s", message)
        _given.add(hint.kind)


def lines(call: Call) -> Iterator[str]:
    """Yield every hint that this call gives as a note, for `explain`."""
    for hint in _hints(call):
        message = hint.message(call)
        if message is not None:
            yield f"note: {message}"
