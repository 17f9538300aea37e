"""Random scripts on the whole engine over a shadow pool (`shadow_engine`): nothing lost, no KV of another request."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.shadow_engine import InterruptedMachine, ShadowMachine

NUM_SCRIPTS = int(os.environ.get("RADIXKV_SCRIPTS", "60"))


def run(num_runs, machine=ShadowMachine, **options):
    """Runs random scripts; returns what they met, all together."""
    machine.totals.clear()
    options = {"stateful_step_count": 40, "derandomize": True, **options}
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_runs, deadline=None, database=None, suppress_health_check=list(HealthCheck), **options
        ),
    )
    return dict(machine.totals)


def test_random_scripts():
    met = run(NUM_SCRIPTS)
    assert met["runs"] >= NUM_SCRIPTS
    assert all(met[what] > 0 for what in ("hits", "preemptions", "evictions", "errors", "copies", "resets")), met


@pytest.mark.slow
def test_two_thousand_random_scripts():
    met = run(2000, derandomize="CI" in os.environ)  # elsewhere new ones each time
    assert met["runs"] >= 2000
    wanted = ("hits", "preemptions", "evictions", "errors", "copies", "resets", "interrupts", "forgotten while pinned")
    assert all(met[what] > 100 for what in wanted), met


def test_random_scripts_interrupted_at_random_lines():
    met = run(NUM_SCRIPTS, InterruptedMachine)
    assert met["runs"] >= NUM_SCRIPTS and met["interrupted lines"] > NUM_SCRIPTS / 4, met


@pytest.mark.slow
def test_two_thousand_random_scripts_interrupted_at_random_lines():
    met = run(2000, InterruptedMachine, derandomize="CI" in os.environ)
    assert met["runs"] >= 2000 and met["interrupted lines"] >= 2000, met
