"""How a lane takes bfloat16 numbers from two float32 numbers, on arrays with an element for each thread."""

import jax.numpy as jnp
import numpy as np
from lanes import THREAD, Numbers

from jflash._backends.nvidia.threads import pieces


def test_lanes_take_the_nearest_numbers_and_leave_the_rest():
    generator = np.random.default_rng(0)
    shape = (2, THREAD.size)
    pair = (generator.normal(size=shape) * 2.0 ** generator.integers(-90, 90, shape)).astype(np.float32)
    word, rests = pieces.of_pair(Numbers(), list(pair))
    halves = word.astype(np.uint32)[:, None].view(np.uint16).T
    for number, half, rest in zip(pair, halves, rests, strict=True):
        nearest = np.asarray(jnp.asarray(number).astype(jnp.bfloat16))
        np.testing.assert_array_equal(half, nearest.view(np.uint16))
        np.testing.assert_array_equal(rest, number - nearest.astype(np.float32))
