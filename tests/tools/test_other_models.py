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
LIBRARIES = {
    "bonsai_attention.py": ("bonsai.models", "have a clone of github.com/jax-ml/bonsai on PYTHONPATH"),
    "gemma_attention.py": ("gemma", "pip install gemma"),
    "keras_hub_models.py": ("keras_hub", "pip install keras-hub"),
    "levanter_attention.py": ("levanter", "pip install --pre marin-levanter"),
    "maxtext_attention.py": ("maxtext", "pip install 'maxtext[tpu]'"),
}
"""For each example the module that it needs, and how to get it."""


def is_installed(module: str) -> bool:
    """PyPI has another `bonsai`, whose models are none of these."""
    package, _, part = module.partition(".")
    return importlib.util.find_spec(package) is not None and (not part or importlib.util.find_spec(module) is not None)


@cover(0)
@pytest.mark.parametrize("script", LIBRARIES)
def test_a_model_gives_the_same_with_jflash(script: str) -> None:
    """Each example compares a tiny model before and after the change of its lines, and says to how much they agree."""
    module, how = LIBRARIES[script]
    if not is_installed(module):
        pytest.skip(f"{module} is not installed: {how}")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, FOLDER / script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"the same \w+ to \d", done.stdout), done.stdout


def test_the_page_names_every_example() -> None:
    page = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.glob("*.py")} == set(LIBRARIES) == set(re.findall(r"\]\((\w+\.py)\)", page))
