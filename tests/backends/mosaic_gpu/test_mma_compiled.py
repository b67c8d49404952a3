"""The kernels by `mma.sync` compiled for each GPU that they serve, without one: registers spilled, by a written list.

Needs the compiler's wheels: `pip install .[hopper-compiler]`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
