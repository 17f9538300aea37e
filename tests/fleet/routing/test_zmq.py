"""Events over real sockets: latecomers, what was lost, and what the publisher no longer has."""

import time

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import msgspec
import zmq

from radixkv.cache.events import AllBlocksCleared, BlockStored
from radixkv.cache.radix.cache import RadixCache
from radixkv.fleet.routing.stream import EventLog
from radixkv.fleet.routing.zmq import ZmqPublisher, ZmqSubscriber


class Held:
    """The hashes held, from events."""

    def __init__(self):
        self.hashes = set()

    def __call__(self, event):
        if isinstance(event, AllBlocksCleared):
            self.hashes = set()
        elif isinstance(event, BlockStored):
            assert not self.hashes & set(event.block_hashes)
            self.hashes |= set(event.block_hashes)
        else:
            self.hashes -= set(event.block_hashes)


@pytest.fixture
def cache():
    return RadixCache(1)


def store(cache, *token_ids):
    lease = cache.acquire(token_ids)
    start = lease.num_tokens
    cache.insert(lease, token_ids[start:], [1000 * token + i for i, token in enumerate(token_ids)][start:])
    cache.commit()
    cache.release(lease)


def poll_until(subscriber, condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        subscriber.poll(0.05)


def test_a_latecomer_and_what_goes_on(cache):
    publisher = ZmqPublisher(EventLog(cache))
    store(cache, 1, 2, 3)
    publisher.flush()
    held = Held()
    with ZmqSubscriber(held, publisher.endpoint, publisher.replay_endpoint) as subscriber:
        poll_until(subscriber, lambda: len(held.hashes) == 3)
        store(cache, 1, 2, 4)
        publisher.flush()
        poll_until(subscriber, lambda: len(held.hashes) == 4)
        cache.evict(2)
        publisher.flush()
        poll_until(subscriber, lambda: len(held.hashes) == 2)
    publisher.close()


def test_a_batch_that_nothing_comes_after_is_asked_for(cache):
    publisher = ZmqPublisher(EventLog(cache))
    held = Held()
    with ZmqSubscriber(held, publisher.endpoint, publisher.replay_endpoint, ask_every_s=0.05) as subscriber:
        subscriber._sub.close()  # nothing comes of itself
        subscriber._sub = subscriber._context.socket(subscriber._sub.type)
        store(cache, 1, 2, 3)
        publisher.flush()
        poll_until(subscriber, lambda: len(held.hashes) == 3)
    publisher.close()


def test_what_is_no_longer_kept_comes_as_a_snapshot(cache):
    publisher = ZmqPublisher(EventLog(cache, num_kept=1))
    for token in range(5):
        store(cache, token, token + 1)
        publisher.flush()
    held = Held()
    with ZmqSubscriber(held, publisher.endpoint, publisher.replay_endpoint) as subscriber:
        poll_until(subscriber, lambda: len(held.hashes) == 2)  # the last batch alone is there
        publisher.flush()
        poll_until(subscriber, lambda: len(held.hashes) == 10)
    publisher.close()


def test_without_a_replay_a_gap_loses_what_was_before(cache):
    publisher = ZmqPublisher(EventLog(cache))
    store(cache, 1, 2)
    publisher.flush()  # before anyone listens
    held = Held()
    with ZmqSubscriber(held, publisher.endpoint) as subscriber:
        tokens = iter(range(10, 10**6))
        deadline = time.monotonic() + 5
        while not held.hashes:  # until the subscription has reached the publisher
            assert time.monotonic() < deadline, "nothing came"
            store(cache, next(tokens))
            publisher.flush()
            subscriber.poll(0.02)
        assert subscriber.follower.num_gaps
    publisher.close()


def frames_of(number, tokens):
    """A batch as vLLM frames it: (topic, number, payload)."""
    hashes = [token + 1000 for token in tokens]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return b"kv@pod", number.to_bytes(8, "big"), msgspec.msgpack.encode([float(number), [event], 0])


def test_following_a_publisher_that_is_not_ours():
    """Frames and replay as in vLLM's ZmqEventPublisher: what was missed is asked for from a ROUTER."""
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind("tcp://127.0.0.1:*")
    router.bind("tcp://127.0.0.1:*")
    sent = [frames_of(number, [number]) for number in range(3)]
    held = Held()
    addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (pub, router)]
    with ZmqSubscriber(held, *addresses, topic="kv@") as subscriber:
        client, empty, start = router.recv_multipart()
        assert (empty, int.from_bytes(start, "big")) == (b"", 0)
        for frames in sent:
            router.send_multipart((client, b"", *frames))
        router.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
        poll_until(subscriber, lambda: held.hashes == {1000, 1001, 1002})
    for socket in (pub, router):
        socket.close(linger=0)
    context.term()


def test_a_follower_that_is_not_ours(cache):
    """A DEALER that asks our publisher for a replay, frame by frame."""
    publisher = ZmqPublisher(EventLog(cache), topic="kv@me")
    store(cache, 1, 2)
    publisher.flush()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    empty, topic, number, payload = dealer.recv_multipart()
    assert (empty, topic, int.from_bytes(number, "big")) == (b"", b"kv@me", 0)
    _, (cleared, stored), rank = msgspec.msgpack.decode(payload)
    assert (cleared, rank) == ({"type": "AllBlocksCleared"}, None)
    assert (stored["type"], stored["token_ids"], stored["medium"]) == ("BlockStored", [1, 2], "GPU")
    assert dealer.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
    dealer.close(linger=0)
    context.term()
    publisher.close()
