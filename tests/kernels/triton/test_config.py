"""Tables of tile shapes: complete, readable back, and within the rules that keep results the same everywhere."""

from __future__ import annotations

import pathlib

import pytest
from radixkv_kernels.triton_impl.config import CONFIG_DIR, head_block, read_table, tables, write_table
from radixkv_kernels.triton_impl.numerics import CELL_SIZE
from radixkv_kernels.triton_impl.tuner import keys

pytestmark = pytest.mark.usefixtures("exact_interpreter")

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_table_has_every_key(arch: str) -> None:
    assert set(tables()[arch].entries) == set(keys())


@pytest.mark.parametrize("arch", ARCHS)
def test_entries_keep_the_rules(arch: str) -> None:
    for key, config in tables()[arch].entries.items():
        assert CELL_SIZE.value % config.block_n == 0
        assert config.precision == ("ieee" if key.dtype == "fp32" else "tf32")
        assert config.block_v <= key.head_block
        assert key.dtype == "fp32" or config.block_m == 16 * config.num_warps  # warps along M only


def test_a_table_reads_back_as_written(tmp_path: pathlib.Path) -> None:
    table = read_table(CONFIG_DIR / "sm_90.json")
    write_table(tmp_path / "copy.json", table)
    assert read_table(tmp_path / "copy.json") == table
    assert (tmp_path / "copy.json").read_text() == (CONFIG_DIR / "sm_90.json").read_text()


def test_head_sizes_round_up() -> None:
    assert [head_block(16, 8), head_block(33, 8), head_block(80, 96), head_block(192, 128)] == [32, 64, 128, 256]
    with pytest.raises(ValueError, match="head_dim"):
        head_block(257, 64)
