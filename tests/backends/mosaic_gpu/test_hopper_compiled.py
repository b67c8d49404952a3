"""The Hopper kernels compiled for sm_90a, without a GPU: no registers spilled, no product made to wait for another.

Needs the compiler's wheels: `pip install .[hopper-compiler]`.
"""

import compilers_wheels
import pytest

SPILLS = {
    **dict.fromkeys(
        ("d256, rounds: forward", "d256 causal, rounds: forward"),
        (
            36,
            "It keeps where the next blocks are: with the 12 bytes that it spills for 132 processors it is 2 to 8% "
            "faster at 1,024 tokens, full, than without rounds, where nothing is spilled.",
        ),
    ),
    "d64 causal, a CTA for a head: forward": (4, "Where one multiprocessor takes all blocks; every GPU has more."),
    "d64 causal, segments, rounds: forward": (
        112,
        "Four warpgroups, all the same 24% faster than three for 1,024 tokens in 4 segments.",
    ),
    **dict.fromkeys(
        (
            "d64 causal, bias of keys, rounds: forward",
            *(f"d64 causal, bias of keys, tiles {place}: forward" for place in (1, 2)),
        ),
        (
            20,
            "It keeps whether the next tile's biases are large. With them in columns of the keys 1,024 tokens are 11% "
            "faster at d64 causal, in rounds of four warpgroups, and 6% at d128, than with them added to logits.",
        ),
    ),
    "bias of keys, rounds: forward": (
        28,
        "As at d64 causal; its lists span heads, and it keeps an item's head. What that costs was not measured yet.",
    ),
    "latent, pages of 16, paged: forward": (
        140,
        "What it keeps of four pages of a tile, and where packed rows lie that it stores in place. It takes 0.955 of "
        "the time of a kernel that spilled 8 bytes and left packed rows to be moved (16 heads, 32 entries of 4,096).",
    ),
    "latent, pages of 64, paged: forward": (16, "Where packed rows lie. It takes 0.948 of that time."),
    "latent, one array, pages of 16, paged: forward": (16, "As with two arrays, of whose time it takes 0.68."),
    "latent, one array, several, paged: forward": (8, "The queries' offset. It takes 0.71 of that with two arrays."),
    "soft cap, dropout: forward": (
        132,
        "It keeps a tile's words of dropout beside the polynomials. What that costs was not measured yet.",
    ),
    **dict.fromkeys(
        ("float32 d128, rounds: forward", "float32 d128 causal, rounds: forward"),
        (
            128,
            "It keeps where the next blocks are, and P both whole and in pieces. What that costs was not measured yet.",
        ),
    ),
    "d512 causal: forward": (
        32,
        "With tiles of 128 keys. It takes 0.77 to 0.83 of the time that it took before, from 4,096 tokens on (H100).",
    ),
    "soft cap, odd: forward": (
        88,
        "It keeps where panels of values are. With 1,021 tokens it takes 313 us for 277, and padded copies took 186.",
    ),
    "d256, odd: forward": (
        4,
        "One number. With 1,021 causal tokens it takes 137 us for 128, and padded copies took 187.",
    ),
    "float32 d256 causal, soft cap: forward": (
        28,
        "The warpgroup that makes weights has 136 registers. What that costs was not measured yet.",
    ),
    "float32 d256/128 causal, highest: forward": (
        96,
        "Those that weigh have P in three pieces, and a second accumulator. 192 columns of both, with which nothing is "
        "spilled, take 0.74 of the time that they took before (4,096 causal tokens, H100).",
    ),
    "float32 d64, highest: tangent": (
        40,
        "Where S is made of three pieces of each operand. What that costs was not measured yet.",
    ),
    "d256 causal, dropout: d_query": (
        64,
        "As without dropout, and a head's two words. What that costs was not measured yet.",
    ),
    **dict.fromkeys(
        ("wide_d_query", "wide_d_key"),
        (
            44,
            "With pieces of float32 it keeps where parts of both are. With 20 bytes, d256 takes 0.79 of the time that "
            "it took before values came in parts, when nothing was spilled (4,096 tokens, full, one H100).",
        ),
    ),
    "backward": (
        400,
        "The fused backward holds dK, dV and two tiles. It spills where a logit is more than a product times the "
        "scale, most with ALiBi and a gradient of the scale, and with d128's other tiles: with 76 bytes, a soft cap's "
        "takes 2.97 ms for two entries of 16 causal heads and 8,192 tokens, where another library's takes 3.98.",
    ),
    "backward_short": (
        300,
        "As the fused backward: 292 bytes at d128 with 64 tokens, where it takes 0.82 of that one's time (one H200), "
        "and 72 with a soft cap at d64, where it takes 0.78 with 512 tokens.",
    ),
    **dict.fromkeys(
        (f"{case}, score_mod of a table: forward" for case in ("d256 causal", "bias")),
        (16, "It keeps what is read for a tile. What that costs was not measured yet."),
    ),
    **dict.fromkeys(
        (f"{case}, score_mod of a table: tangent" for case in ("d128 causal", "d256 causal", "bias")),
        (172, "It keeps what is read for a tile of a table and of its tangent. What that costs was not measured yet."),
    ),
    "d128 mask_mod: forward": (24, "It keeps a tile's entry in the list. What that costs was not measured yet."),
    **dict.fromkeys(
        ("d128 mask_mod: tangent", "d128 mask_mod of pixels: tangent"),
        (152, "It holds two accumulators beside what the function needs. What that costs was not measured yet."),
    ),
    "soft cap and scale: tangent": (
        212,
        "It keeps S, where the scale moves, and the cap's slopes. What that costs was not measured yet.",
    ),
    "tangent": (
        36,
        "At d128 and d256 it holds two accumulators and two tiles, and spills where a tile needs a mask, or has tiles "
        "of a bias in float32. What that costs was not measured yet.",
    ),
    "d_query_key_value": (
        32,
        "With six products dK and dV have second accumulators, in which a tile's sums begin at zero. The kernel takes "
        "0.64 to 0.67 of the time of two, with 4,096 tokens (one H100).",
    ),
    "d_query": (
        32,
        "At d256 it keeps, where a tile needs a mask, what the rows' last keys are: the backward at 16,384 tokens has "
        "532 TFLOP/s so, and full, without a spill, 535.",
    ),
    "d_bias": (
        128,
        "At d128 it holds three tiles of 64 x 128. With the fused backward it takes 8.5 ms for two entries of 16 "
        "heads and 8,192 tokens; two kernels that added up the gradient in device memory took 12.8.",
    ),
}
"""The most bytes that a kernel, of one case or of all, may spill, and what was measured with them (one H200, jax
0.11.2)."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compilers_wheels.run("hopper_compile.py", tmp_path_factory.mktemp("ptxas"))


def test_spills(reports: dict[str, dict]):
    over = {
        name: report["spills"]
        for name, report in reports.items()
        if report["spills"] > SPILLS.get(name, SPILLS.get(name.split(": ")[1], (0, "")))[0]
    }
    assert not over


def test_no_product_waits_for_another(reports: dict[str, dict]):
    assert not [name for name, report in reports.items() if report["serialised"]]
