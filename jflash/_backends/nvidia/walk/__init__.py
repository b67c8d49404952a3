"""Which tiles a block visits, in which order, and which CTA has which block."""
