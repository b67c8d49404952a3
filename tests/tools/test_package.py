"""The package as it is installed: light to import, documented, and built without a compiler."""

import ast
import email
import inspect
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax
import pytest
from short_run import cover

import jflash
from jflash import _api
from jflash_metal import _ffi

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(path.relative_to(ROOT) for name in ("jflash", "jflash_metal") for path in (ROOT / name).rglob("*.py"))
SHADERS = sorted(path.relative_to(ROOT) for path in (ROOT / "jflash_metal" / "shaders").iterdir())
RUNTIME = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
EXTRAS = {
    re.match(r"[\w-]+", requirement)[0].replace("-", "_")
    for requirements in PROJECT["optional-dependencies"].values()
    for requirement in requirements
} - {"jflash"}


def run(code: str, **environment: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_does_no_work() -> None:
    """No extra and no bench is imported. JAX starts no backend: the platform does not exist."""
    code = """
import sys, jax, jaxtyping, numpy
before = set(sys.modules)
import jflash
print(*set(sys.modules) - before)
try:
    jax.devices()
except RuntimeError:
    print("no backend was there")
"""
    modules, backend = run(code, JAX_PLATFORMS="no_such_platform").splitlines()
    assert "jflash" in modules.split()
    assert {"jflash.bench", "torch", *EXTRAS}.isdisjoint(modules.split())
    assert backend == "no backend was there"


def test_layers_are_imported_when_asked_for() -> None:
    """Layers need only the one import that people write."""
    assert run("import jflash; print(jflash.flax.attention_fn.__module__)").strip() == "jflash.flax"
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        jflash.torch()


def test_version_is_the_projects() -> None:
    assert jflash.__version__ == PROJECT["version"]


def test_changelog_begins_with_the_version() -> None:
    """The release workflow looks for it, with a date for "not released yet"."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(jflash.__version__)}, (not released yet|\d{{4}}-\d\d-\d\d)", heading)


def test_public_names() -> None:
    functions = ["attention", "explain", "ragged_paged_attention", "replacing_jax_nn", "tile_map", "update_pages"]
    assert jflash.__all__ == ["RESIDUAL_CHECKPOINT_NAMES", "AttentionWarning", "TileMap", *functions]
    assert {name for name in dir(jflash) if not name.startswith("_")} >= set(jflash.__all__)


def test_arguments_are_those_of_jax_nn() -> None:
    """The same names; those that can be given by position in the same order, with the same defaults."""
    own = inspect.signature(jflash.attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(own)
    by_position = lambda parameters: [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    simple = lambda parameters: [(p.name, p.default) for p in by_position(parameters)]
    assert simple(own) == simple(theirs)
    assert all(own[name].default == parameter.default for name, parameter in theirs.items())


def test_every_argument_is_documented_and_typed() -> None:
    parameters = inspect.signature(jflash.attention).parameters
    documented = re.findall(r"^ {6}(\w+): ", jflash.attention.__doc__, re.MULTILINE)
    assert [name for name in parameters if name != "return_residual"] == [
        name for name in documented if name in parameters and name != "return_residual"
    ]
    keywords = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {*_api.Options.__annotations__, "return_residual"}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_docstrings(path: Path) -> None:
    """The module, and everything in it that has a public name, has a docstring."""
    tree = ast.parse((ROOT / path).read_text())
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    overloads = [node for node in definitions if any("overload" in ast.unparse(d) for d in node.decorator_list)]
    public = [node for node in definitions if not node.name.startswith("_") and node not in overloads]
    assert ast.get_docstring(tree)
    assert [node.name for node in public if not ast.get_docstring(node)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built where there is no compiler, and no other program either."""
    directory = tmp_path_factory.mktemp("wheel")
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(directory)!r})"
    run(code, CC="false", CXX="false", PATH=str(directory), JFLASH_METAL_EMULATOR="0")
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contents(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {str(path) for path in (*MODULES, *SHADERS)} <= set(names)
    assert "jflash/py.typed" in names, "the project calls itself typed"
    assert any(name.endswith("LICENSE") for name in names)
    assert all(name.startswith("jflash") for name in names)
    assert not any("test" in name for name in names)
    files = {name for name in names if "dist-info" not in name} - {str(path) for path in SHADERS}
    assert all(name.endswith((".py", ".typed")) for name in files)
    assert not any("native" in name for name in files)


def built_with_the_emulator(directory: Path, **environment: str) -> set[str]:
    """The native files of a wheel that was asked to have the Metal emulator."""
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(directory)!r})"
    unoptimised = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
    run(code, JFLASH_METAL_EMULATOR="1", SKBUILD_CMAKE_ARGS=unoptimised, **environment)
    (path,) = directory.glob("*.whl")
    return {name for name in zipfile.ZipFile(path).namelist() if "native" in name}


def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    """The emulator is left out, and nothing fails."""
    assert built_with_the_emulator(tmp_path, CXX=str(tmp_path / "none"), CC=str(tmp_path / "none")) == set()


@cover(0)
@pytest.mark.skipif(os.environ.get("JFLASH_METAL_EMULATOR") != "1", reason="the emulator was not asked for")
def test_wheel_with_the_emulator(tmp_path: Path) -> None:
    """The library, and the headers that it compiles shaders with."""
    headers = {f"jflash_metal/native/metal_emulator/{path.name}" for path in (ROOT / "csrc/emulator/include").iterdir()}
    assert built_with_the_emulator(tmp_path) == {"jflash_metal/native/libjflash_metal.so", *headers}


@pytest.mark.skipif(os.environ.get("JFLASH_METAL_EMULATOR") != "1", reason="the emulator was not asked for")
def test_the_emulator_is_there_where_it_was_asked_for() -> None:
    """The emulator is there: without it all tests of Metal are skipped."""
    assert _ffi.available() is None


def test_native_library_is_built_for_the_oldest_jax() -> None:
    """A jaxlib refuses handlers built with the headers of a newer one."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["overrides"]
    (built_with,) = (one["build"]["requires"] for one in settings if "build" in one)
    (oldest,) = (one.removeprefix("jax>=") for one in PROJECT["dependencies"] if one.startswith("jax>="))
    assert built_with == [f"jaxlib=={oldest}"]


def test_wheel_requirements(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Version"] == jflash.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    always = [requirement for requirement in metadata.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in always} == RUNTIME == {"jax", "jaxtyping", "numpy"}
