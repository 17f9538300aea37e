"""What every synthetic workload has in common: a frozen config of sizes that generates requests from a numpy Generator.

The workloads themselves are in `flat_shapes` (prefixes shared as they are) and `growing_shapes` (prefixes that grow by
their own outputs); `radixkv.traces.workload` names them. Random tokens share a first token by chance once in
`vocab_size` pairs, as unrelated text does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from radixkv.traces.request import TraceRequest

# Sizes that may be 0; all other integers are at least 1.
_MAY_BE_ZERO = ("output_tokens", "shared_tokens", "instruction_tokens", "num_fixed_examples", "num_chosen_examples")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Sizes of a workload.

    Attributes:
        rate_per_s: mean rate of Poisson arrivals; None leaves requests without timestamps.
        vocab_size: tokens are drawn from 0..vocab_size.
    """

    rate_per_s: float | None = None
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        """Raises ValueError naming the first size that is out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int"):
                minimum = 0 if field.name in _MAY_BE_ZERO else 1
                if type(value) is not int or value < minimum:
                    raise ValueError(f"{field.name}: expected an integer >= {minimum}, got {value!r}")
                if field.name.startswith("min_") and value > getattr(self, "max_" + field.name[4:]):
                    raise ValueError(f"{field.name}: expected at most max_{field.name[4:]}, got {value}")
        if self.vocab_size > 2**31:
            raise ValueError(f"vocab_size: expected at most 2**31, got {self.vocab_size}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise ValueError(f"rate_per_s: expected a positive rate or None, got {self.rate_per_s!r}")

    def requests(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        """Yields the workload's requests in order of arrival; a rate changes timestamps only, never tokens."""
        content_rng, arrival_rng = rng.spawn(2)
        if self.rate_per_s is None:
            yield from self.generate(content_rng)
            return
        now = 0.0
        for request in self.generate(content_rng):
            now += float(arrival_rng.exponential(1 / self.rate_per_s))
            yield replace(request, timestamp_s=now)

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        """Yields requests without timestamps."""
        raise NotImplementedError

    def tokens(self, rng: np.random.Generator, count: int) -> bytes:
        """Draws [count] int32 packed tokens."""
        return rng.integers(0, self.vocab_size, count, dtype=np.int32).tobytes()

    def between(self, rng: np.random.Generator, minimum: int, maximum: int) -> bytes:
        """Draws minimum .. maximum (included) packed tokens; how many is drawn, too."""
        return self.tokens(rng, int(rng.integers(minimum, maximum + 1)))
