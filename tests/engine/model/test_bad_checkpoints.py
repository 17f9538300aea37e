"""Checkpoints that are missing, cut, stuffed or hostile: a ValueError that says what is wrong, and nothing else."""

import json
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch

from radixkv.engine.model.checkpoint import load_checkpoint
from tests.engine.model.test_gguf import written
from tests.engine.model.tiny_checkpoints import checkpoint


@pytest.fixture
def folder(tmp_path):
    source, _ = checkpoint("llama")
    shutil.copytree(source, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gguf_file(tmp_path):
    return written(tmp_path / "model.gguf", "llama")[1]


def refused(path):
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path)
    assert str(caught.value)
    return str(caught.value)


def header(folder, change):
    """Rewrites the JSON header of model.safetensors; `change` gets it and may return bytes to put in its place."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    values = json.loads(data[8 : 8 + size])
    changed = change(values)
    text = changed if isinstance(changed, bytes) else json.dumps(values).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def first(values):
    return next(value for name, value in values.items() if name != "__metadata__")


HEADERS = {
    "offsets past the end": lambda v: first(v).update(data_offsets=[0, 10**12]),
    "offsets that overlap": lambda v: first(v).update(data_offsets=[8, 16]),
    "offsets backwards": lambda v: first(v).update(data_offsets=[100, 0]),
    "negative offsets": lambda v: first(v).update(data_offsets=[-4, 0]),
    "a huge shape": lambda v: first(v).update(shape=[2**62, 4]),
    "a shape that overflows": lambda v: first(v).update(shape=[2**63, 2**63]),
    "a negative shape": lambda v: first(v).update(shape=[-1]),
    "another dtype": lambda v: first(v).update(dtype="U7"),
    "no dtype": lambda v: first(v).pop("dtype"),
    "no json": lambda v: b"{" * 100_000,
    "a list": lambda v: b"[]",
    "empty": lambda v: b"",
    "not utf-8": lambda v: b"\xff\xfe" * 20,
}


@pytest.mark.parametrize("how", HEADERS)
def test_hostile_safetensors_headers(folder, how):
    header(folder, HEADERS[how])
    assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize("size", [0, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_claims_another_size(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_safetensors_file(folder, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "model.safetensors" in refused(folder)


class Attack:
    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


def test_pickles_are_never_loaded(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    assert "pickled" in refused(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Attack()))  # under a trusted name
    refused(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")
    refused(folder)
    assert not (folder / "pwned").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(folder, name):
    (folder / name).unlink()
    refused(folder)


BAD_JSON = [b"", b"{", b"null", b"[]", b"3", b'"a"', b"\xff\xfe\x00", b"{" * 50_000, b'{"a": NaN}']


@pytest.mark.parametrize("data", BAD_JSON, ids=range(len(BAD_JSON)))
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_none(folder, name, data):
    (folder / name).write_bytes(data)
    assert name in refused(folder) or name == "config.json"


WRONG = [None, -1, 0, 1.5, "x", [], {}, True, 2**62, 1e400]


@pytest.mark.parametrize("value", WRONG, ids=map(repr, WRONG))
def test_configs_with_a_wrong_value_in_each_place(folder, value):
    """Each field in turn; a value that is right there must load, all others are refused by name."""
    path = folder / "config.json"
    right = json.loads(path.read_text())
    for name in right:
        path.write_text(json.dumps({**right, name: value}))
        try:
            load_checkpoint(folder)
        except ValueError as error:
            assert str(error)


INDEXES = [
    {},
    {"weight_map": None},
    {"weight_map": []},
    {"weight_map": {}},
    {"weight_map": {"a": None}},
    {"weight_map": {"a": 3}},
    {"weight_map": {"a": "../../etc/passwd"}},
    {"weight_map": {"a": "/etc/passwd"}},
    {"weight_map": {"a": "model.safetensors"}},
]


@pytest.mark.parametrize("index", INDEXES, ids=range(len(INDEXES)))
def test_indexes(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder)


def test_gguf_files_cut_and_changed_anywhere(gguf_file):
    """Whatever the bytes, a model or a ValueError: no crash, no hang, no other error."""
    data = gguf_file.read_bytes()
    rng = random.Random(0)
    path = gguf_file.with_name("changed.gguf")
    num_refused = 0
    for turn in range(120):
        changed = bytearray(data)
        if turn % 3 == 0:
            del changed[rng.randrange(len(data)) :]
        else:
            reach = 4000 if turn % 3 == 1 else len(data)
            for _ in range(rng.choice([1, 4, 30])):
                changed[rng.randrange(min(reach, len(data)))] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        path.write_bytes(changed)
        try:
            load_checkpoint(path)
        except ValueError as error:
            num_refused += 1
            assert str(error)
    assert num_refused > 40


@pytest.mark.parametrize("at", [8, 16])  # the counts of tensors and of fields
@pytest.mark.parametrize("count", [2**31, 2**60, 2**64 - 1])
def test_gguf_counts_that_are_not_there(gguf_file, at, count):
    data = bytearray(gguf_file.read_bytes())
    data[at : at + 8] = struct.pack("<Q", count)
    gguf_file.write_bytes(data)
    refused(gguf_file)


def test_no_gguf(tmp_path):
    for name, data in (("a.gguf", b""), ("b.gguf", b"GGUF"), ("c.gguf", b"MZ" + bytes(100))):
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name)
