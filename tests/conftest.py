"""Runs before any test imports triton: kernels on the CPU run in triton's interpreter.

Test modules of Triton kernels call `triton_interpreter.install()`, which makes the interpreter exact and checked. This
directory is put on the path for such helper modules; it is no package.
"""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, os.path.dirname(__file__))
