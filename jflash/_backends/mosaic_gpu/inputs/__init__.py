"""What a kernel takes besides queries, keys and values: how it is prepared, and how a tile reads it."""
