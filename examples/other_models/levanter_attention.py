"""levanter and grug, of marin: jflash in the place of the functions that attend where no other kernel was chosen.

    pip install --pre marin-levanter .
    python examples/other_models/levanter_attention.py

Both compute by einsums, or blocks of them, so a block of `replacing_jax_nn` sees no call. levanter's models call
`dot_product_attention`, which imports `flash_attention` anew at each call, with `attn_backend: jax_flash` on every
platform and by default on CPUs. Models of grug call `attention`, which calls `reference_attention` where it is given no
`implementation`, but on TPUs. The functions below are for your copy of `levanter/layers/flash_attention.py` and
`levanter/grug/attention/_core.py`; here they take the places in memory.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.grug import attention as grug
from levanter.grug.attention import _core as grug_module
from levanter.layers import flash_attention as replaced_module
from levanter.layers.attention import (
    AttentionBackend,
    AttentionMask,
    _bin_and_group_axes_by_function,
    dot_product_attention,
    materialize_mask,
)
from levanter.models.gemma import Gemma2Config, Gemma2LMHeadModel

import jflash


def grouped(named, *groups):
    """Return an array with one axis for each group of named axes, of size 1 where it has none of the group."""
    for group in groups:
        has_any = any(axis.name in named.shape for axis in group)
        for axis in group:
            if axis.name not in named.shape:
                named = named.broadcast_axis(axis if has_any else axis.resize(1))
    sizes = [int(np.prod([named.axis_size(axis.name) for axis in group])) for group in groups]
    return named.rearrange([axis.name for group in groups for axis in group]).array.reshape(sizes)


def mask_options(mask, QPos, KPos, batch, heads):
    """Return a mask as options of jflash: of all pairs only if it has an offset, pairs of its own or looks ahead."""
    if isinstance(mask, AttentionMask) and (
        mask.causal_offset is mask.explicit_mask is mask.bidirectional_window is None
    ):
        options = dict(is_causal=mask.is_causal)
        if mask.sliding_window is not None:
            options["local_window_size"] = (mask.sliding_window - 1, 0)
        if mask.segment_ids is not None:
            ids = [hax.broadcast_to(ids, (*batch, ids.resolve_axis(QPos.name))) for ids in mask.segment_ids]
            options["segment_ids"] = tuple(each.array for each in ids)
        return options
    pairs = materialize_mask(mask, QPos, KPos)
    return {} if pairs is None else dict(mask=grouped(pairs, *[[axis] for axis in batch], heads, [QPos], [KPos]))


def flash_attention(
    QPos, KPos, Key, q, k, v, mask=None, bias=None, attn_sink=None, *, dropout=0.0, inference, key=None,
    block_size=None, dtype=None, precision=None, scaling_factor=None, logits_soft_cap=None,
):  # fmt: skip
    """Return the output: in the place of levanter's function of this name. jflash chooses its own `block_size`."""
    if logits_soft_cap is not None and not (bias is attn_sink is None):
        raise NotImplementedError("levanter caps the bias and the sink too, and jflash the products alone.")
    QPos, KPos, Key = q.resolve_axis(QPos), k.resolve_axis(KPos), q.resolve_axis(Key)
    axes = _bin_and_group_axes_by_function(q, k, v, QPos, KPos, Key)[0]  # levanter's own, which it has for NVTE
    batch, heads = axes["B"], axes["H"]
    each = [[axis] for axis in batch]
    key_heads = [axis for axis in heads if axis.name in k.shape]
    out = jflash.attention(
        grouped(q, *each, [QPos], heads, [Key]).astype(dtype or q.dtype),
        grouped(k, *each, [KPos], key_heads, [Key]).astype(dtype or q.dtype),
        grouped(v, *each, [KPos], key_heads, [Key]).astype(dtype or q.dtype),
        bias=None if bias is None else grouped(bias, *each, heads, [QPos], [KPos]),
        sinks=None if attn_sink is None else grouped(attn_sink, heads),
        scale=scaling_factor,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=0.0 if inference else dropout,
        dropout_key=None if inference else key,
        precision=precision,
        **mask_options(mask, QPos, KPos, batch, heads),
    )
    axes = (*batch, QPos, *heads, v.resolve_axis(Key.name))
    return hax.named(out.reshape([axis.size for axis in axes]).astype(v.dtype), axes)


