"""Calls with something wrong in one argument, and what the error about it must say."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

import jflash
from jflash import _autodiff

B, T, S, N, K, H, D = 2, 4, 5, 4, 2, 8, 6


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


GOOD = dict(query=zeros(B, T, N, H), key=zeros(B, S, K, H), value=zeros(B, S, K, D))
ARRAY, NUMBERS = "a JAX or NumPy array", "an array of numbers"
FLOATING, INTEGERS = "a floating-point dtype", "an integer dtype"


def rows(names: str, error: type[Exception], rule: str, wrong: dict[str, Any], **others: Any) -> list[Any]:
    """Calls with something wrong in place of each of the named arguments, besides `others`. The message has to name
    the argument, state the rule, and after "Got" show the value as written in front of it here."""
    return [
        pytest.param(error, f"`{name}`", rule, got, {name: value, **others}, id=f"{name}: {got}")
        for name in names.split()
        for got, value in wrong.items()
    ]


def assert_own(caught: pytest.ExceptionInfo[Exception]) -> None:
    package = pathlib.Path(jflash.__file__).parent
    assert caught.traceback[-1].path.is_relative_to(package), "not an error from inside JAX"


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Within it attention must not be computed."""

    def attend(*_: Any) -> NoReturn:
        raise AssertionError("the call was wrong, and was computed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_autodiff, "attend", attend)
        yield


def assert_refused(error: type[Exception], name: str, rule: str, got: str, arguments: dict[str, Any]) -> None:
    """Assert that a call raises this very error before anything is computed, and so does its explanation."""
    with nothing_runs():
        with pytest.raises(error) as caught:
            jflash.attention(**{**GOOD, **arguments})
        message = str(caught.value)
        assert type(caught.value) is error
        assert name in message
        assert rule in message
        assert got in message.partition("Got ")[2]
        assert_own(caught)
        with pytest.raises(error) as explained:
            jflash.explain(**{**GOOD, **arguments})
        assert str(explained.value) == message
