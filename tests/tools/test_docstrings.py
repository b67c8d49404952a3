"""Every public name has an example in its docstring, and what the example prints is what it says."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import doctest
import importlib
from pathlib import Path

import jax
import pytest
from short_run import cover

PACKAGE = Path(__file__).parents[2] / "jflash"
PUBLIC = ["jflash", "jflash.bench.__main__", *sorted(f"jflash.{path.stem}" for path in PACKAGE.glob("[a-z]*.py"))]
MODULES = {module: importlib.import_module(module) for module in PUBLIC}
NAMES = [
    (module, name)
    for module, contents in MODULES.items()
    for name in getattr(contents, "__all__", ["main"])
    if callable(getattr(contents, name))
]
"""The public names; a module that is called by its name has `main`. A constant has no docstring that Python finds."""

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@cover(every=6)
@pytest.mark.parametrize(("module", "name"), NAMES, ids=map(".".join, NAMES))
def test_examples_in_docstrings(module: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = doctest.DocTestParser()
    text = getattr(MODULES[module], name).__doc__
    example = parser.get_doctest(text, {}, f"{module}.{name}", None, None)
    assert example.examples, "a public name needs an example"
    if jax.default_backend() != "cpu":
        pytest.skip("The examples print what a CPU says.")
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not failed, capsys.readouterr().out
