"""What is computed of one tile of logits, once for all kernels."""
