"""Metrics, as Prometheus' own parser reads them: equal to what really happened, whatever was retried or preempted."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.shadow_engine import ShadowMachine


def scraped(engine):
    """Returns {(sample name, labels): value}, and the type of each family."""
    values, types = {}, {}
    for family in text_string_to_metric_families(engine.metrics.text()):
        types[family.name] = family.type
        for sample in family.samples:
            values[sample.name.removeprefix("radixkv:"), *sample.labels.values()] = sample.value
    return values, types


@pytest.fixture
def machine():
    """Preempted, retried, aborted, broken: all of it in one script."""
    machine = ShadowMachine()
    machine.start("radix", 3, 60, 16, 4, "fcfs", 64, False)
    for i in range(6):
        machine.add(0, 33, [i, i, 1], None, 24, 1, None, 0, 0)
        machine.step(1)
    machine.add(0, 5, [5, 5], None, 3, 3, 1, 0, 0)
    machine.fail_once("garbage")
    machine.step(2)
    machine.abort(5)
    machine.break_request(4, True)
    machine.reset(None)
    machine.step(3)
    machine.fail_once("garbage")
    machine.teardown()  # runs to the end, and checks every token
    return machine


def test_a_scrape_equals_the_engines_own_counts(machine):
    engine, values = machine.engine, scraped(machine.engine)[0]
    generations = [generation for generation, *_ in machine.asked.values()]
    started = [generation for generation in generations if generation.metrics.first_scheduled_s is not None]
    reasons = [generation.samples[0].finish_reason for generation in generations]
    assert engine.scheduler.num_preemptions > 0 and values["failed_steps_total",] >= 2
    assert {"length", "abort", "error"} <= set(reasons)
    prompts = sum(len(generation.request.prompt_token_ids) for generation in started)
    assert values["prefix_cache_queries_total",] == values["prompt_tokens_total",] == prompts
    hits = sum(generation.num_cached_tokens for generation in started)
    assert values["prefix_cache_hits_total",] == engine.scheduler.num_hit_tokens == hits > 0
    assert values["generation_tokens_total",] == sum(generation.num_tokens for generation in generations)
    assert values["num_preemptions_total",] == engine.scheduler.num_preemptions
    assert values["kv_cache_evicted_blocks_total",] == engine.scheduler.manager.num_evicted_blocks > 0
    assert values["prefix_cache_resets_total",] == 1
    for reason in ("stop", "length", "abort", "error"):
        assert values["request_success_total", reason] == reasons.count(reason)
    firsts = [generation for generation in generations if generation.metrics.first_token_s is not None]
    assert values["time_to_first_token_seconds_count",] == len(firsts)
    latencies = [generation.metrics.first_token_s - generation.metrics.arrival_s for generation in firsts]
    assert values["time_to_first_token_seconds_sum",] == pytest.approx(sum(latencies))
    assert values["time_to_first_token_seconds_bucket", "+Inf"] == len(firsts)
    under = sum(latency <= 0.005 for latency in latencies)
    assert values["time_to_first_token_seconds_bucket", "0.005"] == under
    gaps = sum(max(len(generation.metrics.token_times_s) - 1, 0) for generation in generations)
    assert values["inter_token_latency_seconds_count",] == gaps
    assert values["e2e_request_latency_seconds_count",] == len(generations)
    assert values["num_requests_running",] == values["num_requests_waiting",] == values["kv_cache_usage_perc",] == 0


def test_what_an_interrupted_step_took_from_others_is_counted():
    machine = ShadowMachine()
    machine.start("radix", 3, 60, 16, 4, "fcfs", 64, False)
    scheduler = machine.runner.scheduler
    for i in range(6):
        machine.add(0, 33, [i, i, 1], None, 24, 1, None, 0, 0)
    taken_by_interrupted = [0, 0]
    while machine.engine.has_unfinished_requests:
        machine.fail_once("interrupt")
        before = scheduler.num_preemptions, machine.manager.num_evicted_blocks
        machine.one_step()
        taken_by_interrupted[0] += scheduler.num_preemptions - before[0]
        taken_by_interrupted[1] += machine.manager.num_evicted_blocks - before[1]
        machine.one_step()
    assert min(taken_by_interrupted) > 0
    machine.teardown()  # compares the metrics with the scheduler's counts


def test_every_metric_has_its_type_and_its_alert(machine):
    text = machine.engine.metrics.text()
    types = scraped(machine.engine)[1]
    assert all(kind in ("counter", "gauge", "histogram") for kind in types.values())
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    docs = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert re.findall(r"^\| `(radixkv:\S+)`", docs, re.MULTILINE) == names


def test_buckets_hold_what_is_at_most_their_bound(machine):
    from radixkv.engine.metrics import Histogram

    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 2, 1], 5, 7.5)
