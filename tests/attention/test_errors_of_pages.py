"""Calls with a paged cache and something wrong: what is raised, and what it must say."""

from typing import Any

import numpy as np
import pytest
from wrong_calls import ARRAY, FLOATING, INTEGERS, B, D, H, K, T, assert_refused, ints, rows, zeros

P, PAGE_SIZE, WIDE = 7, 3, 2
PAGES = dict(
    key=zeros(P, PAGE_SIZE, K, H),
    value=zeros(P, PAGE_SIZE, K, D),
    page_table=ints(B, WIDE),
    key_value_seq_lengths=ints(B),
)
OF_PAGES = "a paged cache must have the shape (P, page_size, K, H)"
NARROW = "the dtype of `query` or one of int8, float8_e4m3fn, float8_e5m2"


def with_pages(names: str, error: type[Exception], rule: str, wrong: dict[str, Any], **others: Any) -> list[Any]:
    """`rows` of calls that are right but for these arguments, with a paged cache."""
    return rows(
        names,
        error,
        rule,
        wrong,
        **{name: array for name, array in PAGES.items() if name not in names.split()} | others,
    )


TABLE = [
    *rows("k_scale v_scale", ValueError, "belongs to a paged cache", {"without `page_table`": 2.0}),
    *with_pages("key value", TypeError, ARRAY, {"list": [1.0]}),
    *with_pages(
        "key value",
        ValueError,
        OF_PAGES,
        {str((2, 5, 2, 8, 1)): zeros(2, 5, 2, 8, 1)},
    ),
    *with_pages(
        "key value",
        ValueError,
        OF_PAGES,
        {"(0, 3, 2, 8)": zeros(0, 3, 2, 8)},
    ),
    *with_pages("key value", TypeError, "one of the dtypes", {"uint8": zeros(P, PAGE_SIZE, K, H, dtype=np.uint8)}),
    *with_pages("key value", TypeError, NARROW, {"float16 and float32": zeros(P, PAGE_SIZE, K, H, dtype=np.float16)}),
    *with_pages("value", TypeError, "the same dtype", {"float32 and int8": zeros(P, PAGE_SIZE, K, D, dtype=np.int8)}),
    *with_pages("key", ValueError, "the same head dimension", {"H=8 and H=9": zeros(P, PAGE_SIZE, K, 9)}),
    *with_pages(
        "value",
        ValueError,
        "must have the same pages",
        {"[8, 3, 2]": zeros(8, PAGE_SIZE, K, D)},
    ),
    *with_pages("query", ValueError, "a multiple of the key heads", {"N=3 and K=2": zeros(B, T, 3, H)}),
    *with_pages(
        "key",
        ValueError,
        "a key and a value for each head",
        {"(7, 3, 1, 8)": zeros(P, PAGE_SIZE, 1, H)},
        value=None,
    ),
    *with_pages("page_table", TypeError, INTEGERS, {"float32": zeros(B, WIDE)}),
    *with_pages("page_table", TypeError, ARRAY, {"list": [[1, 2]]}),
    *with_pages("page_table", ValueError, "the shape (*B, pages)", {"(2,)": ints(B), "(3, 2)": ints(3, WIDE)}),
    *with_pages("key_value_seq_lengths", ValueError, "must be given with `page_table`", {"None": None}),
    *with_pages("key_value_seq_lengths", ValueError, "between 0 and S=6", {"0 to 7": np.array([0, 7])}),
    *with_pages("sequence_axis", ValueError, "each needs a paged cache whole", {"'x'": "x"}),
    *with_pages("k_scale v_scale", TypeError, "a number or a floating array", {"'x'": "x", "True": True}),
    *with_pages("k_scale v_scale", TypeError, FLOATING, {"int32": ints(K)}),
    *with_pages("k_scale v_scale", ValueError, "finite", {"nan": np.nan}),
    *with_pages(
        "k_scale v_scale", ValueError, "broadcastable to one for each page", {"(3,)": zeros(3), "(2, 7)": zeros(K, P)}
    ),
]


@pytest.mark.parametrize(("error", "name", "rule", "got", "arguments"), TABLE)
def test_wrong_argument(error: type[Exception], name: str, rule: str, got: str, arguments: dict[str, Any]) -> None:
    assert_refused(error, name, rule, got, arguments)
