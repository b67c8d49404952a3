"""KerasHub on the JAX backend: GPT-2 and Gemma with jflash, which a block of `replacing_jax_nn` does not reach.

    pip install keras-hub '.[keras]'
    KERAS_BACKEND=jax python examples/other_models/keras_hub_models.py

KerasHub's GPT-2 has dropout, with which Keras computes attention by einsums, at inference too. Its Gemma does so but on
GPUs and TPUs that have a fused kernel. Its Llama, Mistral and Qwen call jax.nn, with dropout too, as theirs is of the
output.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras_hub
import numpy as np
from keras_hub.src.layers.modeling import transformer_decoder
from keras_hub.src.models.gemma.gemma_attention import CachedGemmaAttention

import jflash
import jflash.keras

TOKENS = {"token_ids": np.arange(24).reshape(2, 12), "padding_mask": np.arange(12) < np.array([[12], [9]])}
SIZES = dict(vocabulary_size=24, num_layers=2, hidden_dim=16, intermediate_dim=32)


class FlashAttention(jflash.keras.MultiHeadAttention, keras_hub.layers.CachedMultiHeadAttention):
    """KerasHub's layer with a cache and jflash's attention: for GPT-2, OPT and all that have its TransformerDecoder."""


def compute_attention(self, q, k, v, attention_mask, training=False, cache_update_index=0):
    """Return each head's output: in the place of the method of Gemma's attention."""
    if self.use_sliding_window_attention and attention_mask is not None:
        attention_mask = self._mask_sliding_window(attention_mask, cache_update_index=cache_update_index)
    features = self.head_dim if self.query_head_dim_normalize else self.hidden_dim // self.num_query_heads
    mask = None if attention_mask is None else attention_mask[:, None].astype(bool)
    return jflash.attention(q, k, v, mask=mask, scale=features**-0.5, logits_soft_cap=self.logit_soft_cap)


def main() -> None:
    """Compare tiny models before and after the change."""
    gpt2 = lambda: keras_hub.models.GPT2Backbone(num_heads=2, max_sequence_length=12, **SIZES)
    gemma = lambda: keras_hub.models.GemmaBackbone(
        num_query_heads=4, num_key_value_heads=2, head_dim=8, attention_logit_soft_cap=20.0, **SIZES
    )
    llama = keras_hub.models.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, dropout=0.1, **SIZES)
    before = gpt2(), gemma()
    with jflash.replacing_jax_nn() as replaced:
        wanted = [np.asarray(model(TOKENS)) for model in before]
        assert replaced.served == 0
        llama(TOKENS, training=True)
        assert replaced.served == 2
    print("Llama:", replaced.report().splitlines()[0])

    transformer_decoder.CachedMultiHeadAttention = FlashAttention
    CachedGemmaAttention._compute_attention = compute_attention

    for name, make, old, want in zip(("GPT-2", "Gemma"), (gpt2, gemma), before, wanted, strict=True):
        model = make()
        model.set_weights(old.get_weights())
        difference = np.abs(np.asarray(model(TOKENS)) - want)[TOKENS["padding_mask"]].max()
        assert difference < 1e-5, difference
        print(f"{name}: the same output to {difference:.0e}")


if __name__ == "__main__":
    main()
