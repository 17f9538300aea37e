"""SequenceTables: what an engine that schedules one step ahead relies on."""

import pytest

from radixkv.blocks.kv_manager import BlockCopy, PoolSizes
from radixkv.cache.namespace import Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.integrations.tables import SequenceTables


class Requests:
    """Requests as an engine has them, over tables of blocks of four tokens."""

    def __init__(self, num_blocks=20, **options):
        self.tables = SequenceTables(RadixCache(4), num_blocks, first_block=1, **options)
        self.tokens = {}

    def admit(self, name, tokens, namespace=None, num_slots=None, **limits):
        """Returns how many tokens were cached, and the new blocks."""
        self.tokens[name] = tokens = list(tokens)
        cached = self.tables.look_up(name, tokens, namespace)
        return cached, self.run(name, namespace, num_slots, **limits)

    def run(self, name, namespace=None, num_slots=None, **limits):
        tokens = self.tokens[name]
        end = num_slots or len(tokens)
        return self.tables.allocate(name, tokens, namespace, num_slots=end, num_computed=end, **limits)

    def step(self, *admissions):
        """One step that admits (name, tokens) each; returns what `admit` does, and the copies."""
        self.tables.begin_step()
        found = [self.admit(*admission) for admission in admissions]
        copies = self.tables.end_step()
        self.tables.manager.check()
        return found, copies

    def end(self, name, num_computed=None):
        self.tables.drop(name, len(self.tokens[name]) if num_computed is None else num_computed)
        self.tables.manager.check()

    @property
    def sizes(self):
        return self.tables.manager.sizes


def test_requests_of_one_step_share_and_each_copies_only_what_has_run():
    requests = Requests()
    found, copies = requests.step(("a", range(10)), ("b", [*range(8), 50, 51]), ("c", [*range(6), 52]))
    assert found == [(0, [1, 2, 3]), (8, [4]), (4, [5])] and copies == []  # two rows of a block that is not computed
    found, copies = requests.step(("d", [*range(6), 53]))
    assert found == [(6, [6])] and copies == [BlockCopy(2, 6, 2)]


def test_a_duplicate_stays_in_the_append_only_table():
    requests = Requests()
    requests.step(("a", range(3)), ("b", range(3)))
    requests.tables.begin_step()
    for name in "ab":
        requests.tokens[name] += [3, 4]
        assert len(requests.run(name)) == 1
    requests.tables.end_step()
    requests.tables.manager.check()
    assert requests.tables.table("a") == [1, 3] and requests.tables.table("b") == [2, 4]
    assert requests.sizes == PoolSizes(free=16, private=3, pinned=1, evictable=0)
    requests.tables.begin_step()
    requests.end("b", 4)
    assert requests.sizes == PoolSizes(free=18, private=1, pinned=1, evictable=0)


def test_a_request_that_is_taken_out_of_its_step_has_published_nothing_of_it():
    requests = Requests()
    requests.step(("a", range(3)))
    requests.tokens["a"] += range(3, 8)
    requests.tables.begin_step()
    requests.run("a")
    requests.end("a", 3)  # preempted: of these eight tokens three are computed
    requests.tables.end_step()
    found, _ = requests.step(("b", range(9)))
    assert found[0][0] == 3


def test_what_runs_is_published_before_a_waiting_request_looks_up():
    requests = Requests()
    requests.step(("a", range(3)))
    requests.tokens["a"] += range(3, 8)
    requests.tables.begin_step()
    requests.run("a")
    assert requests.admit("b", range(9)) == (8, [3])
    requests.tables.end_step()


def test_after_an_admission_no_request_may_lose_its_blocks_in_the_same_step():
    requests = Requests()
    requests.step(("a", range(8)))
    requests.tables.begin_step()
    requests.admit("b", range(9))
    with pytest.raises(RuntimeError, match="a: expected no request to lose its blocks"):
        requests.tables.drop("a", 8)


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({}, True),
        ({"whole": 20}, True),
        ({"whole": 21}, False),
        ({"spare": 3}, True),
        ({"spare": 4}, False),
        ({"spare": 1, "reserved": 2}, True),
        ({"spare": 1, "reserved": 3}, False),
        ({"whole": 16, "spare": 2}, False),
    ],
)
def test_limits_of_an_admission(limits, fits):
    requests = Requests(num_blocks=5)
    requests.tables.begin_step()
    _, new = requests.admit("a", range(20), num_slots=8, **limits)
    assert (new is not None) == fits
    requests.tables.manager.check()
    assert requests.sizes.private + requests.sizes.pinned == 2 * fits
    requests.tables.end_step()


