"""Values that each thread builds for itself, in the layout in which a warpgroup holds a tile."""
