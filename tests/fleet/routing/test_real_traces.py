"""Replicas on real traces, against figures computed by an independent program. Needs the traces; skips without them."""

import pytest

from experiments.routing import SOURCES, replay
from tests.shared_files import shared_file


def play(trace, router, count, num_blocks=None):
    source = SOURCES[trace]
    shared_file(f"traces/{source.file}")
    return replay(source, source.requests(), router, count, num_blocks)


def check_balanced(trace, one):
    """97 % of one big replica's hits, at a load ratio of 1.25 at most, on eight replicas without bound."""
    row = play(trace, "cache_aware", 8)
    assert row["hit_rate"] >= 0.97 * one, row
    assert row["load_ratio"] <= 1.25, row


def test_few_shot_prompts_are_kept_apart():
    check_balanced("bbh", play("bbh", "round_robin", 1)["hit_rate"])


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["tau_bench", "mini_swe"])
def test_long_system_prompts_and_agents(trace):
    check_balanced(trace, play(trace, "round_robin", 1)["hit_rate"])


@pytest.mark.slow
def test_mooncake_on_eight():
    check_balanced("mooncake", 0.374)


@pytest.mark.slow
def test_mooncake_on_four_with_little_room():
    row = play("mooncake", "cache_aware", 4, 10_000)
    assert row["hit_rate"] >= 0.345
    assert row["load_ratio"] <= 1.25


@pytest.mark.slow
def test_mooncake_as_others_route_it():
    assert play("mooncake", "round_robin", 4)["hit_rate"] == pytest.approx(0.196, abs=0.005)
    longest = play("mooncake", "longest_match", 4)
    assert longest["hit_rate"] == pytest.approx(0.374, abs=0.005)
    assert longest["load_ratio"] == pytest.approx(4.0, abs=0.01)  # its first block is in every request
