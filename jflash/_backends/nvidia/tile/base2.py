"""How logits become probabilities, exp(logit - reference), with the hardware's base-2 exponential."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.facts import facts_of
from jflash._semantics.spec import Spec

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Exponent:
    """The conversion of a call's logits to base 2."""

    factor: float
    """What takes a logit, or a plain call's product, to base 2."""
    exact: bool
    """Whether the reference is subtracted first: a bias may be as large as its dtype allows."""
    limit: float = math.inf
    """The largest reference whose rounding scales probabilities by no more than their dtype has room for."""

    def __call__(self, logits: Array, reference: Array | None) -> Array:
        """Probabilities from logits and, broadcast to them, their reference in `units`; `None`: it is subtracted."""
        if reference is None:
            return jnp.exp2(logits * self.factor)
        if self.exact:
            return jnp.exp2((logits - reference) * self.factor)
        return jnp.exp2(logits * self.factor - reference)

    def units(self, logits: Array) -> Array:
        """Logits in the units of a reference: in base 2, unless they have to be exact."""
        return logits if self.exact else logits * self.factor

    def relative_to(self, reference: Array) -> tuple[Array | float, Array]:
        """Two numbers for a row, with which exp2(logits * factor - subtrahend) are its weights; `reference` in `units`.

        Rounding the subtrahend scales all of them alike, and they are divided by their sum. Past the limit the factor
        is 1, and nothing is rounded: logits are so far apart that the largest has all the weight either way.
        """
        if not self.exact:
            return self.factor, reference
        is_below = self._is_below_limit(reference)
        return jnp.where(is_below, self.factor, 1.0), self._subtrahend(reference, is_below)

    def rescaling(self, before: Array, reference: Array) -> Array:
        """The factor that makes weights relative to a row's `before` relative to its new reference.

        Both subtrahends are numbers that were rounded, and no product stands next to the difference: the compiler
        would make one instruction of the two, which does not round, and with every tile the weights before would drift.
        """
        if not self.exact:
            return jnp.exp2(before - reference)
        was_below, is_below = map(self._is_below_limit, (before, reference))
        difference = self._subtrahend(before, was_below) - self._subtrahend(reference, is_below)
        return jnp.exp2(jnp.where(was_below == is_below, difference, before - reference))

    def _is_below_limit(self, reference: Array) -> Array:
        return jnp.abs(reference) < self.limit

    def _subtrahend(self, reference: Array, is_below_limit: Array) -> Array:
        return jnp.where(is_below_limit, reference * self.factor, reference)


def of(spec: Spec) -> Exponent:
    """The conversion for a call."""
    facts = facts_of(spec)
    if facts.is_plain:
        return Exponent(facts.sums_scale * LOG2_E, exact=False)
    exact = "bias" in spec.operands or spec.score_mod is not None
    # Where weights are off by 2**8 and 2**32, and logits at least 8 and 32 apart.
    limit = 2.0**27 if spec.dtype == jnp.float16 else 2.0**29
    return Exponent(LOG2_E, exact, limit)
