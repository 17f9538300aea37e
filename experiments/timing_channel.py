"""Can one tenant tell from the time to the first token what another has asked, and do salts close that?

A victim sends one of several secrets after a public prompt. The attacker sends each guess, as a tenant of its own, and
takes the one that is answered fastest. On a real engine with real times. Expected: without salts the guess is right
nearly always; with a salt a tenant from the first token on, or from where the private part starts, no more often than
chance; the second still shares the public prompt.

    python -m experiments.timing_channel               about a minute
    python -m experiments.timing_channel --smoke
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.cache.namespace import Salt
from radixkv.engine.engine import Engine
from radixkv.scheduling.request import SamplingParams

ENTRY = Entry("serving", seconds=20, place=3)

RULES = ("no salt", "a salt a tenant", "a salt after the public prompt")


@dataclass(frozen=True)
class Config:
    """Sizes in tokens; an attacker guesses among num_secrets."""

    model: str = "tiny_gpt"
    public_tokens: int = 64
    secret_tokens: int = 192
    num_secrets: int = 4
    num_rounds: int = 24
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a rule."""
    for rule in RULES:
        yield rule, partial(measure, config, rule)


def measure(config: Config, rule: str) -> list[Row]:
    """Plays the rounds; a row each."""
    engine = Engine.from_pretrained(config.model, num_blocks=1024)
    rng = np.random.default_rng(config.seed)
    vocab_size = engine.runner.config.vocab_size
    public = rng.integers(0, vocab_size, config.public_tokens).tolist()
    _ask(engine, public, None)  # the first calls of everything
    rows = []
    for number in range(config.num_rounds):
        engine.reset_cache()
        secrets = rng.integers(0, vocab_size, (config.num_secrets, config.secret_tokens)).tolist()
        secret = int(rng.integers(config.num_secrets))
        _ask(engine, public + secrets[secret], _salt(rule, "victim", config))
        # The attacker's own public prompt first, so that it is no part of what the guesses are told apart by.
        _ask(engine, public, _salt(rule, "attacker", config))
        ttfts, cached = [], []
        for guess in secrets:
            ttft_s, num_cached = _ask(engine, public + guess, _salt(rule, "attacker", config))
            ttfts.append(1e3 * ttft_s)
            cached.append(num_cached)
        chosen = int(np.argmin(ttfts))
        rows.append(
            {"rule": rule, "round": number, "secret": secret, "chosen": chosen, "is_right": chosen == secret}
            | {"ttfts_ms": ttfts, "num_cached_tokens": cached}
        )
    return rows


def _salt(rule: str, tenant: str, config: Config) -> Salt | None:
    starts = {"a salt a tenant": 0, "a salt after the public prompt": config.public_tokens}
    return Salt(tenant, start=starts[rule]) if rule in starts else None


def _ask(engine: Engine, prompt: list[int], salt: Salt | None) -> tuple[float, int]:
    """Returns the time to the first token in s, and the prompt's tokens found in the cache."""
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), namespace=salt)
    generation = engine.generation(request_id)
    while engine.has_unfinished_requests:
        engine.step()
    output = generation.output()
    times = output.metrics
    assert times.first_token_s is not None
    return times.first_token_s - times.arrival_s, output.num_cached_tokens


def show(data: Data) -> None:
    """Prints a line a rule."""
    columns = {"rule": "{rule}", "right": "{right} of {rounds}", "chance": "{chance:.0%}"}
    columns |= {"its own secret, ms": "{hit:.1f}", "the others, ms": "{miss:.1f}"}
    print_table("The attacker's guesses; median times to the first token", columns, _summaries(data))


def _summaries(data: Data) -> list[Row]:
    found = []
    for rule, mine in grouped(data["rows"], "rule").items():
        hit, miss = _hits_and_misses(mine)
        right = sum(row["is_right"] for row in mine)
        row = {"rule": rule, "right": right, "rounds": len(mine), "chance": 1 / data["config"]["num_secrets"]}
        found.append(row | {"hit": median(hit), "miss": median(miss)})
    return found


def _hits_and_misses(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Times of the guesses that are the secret, and of the others, in ms."""
    hit = [row["ttfts_ms"][row["secret"]] for row in rows]
    return hit, [t for row in rows for i, t in enumerate(row["ttfts_ms"]) if i != row["secret"]]


def plot(data: Data) -> Figure:
    """Draws the times of the secret and of the other guesses."""
    rules = grouped(data["rows"], "rule")
    figure, axes = pyplot().subplots(1, len(rules), figsize=(11, 4), sharey=True)
    for axis, (rule, mine) in zip(axes, rules.items(), strict=True):
        hit, miss = _hits_and_misses(mine)
        for values, label in ((miss, "other guesses"), (hit, "the victim's secret")):
            axis.hist(values, bins=20, alpha=0.7, label=label, density=True)
        axis.set(title=rule, xlabel="TTFT, ms")
    axes[0].legend()
    return figure


def answer(data: Data) -> str:
    """One sentence."""
    told = [f"{row['right']} of {row['rounds']} with {row['rule']}" for row in _summaries(data)]
    chance = 1 / data["config"]["num_secrets"]
    return f"By the clock another tenant's secret is guessed right in {', '.join(told)} ({chance:.0%} by chance)."


main = command(__name__, Config(), Config(num_rounds=4))


if __name__ == "__main__":
    main()
