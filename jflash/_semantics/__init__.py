"""What attention means, for every backend: the call, its tiles, their logits, and what a query may see."""
