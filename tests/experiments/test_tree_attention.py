"""experiments.tree_attention: its smoke size, and the plans' bytes on every kind of tree."""

import json
import random

import numpy as np
import pytest

from experiments import plan_time, tree_attention, tree_bytes, tree_serving


def test_times(tmp_path, capsys):
    tree_attention.main(["--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "tree_attention.json").read_text())["rows"]
    assert {row["side"] for row in rows} >= {"tree", "paged", "naive"}
    assert all(row["of_matmul"] > 0 and row["of_flash"] > 0 for row in rows)
    assert (tmp_path / "tree_attention.png").stat().st_size > 1000
    assert "as fast as the best plain torch" in " ".join(capsys.readouterr().out.split())


def test_bytes(tmp_path, capsys):
    trace = tmp_path / "mine.jsonl"
    prompts = [[*range(700), i, *range(40)] for i in range(12)]
    trace.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    tree_bytes.main(["--smoke", "--out", str(tmp_path), "--trace", str(trace)])
    rows = json.loads((tmp_path / "tree_bytes.json").read_text())["rows"]
    found = {row["kind"]: row for row in rows}
    assert found["trace"]["num_seqs"] == 12 and found["trace"]["shares"]
    # five cells of 128 are read once, the sixth (where they part) and what follows by each
    own = 741 - 640 + np.arange(1, 65)
    read = found["trace"]["read_bytes"] / (4 * 8 * 128)
    assert 640 + 12 * own.min() <= read / found["trace"]["num_batches"] <= 640 + 12 * own.max()
    assert all(row["unique_bytes"] <= row["floor_bytes"] <= row["read_bytes"] for row in rows)
    assert found["trace"]["floor_bytes"] == found["trace"]["read_bytes"]
    assert (tmp_path / "tree_bytes.png").stat().st_size > 1000
    assert "times the unique KV" in " ".join(capsys.readouterr().out.split())


def test_bytes_read_over_unique():
    config = tree_bytes.Config()
    rows = [row for name in tree_bytes.SHAPES for row in tree_bytes.shape_rows(config, name)]
    assert sum(row["read_of_unique"] for row in rows) / len(rows) <= 1.10
    assert sum(row["all_of_unique"] for row in rows) / len(rows) <= 1.25
    assert all(row["partial_of_saved"] < 1 for row in rows if row["shares"])
    # a branch inside a cell is read by each child: beams part in their last cells, which is the worst there is
    assert all(row["read_of_unique"] <= 1.30 for row in rows if row["tree"] != "beam search, wide")


@pytest.mark.parametrize("name", tree_bytes.SHAPES)
def test_tables_have_as_many_blocks_as_tokens_need(name):
    table, lens = tree_bytes.make_tables(name, 16, random.Random(0))
    assert ((table >= 0).sum(1) == -(-lens // 16)).all()
    assert len(lens) == len(table) > 1


def test_an_engine_decodes_the_same_tokens(tmp_path):
    tree_serving.main(["--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "tree_serving.json").read_text())["rows"]
    planned = {(row["prefix"], row["mode"]): row["planned_steps"] for row in rows}
    assert planned[512, "on"] > 0 and planned[512, "off"] == planned[0, "on"] == 0


def test_planning_is_timed(tmp_path, capsys):
    plan_time.main(["--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "plan_time.json").read_text())["rows"]
    assert {row["step"] for row in rows} >= {"from scratch", "no border", "crossing, 1", "admission", "removal", "copy"}
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)
    assert (tmp_path / "plan_time.png").stat().st_size > 1000
    assert "Planning 32 sequences" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["unshared", "prompts", "agents", "parting"])
def test_timed_steps_are_what_they_are_called(kind):
    config = plan_time.Config(num_seqs=24, crossing=(1, 24))
    steps = plan_time.Steps(config, plan_time.make_batch(config, kind, 4096, 16), 16)
    before = steps.plan()
    assert before.shares == (kind != "unshared") and steps.plan() is before
    for name, step in steps.all().items():
        step()
        after = steps.plan()
        assert after.work.items.tolist() == before.work.items.tolist(), name
