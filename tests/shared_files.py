"""Where the real traces are, if they are here: a folder `shared` beside the checkout, or RADIXKV_SHARED."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("RADIXKV_SHARED", Path(__file__).parent.parent.parent / "shared"))


def shared_file(name):
    """Returns the path of a shared file; skips the test where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the package")
    return path
