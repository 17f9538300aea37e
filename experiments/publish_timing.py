"""When should a block be published: as soon as the step that fills it is scheduled, or when its request finishes?

The book chapter's mistake, measured: requests that arrive together all prefill before any finishes. Expected: published
on finish, concurrent arrivals with one system prompt hit nothing; published at once, all but the first hit all of it.

    python -m experiments.publish_timing
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from experiments.dry_run import dry_run
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.kv_manager import KVManager, SequenceBlocks
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import TokenIds, pack
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler

ENTRY = Entry("serving", seconds=1, place=4)


@dataclass(frozen=True)
class Config:
    """Traffic of an assistant; `num_per_step` arrivals before each step, None: all at once."""

    num_requests: int = 32
    system_tokens: int = 512
    question_tokens: int = 32
    max_tokens: int = 32
    num_per_step: tuple[int | None, ...] = (None, 1)
    seed: int = 7


class PublishOnFinish(KVManager):
    """The same manager, but what a sequence has computed enters the cache when it ends."""

    def __init__(self, cache: RadixCache, num_blocks: int) -> None:
        super().__init__(cache, num_blocks)
        self._held: dict[int, tuple[bytes, int, bool]] = {}

    def publish(self, sequence: SequenceBlocks, token_ids: TokenIds, *, start: int = 0, keep_own: bool = False) -> int:
        self._held[id(sequence)] = (pack(token_ids), start, keep_own)
        return 0

    def end(self, sequence: SequenceBlocks, token_ids: TokenIds = b"", *, start: int = 0) -> None:
        held = self._held.pop(id(sequence), None)
        if held is not None:
            super().publish(sequence, held[0], start=held[1], keep_own=held[2])
            self.commit()
        super().end(sequence)


MANAGERS = {"on finish": PublishOnFinish, "at once": KVManager}


def cells(config: Config) -> Iterator[Cell]:
    """A cell a pattern of arrivals and a manager."""
    for num_per_step in config.num_per_step:
        for name in MANAGERS:
            yield f"{num_per_step} {name}", partial(measure, config, num_per_step, name)


def measure(config: Config, num_per_step: int | None, name: str) -> list[Row]:
    """Serves the requests with one manager."""
    rng = np.random.default_rng(config.seed)
    system = tuple(rng.integers(0, 32_000, config.system_tokens).tolist())
    requests = []
    for i in range(config.num_requests):
        question = tuple(rng.integers(0, 32_000, config.question_tokens).tolist())
        requests.append(Request(str(i), system + question, SamplingParams(max_tokens=config.max_tokens)))
    found = dry_run(Scheduler(MANAGERS[name](RadixCache(16), 4096)), requests, num_per_step=num_per_step)
    arrivals = "all together" if num_per_step is None else f"{num_per_step} a step"
    return [{"arrivals": arrivals, "published": name, **asdict(found), "hit_rate": found.hit_rate}]


COLUMNS = {
    "arrivals": "{arrivals}",
    "published": "{published}",
    "hit rate": "{hit_rate:.1%}",
    "tokens computed": "{num_computed_tokens:,}",
    "steps": "{num_steps:,}",
}


def show(data: Data) -> None:
    """Prints a line an arrival pattern and manager."""
    sizes = data["config"]
    title = f"{sizes['num_requests']} requests, one system prompt of {sizes['system_tokens']} tokens"
    print_table(title, COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the hit rate of each."""
    return bars(data["rows"], "arrivals", "published", "hit_rate", "hit rate", "When blocks are published")


def answer(data: Data) -> str:
    """One sentence."""
    rates = {row["published"]: row["hit_rate"] for row in data["rows"] if row["arrivals"] == "all together"}
    return (
        f"At once: of requests that arrive together {rates['at once']:.0%} of the prompt tokens are found, of the same "
        f"published on finish {rates['on finish']:.0%}."
    )


main = command(__name__, Config())


if __name__ == "__main__":
    main()
