"""The sorted keys of a node's children, against a plain sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache.radix.child_order import ChildOrder

KEYS = st.binary(min_size=1, max_size=3)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "look"]), KEYS), max_size=300), st.sets(KEYS))
def test_it_is_a_sorted_set(operations, keys):
    held = set(keys)
    order = ChildOrder(held)
    for operation, key in operations:
        if operation == "add" and key not in held:
            order.add(key)
            held.add(key)
        elif operation == "remove" and held:
            key = min(held, key=lambda other: (other < key, other))
            order.remove(key)
            held.remove(key)
        else:
            start = order.place(key)
            assert walk(order.up, start) == sorted(other for other in held if other >= key)
            assert walk(order.down, order.place(key)) == sorted((other for other in held if other < key), reverse=True)
        assert list(order) == sorted(held)


def walk(step, at):
    found = []
    key, at = step(at)
    while key:
        found.append(key)
        key, at = step(at)
    return found


def test_what_was_removed_does_not_stay_for_ever():
    order = ChildOrder(i.to_bytes(4, "big") for i in range(100_000))
    for i in range(100_000):
        order.remove(i.to_bytes(4, "big"))
    assert len(order._keys) <= 64


def test_a_key_may_come_back():
    order = ChildOrder([b"a", b"b"])
    order.remove(b"a")
    order.add(b"a")
    assert list(order) == [b"a", b"b"]
    order.remove(b"a")
    assert order.up(0) == (b"b", 1)
    order.add(b"a")
    assert list(order) == [b"a", b"b"]
