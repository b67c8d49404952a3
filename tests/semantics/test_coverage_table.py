"""The table of examples/benchmarks/mask-functions.md is what the tiles of its functions are at 4,096 tokens."""

from pathlib import Path

import mask_functions
import pytest
from short_run import cover

PAGE = Path(__file__).parents[2] / "examples" / "benchmarks" / "mask-functions.md"
ROWS = {
    cells[0]: cells[1:4]
    for line in PAGE.read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 9
}


def test_every_function_has_a_row() -> None:
    assert set(mask_functions.families(128)) <= set(ROWS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("window of frames", "block table") else cover(0))
        for name in mask_functions.families(128)
    ],
)
def test_tiles_at_4096(name: str) -> None:
    """The map is sound as well: `measure` holds it to the function of every pair."""
    row = mask_functions.benchmark.measure(mask_functions.families(4096)[name], 4096, repeats=0)
    assert str(row).split(" | ")[:3] == ROWS[name]
