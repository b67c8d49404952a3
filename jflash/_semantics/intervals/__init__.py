"""Interval arithmetic on a program of indices: what it may give over a whole rectangle of them, without a look at each.

`interval` says what is known of a value, `integers`, `truth`, `floats` and `reads` what an operation makes of that, and
`evaluation` runs a program. Nothing is ever called impossible that may happen: wrap-around of integers, NaN and
infinities are bounded too, and the result of an operation that is not understood may be anything.
"""

from jflash._semantics.intervals.evaluation import Evaluation
from jflash._semantics.intervals.interval import Blocks, Interval, point

__all__ = ["Blocks", "Evaluation", "Interval", "point"]
