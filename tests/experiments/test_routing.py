"""experiments.routing and experiments.route_cost at small sizes: the rows, and what is made of them."""

import json

from experiments import route_cost, routing
from experiments.lab.run import run_experiment


def test_routers_on_the_chat(tmp_path, capsys):
    config = routing.Config(
        sources=("chat",), routers=("round_robin", "cache_aware"), counts=(1, 2), replay_limit=60, served_limit=20
    )
    path = run_experiment("routing", tmp_path, config, routing)
    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows].count("replayed") == 2 * 3
    assert [row["kind"] for row in rows].count("served") == 2 * 2
    assert [row["kind"] for row in rows].count("scaled") == 2 * 2
    one = next(row for row in rows if row["router"] == "one")
    for row in rows:
        if row["kind"] == "replayed" and row["router"] != "one":
            assert row["num_prompt_tokens"] == one["num_prompt_tokens"]
            assert row["hit_rate"] < one["hit_rate"] and 1 <= row["load_ratio"] <= 8
    assert path.with_suffix(".png").stat().st_size
    shown = capsys.readouterr().out
    assert "cache_aware" in shown and "survive" in shown


def test_the_cost_of_a_decision(tmp_path, capsys):
    config = route_cost.Config((3_000,), (4,), num_requests=20)
    path = run_experiment("route_cost", tmp_path, config, route_cost)
    (row,) = json.loads(path.read_text())["rows"]
    assert 0 < row["match_p50_us"] < row["route_p50_us"] < 5_000
    assert "4 replicas" in capsys.readouterr().out
