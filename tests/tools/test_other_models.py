"""The examples with other libraries' models, each where its library is installed.

The libraries bring TensorFlow or pin what others need, so no extra of jflash has them.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from short_run import cover

FOLDER = Path(__file__).parents[2] / "examples" / "other_models"
LIBRARIES = {"gemma_attention.py": "gemma", "keras_hub_models.py": "keras_hub", "maxtext_attention.py": "maxtext"}


@cover(0)
@pytest.mark.parametrize("script", LIBRARIES)
def test_a_model_gives_the_same_with_jflash(script: str) -> None:
    """Each example compares a tiny model before and after the change of its lines, and says to how much they agree."""
    library = LIBRARIES[script]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library.replace('_', '-')}")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, FOLDER / script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"the same \w+ to \d", done.stdout), done.stdout


def test_the_page_names_every_example() -> None:
    page = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.glob("*.py")} == set(LIBRARIES) == set(re.findall(r"\]\((\w+\.py)\)", page))
