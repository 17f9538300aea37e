"""The incremental planner: after any operations, the plan from scratch; the same object while no border is crossed."""

from __future__ import annotations

import pickle
import random
from functools import partial

import numpy as np
import pytest
from radixkv_kernels import PlanConfig, TreePlan, TreePlanner
from radixkv_kernels.plan import cells, cuts, order
from radixkv_kernels.plan import planner as planner_module
from radixkv_kernels.plan import tables as tables_module

from tests import interruptions

OPTIONS = ("block_size", "num_q_heads", "num_kv_heads", "cell_size", "causal", "window", "tile_rows", "lead_runs")


def from_scratch(config: PlanConfig, tables, seq_lens, cu) -> TreePlan:
    width = max([1, *map(len, tables)])
    table = np.full((len(tables), width), -1, dtype=np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    options = {name: getattr(config, name) for name in OPTIONS}
    return TreePlan.from_block_table(table, seq_lens, cu, **options)


def assert_same(got: TreePlan, want: TreePlan) -> None:
    for name in ("items", "row_token", "row_seq", "row_base", "row_slots", "slot_cells", "groups", "shared"):
        assert np.array_equal(getattr(got.work, name), getattr(want.work, name)), name
    assert np.array_equal(got.cu_seqlens_q, want.cu_seqlens_q)


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_plan_from_scratch_after_any_operations(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 16, 48, 64, 300])
    config = PlanConfig(
        block_size,
        8,
        2,
        cell_size=rng.choice([128, 256]),
        window=rng.choice([None, None, 1, 100, 700]),
        tile_rows=rng.choice([16, 1024]),
        lead_runs=rng.choice([1, 4]),
    )
    planner, live, fresh = TreePlanner(config), {}, iter(range(10**9))
    lens: dict[int, int] = {}
    for step in range(60):
        operation = rng.random()
        if operation < 0.4 or not live:
            parent = rng.choice([[], *live.values()])
            blocks = parent[: rng.randint(0, len(parent))] + [
                next(fresh) for _ in range(rng.choice([0, 1, rng.randint(1, 1 + 2000 // block_size)]))
            ]
            live[step] = blocks
            lens[step] = max(0, len(blocks) * block_size - rng.randint(0, block_size - 1))
            planner.add(step, blocks if rng.random() < 0.5 else np.array(blocks, dtype=np.int64))
        elif operation < 0.55:
            name = rng.choice(list(live))
            del live[name], lens[name]
            planner.remove(name)
        elif operation < 0.6 and any(live.values()):
            name = rng.choice([n for n, blocks in live.items() if blocks])
            index, other = rng.randrange(len(live[name])), rng.choice(list(live.values()))
            block = other[index] if index < len(other) else next(fresh)
            live[name][index] = block
            live[name] = list(live[name])
            planner.replace(name, index, block)
        else:
            for name in rng.sample(list(live), rng.randint(1, len(live))):
                lens[name] += 1
                if lens[name] > len(live[name]) * block_size:
                    live[name] = [*live[name], next(fresh)]
                    planner.append(name, live[name][-1])
        names = rng.sample(list(live), rng.randint(0, len(live))) if rng.random() < 0.3 else list(live)
        seq_lens = np.array([lens[n] for n in names], dtype=np.int64)
        several = rng.random() < 0.2
        q_lens = [min(n, rng.randint(0, 5) if several else 1) for n in seq_lens.tolist()]
        cu = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int64)
        got = planner.plan(names, seq_lens, cu)
        want = from_scratch(config, [live[n] for n in names], seq_lens, cu)
        assert_same(got, want)
        assert got.extents.holds(seq_lens)
    assert len(planner) == len(live) and all(n in planner for n in live)
    for name in list(live):
        planner.remove(name)
    assert not planner.may_share
    numbers = planner._tables._cells
    assert not numbers._number_of and len(numbers._unused) == len(numbers._uses), "no cell outlives its sequences"


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_plan_from_scratch_where_many_decode(seed):
    """Steps in which a few or all of 80 sequences cross a border, some come back as they were, some go."""
    rng = random.Random(seed)
    config = PlanConfig(16, 8, 2, cell_size=rng.choice([128, 256]))
    planner, fresh = TreePlanner(config), iter(range(10**9))
    prompts = [[next(fresh) for _ in range(rng.randint(0, 250))] for _ in range(4)]
    live: dict[int, list[int]] = {}
    used: dict[int, int] = {}

    def add(name: int) -> None:
        prompt = rng.choice(prompts)
        live[name] = prompt[: rng.choice([len(prompt), rng.randint(0, len(prompt))])] + [next(fresh) for _ in range(60)]
        used[name] = 16 * (len(live[name]) - 60) + 1
        planner.add(name, live[name])

    for name in range(80):
        add(name)
    for step in range(80, 120):
        number = rng.choice([0, 1, 3, 16, 17, len(live)])
        for name in rng.sample(list(live), min(number, len(live))):
            if used[name] + config.cell_size <= 16 * len(live[name]):
                used[name] += config.cell_size
        if rng.random() < 0.3:
            add(step)
        if rng.random() < 0.3:
            name = rng.choice(list(live))
            planner.remove(name)
            del live[name]
            if rng.random() < 0.5:  # preempted, and back
                live[name] = [*rng.choice(prompts), *(next(fresh) for _ in range(60))]
                used[name] = 16 * len(live[name]) - 900
                planner.add(name, live[name])
        names = list(live)
        seq_lens, cu = np.array([used[name] for name in names]), np.arange(len(names) + 1)
        got = planner.plan(names, seq_lens, cu)
        assert_same(got, from_scratch(config, [live[name] for name in names], seq_lens, cu))


def test_cuts_are_decided_anew_only_where_sharing_changes(monkeypatch):
    decided = []
    decide = cuts._decide
    monkeypatch.setattr(cuts, "_decide", lambda *arguments: decided.append(1) or decide(*arguments))
    planner, cu = TreePlanner(PlanConfig(16, 8, 2)), np.arange(4)
    for name, blocks in (("a", range(200)), ("b", [*range(20), *range(300, 480)]), ("c", range(500, 700))):
        planner.add(name, blocks)
    assert planner.plan("abc", np.array([2100, 2100, 900]), cu).shares
    assert len(decided) == 1
    planner.plan("abc", np.array([2500, 2100, 1200]), cu)
    assert len(decided) == 2, "c reads another cell of the run in which a and b part"
    planner.plan("abc", np.array([2900, 2400, 1200]), cu)
    assert len(decided) == 2


def test_a_sequence_that_is_not_there_changes_nothing():
    planner, cu = TreePlanner(PlanConfig(16, 8, 2)), np.arange(2)
    planner.add("a", range(20))
    planner.plan(["a"], np.array([300]), cu)
    for _ in range(2):
        with pytest.raises(KeyError):
            planner.plan(["b"], np.array([300]), cu)


def test_the_same_object_until_a_cell_border_is_crossed():
    planner = TreePlanner(PlanConfig(16, 8, 2))
    planner.add("a", range(20))
    planner.add("b", [*range(18), 30, 31])
    cu = np.arange(3)
    first = planner.plan(["a", "b"], np.array([300, 310]), cu)
    assert first.shares
    assert planner.plan(["a", "b"], np.array([301, 311]), cu) is first
    planner.append("a", 40)
    assert planner.plan(["a", "b"], np.array([330, 320]), cu) is first
    assert planner.plan(["b", "a"], np.array([320, 330]), cu) is not first


def test_stats_of_an_incremental_plan():
    planner = TreePlanner(PlanConfig(16, 8, 2))
    planner.add("a", range(20))
    planner.add("b", [*range(18), 30, 31])
    stats = planner.plan(["a", "b"], np.array([300, 310]), np.arange(3)).stats
    assert stats.num_logical_kv_tokens == 610 and stats.num_unique_kv_tokens == 288 + 12 + 22
    assert stats.num_kv_tokens_read == 256 + 44 + 54


def test_mistakes():
    planner = TreePlanner(PlanConfig(16, 8, 2))
    planner.add("a", [1, 2])
    with pytest.raises(ValueError, match="sequence: expected one that is not there"):
        planner.add("a", [3])
    with pytest.raises(KeyError):
        planner.append("b", 3)
    with pytest.raises(KeyError):
        planner.remove("b")
    with pytest.raises(IndexError, match="index: expected"):
        planner.replace("a", 2, 5)
    with pytest.raises(ValueError, match="seq_lens: expected a length a sequence"):
        planner.plan(["a"], np.array([33]), np.array([0, 1]))
    with pytest.raises(ValueError, match="blocks: expected"):
        planner.add("c", np.zeros((2, 2)))


def refusing(planner: TreePlanner, **wrong) -> None:
    given = {"sequences": ["c", "d"], "seq_lens": np.array([300, 310]), "cu_seqlens_q": np.arange(3)} | wrong
    with pytest.raises((ValueError, KeyError)):
        planner.plan(**given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_lens": np.array([300, 321])},
        {"seq_lens": np.array([300])},
        {"cu_seqlens_q": np.array([0, 2, 1])},
        {"cu_seqlens_q": np.array([1, 2, 3])},
        {"sequences": ["c", "nobody"]},
        {"sequences": ["c", "c"]},
        {"sequences": None},
        {"sequences": [["c"], ["d"]]},
    ],
)
def test_a_refused_batch_leaves_no_trace(wrong):
    """Asked again with right lengths, it gets a plan of its own and not the one of the batch before."""
    planner, lens, cu = TreePlanner(PlanConfig(16, 4, 2)), np.array([300, 310]), np.arange(3)
    tables = {"a": [*range(20)], "b": [*range(18), 20, 21], "c": [*range(30, 50)], "d": [*range(60, 80)]}
    for name, table in tables.items():
        planner.add(name, table)
    first = planner.plan(["a", "b"], lens, cu)
    assert first.shares
    refusing(planner, **wrong)
    assert planner.plan(["a", "b"], lens, cu) is first
    refusing(planner, **wrong)
    assert not planner.plan(["c", "d"], lens, cu).shares
    assert_same(planner.plan(("a", "b"), lens, cu), first)
    names = np.array(["a", "b"])
    assert planner.plan(names, lens, cu) is planner.plan(names, lens, cu)


@pytest.mark.parametrize(
    ("window", "lens", "tables", "block_size"),
    [
        (100, [1000], [range(63)], 16),  # begins in the last cell, which is not full
        (1, [200, 1], [range(13), [50]], 16),  # no cell is full
        (100, [1000, 990, 300], [range(63), [*range(61), 70, 71], range(19)], 16),
        (300, [513, 513], [range(513), range(513)], 1),
    ],
)
def test_a_window_that_begins_in_the_last_cell(window, lens, tables, block_size):
    config = PlanConfig(block_size, 8, 2, window=window)
    planner, lens, cu = TreePlanner(config), np.array(lens), np.arange(len(lens) + 1)
    for name, table in enumerate(tables):
        planner.add(name, table)
    assert_same(planner.plan(range(len(lens)), lens, cu), from_scratch(config, [list(t) for t in tables], lens, cu))


def test_stats_are_those_of_the_plans_own_tables_or_none():
    planner, lens, cu = TreePlanner(PlanConfig(16, 4, 2)), np.array([300, 310]), np.arange(3)
    planner.add("a", range(20))
    planner.add("b", [*range(18), 20, 21])
    early, late, edited = (planner.plan(names, lens, cu) for names in (["a", "b"], ["b", "a"], ["a", "b"]))
    wanted = early.stats.num_unique_kv_tokens
    planner.remove("a")
    assert late.stats.num_unique_kv_tokens == wanted  # the blocks are still written down
    planner.add("c", range(100, 120))
    with pytest.raises(RuntimeError, match="stats"):
        _ = edited.stats
    assert early.stats.num_unique_kv_tokens == wanted


def test_planners_pickle():
    """With what they know; a plan takes its own tables along, and none once they are not written down any more."""
    planner, lens, cu = TreePlanner(PlanConfig(16, 4, 2)), np.array([300, 310]), np.arange(3)
    planner.add("a", range(20))
    planner.add("b", [*range(18), 20, 21])
    made = planner.plan(["a", "b"], lens, cu)
    other = pickle.loads(pickle.dumps(planner))
    kept = other.plan(["a", "b"], lens + 1, cu)
    assert_same(kept, made)
    assert kept is other.plan(["a", "b"], lens, cu) and kept.stats == made.stats
    other.append("a", 50)
    other.remove("b")
    other.add("b", range(20))
    assert_same(
        other.plan(["a", "b"], lens, cu), from_scratch(other.config, [[*range(20), 50], [*range(20)]], lens, cu)
    )
    del other
    late = planner.plan(["b", "a"], lens[::-1], cu)
    planner.remove("a")
    planner.add("c", range(100, 120))
    with pytest.raises(RuntimeError, match="stats"):
        _ = pickle.loads(pickle.dumps(late)).stats
    assert b"TreePlanner" not in pickle.dumps(late) + pickle.dumps(kept)


def grow_and_plan(planner: TreePlanner, live: dict[str, list[int]]) -> None:
    """Some of everything; `live` is what the planner is up to after each call."""
    lens, cu = np.array([300, 310]), np.arange(3)
    for name, blocks in (("a", range(20)), ("b", [*range(18), 20, 21]), ("c", range(40))):
        planner.add(name, blocks)
        live[name] = [*blocks]
    planner.plan(["a", "b"], lens, cu)
    planner.plan(["a", "b"], lens + 5, cu)
    planner.append("a", 90)
    live["a"].append(90)
    planner.replace("b", 3, 91)
    live["b"][3] = 91
    planner.plan(["b", "c"], lens + 9, np.array([0, 70, 71]))
    planner.remove("c")
    del live["c"]
    planner.plan(["b", "a"], lens + 10, cu)


def test_an_interrupted_planner_plans_right_or_not_at_all():
    """At any line of its own: later calls are refused, or what it knows is all or nothing of each call."""
    files = (planner_module, tables_module, cells, order, cuts)
    lens, cu, line, refused, reached = np.array([300, 310]), np.arange(3), 1, 0, True
    while reached:
        planner, live = TreePlanner(PlanConfig(16, 8, 2)), {}
        reached = interruptions.interrupted_at(line, files, partial(grow_and_plan, planner, live))
        line += 1
        for names in (["a", "b"], ["b", "a"], ["b", "c"]):
            tables = [live[n] for n in names if n in live]
            try:
                got = planner.plan(names, lens, cu)
            except RuntimeError as error:
                assert "make a new one" in str(error)
                refused += 1
                with pytest.raises(RuntimeError):
                    planner.add("d", [1])
            except KeyError:
                assert len(tables) < 2 or "c" in names
            else:
                if len(tables) == 2:  # of a call that had not begun, or had ended
                    possible = [tables, [[*t[:3], 91, *t[4:]] if t is live["b"] else t for t in tables]]
                    wanted = [from_scratch(planner.config, t, lens, cu) for t in possible]
                    assert any(np.array_equal(got.work.items, want.work.items) for want in wanted)
    assert refused > 50 and line > 200


def test_ids_that_are_none_are_refused_by_name():
    planner = TreePlanner(PlanConfig(16, 4, 2))
    planner.add("a", range(20))
    for blocks in (None, 3, "x", [1.5], [2**40], np.array([2**32 + 5]), [[1]], [None]):
        with pytest.raises(ValueError, match=r"^blocks: expected"):
            planner.add("b", blocks)
    for block in (None, 1.5, 2**40, "x"):
        with pytest.raises(ValueError, match=r"^block: expected"):
            planner.append("a", block)
        with pytest.raises(ValueError, match=r"^block: expected"):
            planner.replace("a", 0, block)
    with pytest.raises(ValueError, match=r"^index: expected"):
        planner.replace("a", 0.5, 3)
    with pytest.raises(ValueError, match=r"^config: expected"):
        TreePlanner(None)
    planner.add("b", [])
    assert planner.plan(["a"], np.array([320]), np.arange(2)).num_items == 1