def grug_attention(q, k, v, mask, *, logits_dtype):
    """Return the output: in the place of grug's `reference_attention`. Logits are in float32 at least."""
    if not isinstance(mask, grug.AttentionMask):
        options = {} if mask is None else {"mask" if mask.dtype == bool else "bias": mask[..., None, :, :]}
        return jflash.attention(q, k, v, **options)
    options = dict(is_causal=mask.is_causal)
    if mask.sliding_window is not None:
        options["local_window_size"] = (mask.sliding_window - 1, k.shape[1])
    if mask.segment_ids is not None:
        options["segment_ids"] = tuple(jnp.broadcast_to(ids, (len(q), ids.shape[-1])) for ids in mask.segment_ids)
    return jflash.attention(q, k, v, **options)


def compare_models(Batch, Pos):
    """Compare loss and gradients of a tiny Gemma 2 before and after the change."""
    config = Gemma2Config(
        max_seq_len=Pos.size, hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        attn_backend=AttentionBackend.JAX_FLASH, attn_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma2LMHeadModel.init(Axis("vocab", 24), config, key=jax.random.key(0))
    tokens = hax.named(np.arange(24).reshape(2, 12), (Batch, Pos))
    mask = AttentionMask.causal().with_segment_ids(hax.named(np.array([[1] * 7 + [2] * 5] * 2), (Batch, Pos)))
    step = eqx.filter_value_and_grad(lambda model: hax.sum(hax.square(model(tokens, mask))).array)
    with jflash.replacing_jax_nn() as replaced:
        want = step(model)
    print(replaced.report())
    assert replaced.served == 0

    replaced_module.flash_attention = flash_attention

    assert str(jax.make_jaxpr(lambda: step(model)[0])()).count("jflash") > 0
    leaves = [jax.tree.leaves(result) for result in (step(model), want)]
    difference = max(float(jnp.abs(a - b).max()) for a, b in zip(*leaves, strict=True))
    assert difference < 1e-4, difference
    print(f"levanter's Gemma 2: the same gradients to {difference:.0e}")


def compare_masks(Batch, Pos):
    """Compare what levanter's masks, a bias and a sink mean to its own attention and to jflash."""
    KPos, (Heads, Group, Key) = Pos.alias("key_position"), (Axis("kv", 2), Axis("group", 2), Axis("key", 8))
    normal = lambda seed, *axes: hax.random.normal(jax.random.key(seed), axes)
    query, key = normal(0, Batch, Heads, Group, Pos, Key), normal(1, Batch, Heads, KPos, Key)
    calls = {
        "a window": dict(mask=AttentionMask.causal(sliding_window=4)),
        "a window both ways": dict(mask=AttentionMask.bidirectional_sliding_window(2)),
        "an offset": dict(mask=AttentionMask.causal(offset=hax.named(np.array([0, 3]), (Batch,)))),
        "a mask for each head": dict(mask=normal(2, Heads, Pos, KPos) > -1),
        "a bias": dict(bias=normal(3, Heads, Group, Pos, KPos)),
        "a sink": dict(attn_sink=normal(4, Heads, Group), mask=AttentionMask.causal()),
    }
    for name, options in calls.items():
        own, ours = (
            dot_product_attention(Pos, KPos, Key, query, key, key, attn_backend=backend, **options)
            for backend in (AttentionBackend.VANILLA, AttentionBackend.JAX_FLASH)
        )
        difference = float(jnp.abs(ours.rearrange(own.axes).array - own.array).max())
        assert difference < 1e-5, (name, difference)
        print(f"levanter with {name}: the same output to {difference:.0e}")


def compare_grug():
    """Compare grug's attention before and after the change, with each of its masks."""
    query, key = (jax.random.normal(jax.random.key(heads), (2, 12, heads, 8)) for heads in (4, 2))
    ids, pairs = jnp.array([1] * 7 + [2] * 5), jnp.tri(12, dtype=bool)[None]
    masks = [
        None, pairs, jnp.where(pairs, 0.5, -1e9), grug.AttentionMask(sliding_window=4),
        grug.AttentionMask.causal(sliding_window=4).with_segment_ids(ids),
    ]  # fmt: skip
    wanted = [grug.attention(query, key, key, mask) for mask in masks]
    grug_module.reference_attention = grug_attention
    differences = [jnp.abs(grug.attention(query, key, key, m) - w).max() for m, w in zip(masks, wanted, strict=True)]
    assert max(differences) < 1e-5, differences
    print(f"grug: the same outputs to {float(max(differences)):.0e}")


def main() -> None:
    """Compare both libraries' attention before and after the change."""
    Batch, Pos = Axis("batch", 2), Axis("position", 12)
    compare_models(Batch, Pos)
    compare_masks(Batch, Pos)
    compare_grug()


if __name__ == "__main__":
    main()