def test_a_refusal_leaves_nothing_pinned_and_can_be_repeated():
    requests = Requests(num_blocks=6)
    requests.step(("a", range(12)))
    requests.end("a")
    requests.step(("b", range(50, 65)))
    requests.tables.begin_step()
    assert requests.admit("c", [*range(12), *range(90, 104)]) == (8, None)  # one block of the first was evicted
    assert requests.sizes.pinned + requests.sizes.private == 4  # of b
    requests.tables.end_step()
    requests.end("b")
    found, _ = requests.step(("d", [*range(6), 90, 91]))
    assert found[0][0] == 6


def test_a_look_up_that_is_not_admitted_is_undone_when_the_step_ends():
    requests = Requests()
    requests.step(("a", range(10)))
    requests.end("a")
    requests.tables.begin_step()
    assert requests.tables.look_up("b", list(range(10)), None) == 9
    assert requests.sizes.pinned == 3
    requests.tables.end_step()
    assert requests.sizes.pinned == 0
    requests.tables.drop("b", 0)
    assert not list(requests.tables.names())


def test_the_count_that_a_look_up_tells_is_final():
    requests = Requests(num_blocks=3)
    requests.step(("a", range(12)))
    requests.end("a")
    # One block is shared, half of another; the rest takes two, the half-shared one among them.
    found, copies = requests.step(("b", [*range(6), 99, 98, 97]))
    assert found[0][0] == 4 and copies == [] and len(found[0][1]) == 2


def test_a_look_up_may_be_cut_short():
    requests = Requests()
    requests.step(("a", range(12)))
    requests.end("a")
    requests.tables.begin_step()
    assert requests.tables.look_up("b", list(range(12)), None, most=7) == 7


def test_a_request_that_was_not_looked_up_matches_nothing_and_is_found():
    requests = Requests()
    requests.step(("a", range(8)))
    requests.end("a")
    requests.tables.begin_step()
    requests.tokens["b"] = list(range(12))
    assert len(requests.run("b")) == 3
    requests.tables.end_step()
    requests.end("b")
    assert requests.step(("c", range(13)))[0][0][0] == 12


def test_tokens_that_the_engine_takes_back_are_packed_anew():
    requests = Requests()
    requests.step(("a", range(9)))  # its look-up has packed all nine
    tokens = requests.tokens["a"]
    requests.tables.rewind("a", 8)
    tokens[8:] = range(70, 75)
    requests.tables.begin_step()
    requests.run("a")
    requests.tables.end_step()
    requests.end("a")
    assert requests.step(("b", [*range(8), *range(70, 76)]))[0][0][0] == 13
    assert requests.step(("c", [*range(9), 80]))[0][0][0] == 8


def test_what_is_kept_apart_is_not_found():
    requests = Requests()
    requests.step(("a", range(4)))
    requests.tables.keep_apart("a")
    requests.tokens["a"] += range(4, 9)
    requests.tables.begin_step()
    requests.run("a")
    requests.tables.end_step()
    requests.end("a")
    assert requests.step(("b", range(10)))[0][0][0] == 4


def test_namespaces_and_a_pool_without_a_cache():
    requests = Requests()
    requests.step(("a", range(9), Salt("x")))
    requests.end("a")
    assert requests.step(("b", range(9)))[0][0][0] == 0
    assert requests.step(("c", range(9), Salt("x")))[0][0][0] == 8
    requests = Requests(publishes=False)
    requests.step(("a", range(9)))
    requests.end("a")
    assert requests.sizes == PoolSizes(free=20, private=0, pinned=0, evictable=0)


def test_a_reset_while_requests_run():
    requests = Requests()
    requests.step(("a", range(10)))
    assert requests.tables.reset().num_stale_sequences == 1
    requests.tokens["a"] += range(10, 14)
    requests.tables.begin_step()
    requests.run("a")
    assert requests.admit("b", range(14))[0] == 0
    requests.tables.end_step()
    requests.end("a")
    requests.end("b")
    assert requests.tables.usage == 0 and requests.sizes.pinned == 0
