"""Which numbers of rows go into one product so that a row's bits are its own: measured on this machine, not assumed.

Matrix libraries choose a kernel, and with it the order of adding, by the number of rows, the depth and the threads: MKL
on AVX-512 takes another one below 16 rows if 24 * rows <= depth, on AVX2 for the last rows mod 6, on AMD below 4 rows;
oneDNN with AMX at 33, 37, 256 and 1,024 rows. Two orders differ in nearly every number of a result whose exact value is
zero, as what is left there *is* the order of adding, where ordinary data seldom show it. So an operation computes equal
rows of such data in several sizes. Sizes whose rows all have the same bits may be used side by side. The best part of a
few sizes is chosen when the rule is made; every other size is measured before it is used for the first time.

Nothing that varies from run to run enters a choice, and no choice changes the bits that a rule has settled on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

_log = logging.getLogger("radixkv_kernels")

Way = Callable[[int], Tensor]
"""A size -> results [.., size, numbers] of so many equal rows of data whose exact results are zero."""
MakeWays = Callable[[], Sequence[Way]]
"""The ways in which an operation can compute its rows, the preferred one first. Makes the data."""

STEP = 4
"""The smallest size: single rows are vector products, and padding to four costs little."""
MOST_ROWS = 2048
"""The largest size."""
_SIZES = (4, 6, 8, 12, 16, 24, 30, 32, 48, 64, 256, 1024)
"""What a rule is chosen by: the tails of row blocks of 4, 6, 8, 16 and 32, and where libraries change their kernels."""
_USUAL_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
REMEDY = "pass deterministic=False, or start Python with MKL_CBWR=AUTO,STRICT in the environment"


@dataclass(eq=False)
class RowRule:
    """The sizes of one operation whose rows have the same bits, at every place in them. Grows; see `rule_of`.

    A rule that is made by hand, without `make`, holds for every multiple of STEP.
    """

    name: str
    call_rows: int = 8
    """What a call costs, in rows."""
    make: MakeWays | None = None
    want: Tensor | None = None
    """[numbers]: the bits of a row; None where nothing agreed."""
    ways: dict[int, int] = field(default_factory=dict)
    """Which way computes a size; a size that is not usable has way -1."""
    seconds: float = 0.0
    """Spent on measuring."""
    _covers: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def holds(self) -> bool:
        """Whether a row's bits are its own. If not, any rows go into one product."""
        return self.make is None or self.want is not None

    @property
    def unrestricted(self) -> bool:
        """Whether every size tried so far agrees, in the operation's first way."""
        return self.holds and not any(self.ways.values())

    @property
    def cost(self) -> float:
        """Of usual numbers of rows, over what they would cost without padding and cuts."""
        return _cost(self.sizes, self.call_rows) if self.ways else 1.0

    @property
    def sizes(self) -> list[int]:
        """The sizes that are known to agree, ascending."""
        return sorted(size for size, way in self.ways.items() if way >= 0)

    def pieces(self, num_rows: int) -> tuple[int, ...]:
        """Sizes to compute so many rows in, equal ones together; their sum is num_rows or more. O(1) from the second
        time on; the first time a size is wanted it is measured, which costs about one product of it."""
        found = self._covers.get(num_rows)
        return self._cover(num_rows) if found is None else found

    def padded(self, num_rows: int) -> int:
        """The sum of `pieces`; `pieces` of that is exact."""
        return sum(self.pieces(num_rows))

    def way(self, size: int) -> int:
        """Which of the operation's ways computes this size, one of `pieces`."""
        return self.ways.get(size, 0)

    def require(self) -> None:
        """Raises ValueError where the rule does not hold, with the remedy."""
        if not self.holds:
            raise ValueError(
                f"deterministic: expected numbers of rows at which a row of {self.name} has bits of its own, "
                f"and this machine's libraries have none; {REMEDY}"
            )

    def __str__(self) -> str:
        if not self.holds:
            return f"{self.name}: a row's bits depend on the rows beside it, whatever their number"
        refused = sorted(size for size, way in self.ways.items() if way < 0)
        other = [size for size in self.sizes if self.ways[size] > 0]
        if not refused:
            text = f"{self.name}: every number of rows tried agrees, {min(self.ways)} to {max(self.ways)}"
        else:
            text = f"{self.name}: rows agree in pieces of {_listed(self.sizes)}, not of {_listed(refused)}"
        return text + (f" (rows as columns at {_listed(other)})" if other else "")

    def _cover(self, num_rows: int) -> tuple[int, ...]:
        many = max(num_rows - 1, 0) // MOST_ROWS
        rest = num_rows - many * MOST_ROWS
        if not self.holds or self.make is None:
            found = (MOST_ROWS,) * many + (-(-max(rest, 1) // STEP) * STEP,)
        else:
            with self._lock:
                whole = [size for size in wanted(rest) if self._usable(size)][:1]
                if many and not self._usable(MOST_ROWS):
                    many, rest, whole = 0, num_rows, []
                found = (MOST_ROWS,) * many + (tuple(whole) or cover(rest, self.sizes, self.call_rows))
        # the sum too, so that padded rows are cut as they were padded
        self._covers[num_rows] = self._covers[sum(found)] = found
        return found

    def _usable(self, size: int) -> bool:
        """Whether the size agrees with the others; measured where it is not known."""
        if size not in self.ways:
            assert self.make is not None and self.want is not None
            began = time.perf_counter()
            with _measuring():
                for number, way in enumerate(self.make()):
                    bits = row_bits(way(size))
                    if bits is not None and torch.equal(bits, self.want):
                        self.ways[size] = number
                        break
                else:
                    self.ways[size] = -1
            self.seconds += time.perf_counter() - began
            _log.debug("%s: %d rows %s", self.name, size, "agree" if self.ways[size] >= 0 else "differ")
        return self.ways[size] >= 0


def rule_of(name: str, key: Hashable, make: MakeWays, *, call_rows: int, most: int = MOST_ROWS) -> RowRule:
    """The rule of rows of an operation, for as many threads as the caller has and the settings of this moment.

    Args:
        name: of the operation, its dtype and its shapes; for messages.
        key: the same for the program.
        make: see `MakeWays`. Is called again whenever a size is wanted that has not been measured.
        call_rows: as how many rows one call costs, of `RowRule.pieces`.
        most: larger sizes are not measured when the rule is made.

    Measured once a process: as long as some 1,500 rows of the operation (fewer by `most`), for each way that is tried.
    Sets the number of threads to what it is.
    """
    key = key, *settings()
    found = _rules.get(key)
    if found is None:
        with _lock:
            found = _rules.get(key)
            if found is None:
                threads = torch.get_num_threads()
                # MKL chooses otherwise once a number of threads has been set, and that can't be asked: so it always has
                torch.set_num_threads(threads)
                full = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
                found = _rules[key] = measure(full, make, call_rows, most)
    return found


def measure(name: str, make: MakeWays, call_rows: int, most: int = MOST_ROWS) -> RowRule:
    """See `rule_of`; keeps nothing."""
    began = time.perf_counter()
    sizes = [size for size in _SIZES if size <= most]
    classes: list[tuple[Tensor, dict[int, int]]] = []
    with _measuring():
        for number, way in enumerate(make()):
            for size in sizes:
                bits = row_bits(way(size))
                if bits is None:
                    continue
                of = next((ways for want, ways in classes if torch.equal(want, bits)), None)
                if of is None:
                    classes.append((bits, of := {}))
                of.setdefault(size, number)
            if len(classes) == 1 and len(classes[0][1]) == len(sizes):
                break
    rule = RowRule(name, call_rows, make)
    if classes:
        rule.want, agreeing = min(classes, key=lambda found: _cost(sorted(found[1]), call_rows))
        rule.ways = {size: agreeing.get(size, -1) for size in sizes}
    rule.seconds = time.perf_counter() - began
    if rule.holds:
        _log.debug("%s; measured in %.0f ms", rule, rule.seconds * 1e3)
    else:
        _log.warning("%s; so the bits of results depend on the batch here", rule)
    return rule


def row_bits(found: Tensor) -> Tensor | None:
    """The one row that all rows of [.., rows, numbers] are equal to; None where there are several."""
    rows = found.flatten(0, -2)
    return rows[0].clone() if torch.equal(rows, rows[:1].expand_as(rows)) else None


def cancelling(*shape: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x [1, depth], y [rows, depth]) for a shape of (rows, depth), whose products x . y are zero but for rounding.

    x is [a, -a] and y [b, b], shuffled alike. Rows of y repeat after 128, so that large ones are made quickly.
    """
    rows, depth = shape
    gen = torch.Generator().manual_seed(seed)
    place = torch.randperm(depth // 2 * 2, generator=gen, device="cpu")
    a, b = (normal(gen, n, depth // 2, dtype=dtype) for n in (1, min(rows, 128)))
    odd = (0, depth % 2)
    x = torch.nn.functional.pad(torch.cat((a, -a), 1)[:, place], odd)
    y = torch.nn.functional.pad(torch.cat((b, b), 1)[:, place], odd)
    return x, y.repeat(-(-rows // 128), 1)[:rows]


def normal(gen: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers on the CPU, whatever the default dtype."""
    return torch.randn(shape, generator=gen, dtype=torch.float32, device="cpu").to(dtype)


def settings() -> tuple[Hashable, ...]:
    """What of this process changes the kernels that libraries choose, and may change while it runs."""
    mkldnn = torch.backends.mkldnn
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), mkldnn.enabled, mkldnn.deterministic


def measured() -> list[RowRule]:
    """All rules of this process so far."""
    return list(_rules.values())


def cover(num_rows: int, sizes: Sequence[int], call_rows: int) -> tuple[int, ...]:
    """The cheapest of the ascending `sizes` whose sum is num_rows or more, where a call costs as call_rows rows.

    The smaller sum where two cost the same; larger pieces first. O(largest size * len(sizes)).
    """
    unit, most = math.gcd(*sizes), sizes[-1]
    many = max(num_rows // most - 1, 0)
    rest = -(-max(num_rows - many * most, 1) // unit)
    best = [(0, 0, 0)]  # of n units or more: cost, sum, the last size
    for n in range(1, rest + 1):
        tails = ((size, best[max(n - size // unit, 0)]) for size in sizes)
        best.append(min((tail[0] + size + call_rows, tail[1] + size, size) for size, tail in tails))
    found = []
    while rest > 0:
        found.append(best[rest][2])
        rest -= found[-1] // unit
    return (most,) * many + tuple(sorted(found, reverse=True))


def wanted(num_rows: int) -> Iterator[int]:
    """Sizes worth a try for so many rows, with little padding: multiples of a power of two, and of three times that."""
    step = STEP if num_rows <= 64 else 16 if num_rows <= 1024 else 64
    for multiple in (step, 3 * step):
        size = -(-max(num_rows, 1) // multiple) * multiple
        if size <= MOST_ROWS:
            yield size


def _cost(sizes: list[int], call_rows: int) -> float:
    """Of usual numbers of rows, over what they would cost at least."""
    covers = ((rows, cover(rows, sizes, call_rows)) for rows in _USUAL_ROWS)
    return sum((sum(found) + call_rows * len(found)) / (rows + call_rows) for rows, found in covers) / len(_USUAL_ROWS)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


@contextmanager
def _measuring() -> Iterator[None]:
    """Products in the dtypes that they have, without gradients."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        yield


_rules: dict[Hashable, RowRule] = {}
_lock = threading.RLock()
