"""Calls have few kernels beside those of attention; compiled for an H200, without one."""

from pathlib import Path

import compilers_wheels
from short_run import cover

MOST = {
    **{"causal": 12, "gradient": 24, "step": 1, "step of splits": 2},
    **{"decoding": 3, "latent": 4, "layers": 8, "ragged": 4, "ragged with sinks": 5},
}
"""The kernels of each call at most, of attention among them: 1, 4, 1, 2, 3, 3, 8, 3 and 3. XLA of jax
0.11.2 makes 10, 20, 1, 2, 3, 4, 8, 4 and 5."""


@cover(0)
def test_few_kernels(tmp_path: Path) -> None:
    found = compilers_wheels.run("list_compile.py", tmp_path)
    assert found.keys() == MOST.keys()
    assert all(found[name] <= most for name, most in MOST.items()), found
