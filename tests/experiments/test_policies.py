"""The policies' experiments: replayed blocks hit what replayed tokens hit, and the shapes are those of the paper."""

import itertools
import json

import numpy as np
import pytest

from experiments import cache_aware_scheduling, eviction
from experiments.lab.harness import recorded_tables
from experiments.workloads import EMBEDDED, PAPER_WORKLOADS, requests_of
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.tokens import num_common_tokens

CONFIG = eviction.Config(trace=(EMBEDDED,), limit=250)


@pytest.fixture(scope="module")
def embedded():
    return eviction.load(EMBEDDED, CONFIG)


@pytest.mark.parametrize(("name", "cache", "policy"), [("lru", "radix", "lru"), ("flat_hash", "flat_hash", "lru")])
def test_blocks_hit_what_tokens_hit(embedded, name, cache, policy):
    paths, sessions = embedded
    num_blocks = paths.pool_blocks(0.3)
    found = Replay(
        CacheConfig(cache, 64, partial_blocks=False, num_blocks=num_blocks, policy=policy), cache_outputs=True
    )
    for request in requests_of(EMBEDDED, 250):
        found.feed(request.prompt, request.output)
    hits = eviction.replay(name, paths, sessions, num_blocks, 256)
    assert hits == found.num_cached_tokens > 0
    assert hits <= paths.eviction_bound(num_blocks)


def test_the_queue_helps_and_stays_below_the_bound(embedded):
    paths, sessions = embedded
    num_blocks = paths.pool_blocks(0.3)
    for prefix, base in (("", "lru"), ("flat_hash ", "flat_hash")):
        lru = eviction.replay(base, paths, sessions, num_blocks, 64)
        aware = eviction.replay(f"{prefix}queue_aware", paths, sessions, num_blocks, 64)
        assert lru < aware <= paths.eviction_bound(num_blocks)


def verdict_row():
    rates = {"lru": 0.5, "lfu": 0.7, "fifo": 0.5, "cost": 0.5, "probation": 0.52}
    return {"trace": "a", "gap": 0.3, **rates, **{f"{name} closes": 0.0 for name in rates}, "queue_aware closes": 0.3}


@pytest.mark.parametrize("change", ["a policy more", "a policy less"])
def test_rows_of_other_policies_than_todays_are_shown(change):
    row = verdict_row() | {"num_blocks": 10, "bound": 0.8, "queue_aware": 0.7, "flat_hash": 0.5}
    row |= {"flat_hash queue_aware": 0.6, "other": 0.9, "other closes": 0.1}
    if change == "a policy less":
        row = {
            name: value for name, value in row.items() if name not in ("other", "other closes", "fifo", "fifo closes")
        }
    data = {"rows": [row], "config": {"num_waiting": 256}}
    with recorded_tables() as tables:
        eviction.show(data)
    assert ("other" in tables[0].headings) == (change == "a policy more")
    assert ("fifo" in tables[0].headings) == (change == "a policy more")
    eviction.plot(data)
    assert ("the past, other" if change == "a policy more" else "the past, lfu") in eviction.answer(data)


@pytest.mark.slow
def test_rows_of_other_orders_than_todays_are_shown(tmp_path, monkeypatch):
    cache_aware_scheduling.main(["--smoke", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "cache_aware_scheduling.json").read_text())
    gone = dict(cache_aware_scheduling.ORDERS)
    best = max(data["rows"], key=lambda row: row["share"])["order"]
    del gone[best]
    monkeypatch.setattr(cache_aware_scheduling, "ORDERS", {**gone, "new": ("new", 0, False)})
    cache_aware_scheduling.show(data)
    cache_aware_scheduling.plot(data)
    assert best in cache_aware_scheduling.answer(data)


def test_the_verdict_leaves_out_what_loses_somewhere():
    row = verdict_row()
    worse = row | {"trace": "b", "lfu": 0.49, "queue_aware closes": 0.1}
    narrow = row | {"trace": "c", "gap": 0.01, "probation": 0.1}
    found = eviction.verdict([row, worse, narrow])
    assert found["best_history"] == "probation" and found["num_wide"] == 2
    assert found["queue_aware closes"] == {"a": 0.3, "b": 0.1} and found["num_traces_closed"] == 1


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_paper_workloads_share_what_they_say(name):
    requests = list(PAPER_WORKLOADS[name](np.random.default_rng(0)))
    again = list(PAPER_WORKLOADS[name](np.random.default_rng(0)))
    assert requests == again and len(requests) >= 300
    assert all(request.output for request in requests)
    best, num_unique = cache_aware_scheduling.optimum(requests, requests[0].session is not None)
    assert 0.3 < best < 1 and num_unique > 1000


def test_hellaswag_has_two_levels():
    requests = sorted(PAPER_WORKLOADS["hellaswag"](np.random.default_rng(0)), key=lambda request: request.prompt)
    common = [num_common_tokens(a.prompt, b.prompt) for a, b in itertools.pairwise(requests)]
    assert sum(count >= 2_030 for count in common) >= 890 and min(common) >= 2_000


def test_an_order_reaches_no_more_than_the_optimum():
    requests, has_turns = cache_aware_scheduling.load("skeleton of thought", cache_aware_scheduling.Config())
    requests = requests[:120]
    best, _ = cache_aware_scheduling.optimum(requests, has_turns)
    config = cache_aware_scheduling.Config()
    rows = [cache_aware_scheduling.serve(requests, has_turns, name, 400, config) for name in ("random", "depth")]
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"] <= best + 1e-9
    assert all(row["ttft_p99_ms"] > row["ttft_p50_ms"] > 0 for row in rows)
