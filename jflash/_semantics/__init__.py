"""The meaning of attention, shared by every backend: the call, its tiles, their logits, and what a query may see."""
