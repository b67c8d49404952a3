"""Which CTA does what, and in which order."""
