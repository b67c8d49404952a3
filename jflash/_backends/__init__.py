"""The implementations of the contract in `jflash._dispatch`: one module or package for each."""
