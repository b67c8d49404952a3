"""How fast: one module or package for each implementation of the contract in `jflash._dispatch`."""
