"""Tensors of a Hugging Face folder: one safetensors file, or several with an index. A TensorSource for `weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from radixkv.engine.model.reading import json_object, reading

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HfFiles:
    """The folder's files stay mapped as long as this lives; tensors are read one at a time.

    Raises:
        ValueError: no safetensors files (pickled .bin and .pt files are refused: loading them runs their code), a file
            that the index names is not there, or a tensor that it names is not in it.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Any] = {}
        if (folder / _INDEX).is_file():
            self._open_indexed(folder)
        elif (folder / _SINGLE).is_file():
            file = _opened(folder / _SINGLE)
            self._file_of = dict.fromkeys(file.keys(), file)
        else:
            pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            found = f"only {', '.join(pickled)}, which are pickled and not loaded" if pickled else "neither"
            raise ValueError(f"{folder}: expected {_SINGLE} or {_INDEX}, found {found}")

    def _open_indexed(self, folder: Path) -> None:
        names = json_object(folder / _INDEX).get("weight_map")
        files_named = list(names.values()) if isinstance(names, dict) else []
        if (
            not isinstance(names, dict)
            or not names
            or not all(isinstance(file, str) and Path(file).name == file for file in files_named)
        ):
            raise ValueError(f"{folder / _INDEX}: expected a weight_map of tensors to files of this folder")
        absent = sorted({file for file in files_named if not (folder / file).is_file()})
        if absent:
            raise ValueError(f"{folder / _INDEX}: expected the files it names, missing: {', '.join(absent)}")
        files = {file: _opened(folder / file) for file in sorted(set(files_named))}
        for name, file in names.items():
            if name not in files[file].keys():  # noqa: SIM118, a safetensors file is no mapping
                raise ValueError(f"{folder / _INDEX}: expected {name} in {file}, which does not have it")
            self._file_of[name] = files[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """O(tensors); reads headers only."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str) -> Tensor:
        """O(size of the tensor)."""
        return self._file_of[name].get_tensor(name)


def _opened(path: Path) -> Any:
    with reading(path):
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118, a safetensors file is no mapping
            file.get_slice(name).get_shape()
        return file
