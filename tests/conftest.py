"""Runs before any test imports triton: kernels on the CPU run in triton's interpreter, made exact and checked."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
