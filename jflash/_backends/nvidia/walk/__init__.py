"""The tiles that a block visits, their order, and the CTA that has each block."""
