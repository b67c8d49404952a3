"""MaxText: jflash in the place of the method of `AttentionOp` that calls cuDNN, with `attention: cudnn_flash_jax`.

    pip install 'maxtext[tpu]'  # or [cuda12]
    python examples/other_models/maxtext_attention.py

MaxText calls cuDNN by a function inside JAX, which a block of `replacing_jax_nn` does not reach. Its queries come
scaled. Its own method knows no segments, windows or soft cap. "context" is what its remat policies, such as
`minimal_with_context`, call the output and the log-sum-exp.
"""

import contextlib
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_TRAIN, AttentionType
from maxtext.layers.attention_op import AttentionOp
from maxtext.layers.nnx_decoders import NNXDecoder

import jflash


def flash_attention(self, query, key, value, decoder_segment_ids, model_mode=MODEL_MODE_TRAIN):
    """Return output and log-sum-exp: in the place of `AttentionOp.cudnn_jax_flash_attention`, in training."""
    if model_mode == MODEL_MODE_AUTOREGRESSIVE:
        raise NotImplementedError("Decode with attention: dot_product.")
    window = (self.sliding_window_size - 1, 0) if self.attention_type == AttentionType.LOCAL_SLIDING else None
    return jflash.attention(
        query, key, value,
        scale=1.0,
        is_causal=True,
        local_window_size=window,
        segment_ids=decoder_segment_ids,
        logits_soft_cap=self.attn_logits_soft_cap,
        return_residual=True,
        residual_checkpoint_name="context",
    )  # fmt: skip


class Config(types.SimpleNamespace):
    """The part of MaxText's configuration that attention asks for; what is not named is off."""

    def __getattr__(self, name: str) -> bool:
        """Return what an option is that is off."""
        return False


def attention(kernel: str, **options):
    """Return a tiny attention operation of four heads in training."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    config = Config(logical_axis_rules=(), attention_type="global", max_target_length=12, matmul_precision="default")
    op = AttentionOp(config, mesh, kernel, 12, 4, 2, **options)
    segments, positions = jnp.array([[1] * 7 + [2] * 5] * 2), jnp.arange(12)[None].repeat(2, 0)
    return lambda *arrays: op(*arrays, segments, positions, MODEL_MODE_TRAIN)


def kept(policy, *arrays) -> list[str]:
    """Return what a policy of MaxText's keeps of attention for the backward, beside its arguments."""
    function = jax.checkpoint(lambda *arrays: jnp.sin(attention("cudnn_flash_jax")(*arrays)), policy=policy)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(function, *arrays)
    lines = printed.getvalue().splitlines()
    return [line.split()[0] for line in lines if "from the argument" not in line and "from a constant" not in line]


def main() -> None:
    """Compare MaxText's plain attention with jflash in its place, and their gradients; ask what its policies keep."""
    AttentionOp.cudnn_jax_flash_attention = flash_attention
    normal = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, 12, heads, 8))
    arrays = normal(0, 4), normal(1, 2), normal(2, 2)
    local = dict(attention_type=AttentionType.LOCAL_SLIDING, sliding_window_size=3, attn_logits_soft_cap=20.0)
    for options in ({}, local):
        ours, own = (attention(kernel, **options) for kernel in ("cudnn_flash_jax", "dot_product"))
        loss = lambda attend, *arrays: jnp.square(attend(*arrays)).sum()
        got, want = (jax.grad(loss, argnums=(1, 2, 3))(attend, *arrays) for attend in (ours, own))
        difference = max(float(jnp.abs(a - b).max()) for a, b in zip(got, want, strict=True))
        assert difference < 1e-4, difference
        print(f"MaxText, {'local with a soft cap' if options else 'global'}: the same gradients to {difference:.0e}")

    assert kept(NNXDecoder.minimal_policy(None), *arrays) == []
    found = kept(NNXDecoder.minimal_policy(None, with_context=True), *arrays)
    assert found == ["f32[2,12,4,8]", "f32[2,4,12]"], found
    print("MaxText, minimal_with_context keeps output and log-sum-exp:", *found)


if __name__ == "__main__":
    main()
