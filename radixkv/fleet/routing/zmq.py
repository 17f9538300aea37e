"""Event batches over ZeroMQ: a PUB socket, and a ROUTER socket that replays. Frames are those of vLLM's publisher.

PUB sends `(topic, number, payload)`, the number as 8 bytes, most significant first. A replay is asked for by
`(b"", first number)` and answered by one `(b"", topic, number, payload)` a batch, number -1 last. So this publisher
serves followers of vLLM, and this subscriber follows vLLM (`--kv-events-config` with a `replay_endpoint`).

Needs pyzmq and msgspec (`pip install radixkv[replicas]`).
"""

import contextlib
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from radixkv.cache.events import Event
from radixkv.fleet.routing.stream import EventLog, Follower
from radixkv.fleet.routing.wire import decode, encode

END = (-1).to_bytes(8, "big", signed=True)
ANY_PORT = "tcp://127.0.0.1:*"


class ZmqPublisher:
    """Publishes an event log; a thread of its own answers replays.

    Args:
        log: what to publish; its thread is the one that calls `flush`.
        endpoint, replay_endpoint: addresses to bind; a port of * is chosen by the system.
        topic: what subscribers may filter by.

    Attributes:
        endpoint, replay_endpoint: the addresses bound.
    """

    def __init__(
        self, log: EventLog, endpoint: str = ANY_PORT, replay_endpoint: str = ANY_PORT, *, topic: str = ""
    ) -> None:
        zmq = _zmq()
        self._log, self._topic = log, topic.encode()
        self._lock = threading.Lock()  # of the log's batches, between flush and replay
        self._is_snapshot_wanted = False
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(0)
        self._pub.bind(endpoint)
        self.endpoint: str = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(0)
        self._replay.bind(replay_endpoint)
        self.replay_endpoint: str = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._answer, name="radixkv-events", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Sends what has happened since the last call. Call it after every step, and now and then while idle."""
        with self._lock:
            if self._is_snapshot_wanted:
                self._is_snapshot_wanted = False
                self._log.snapshot()
            numbered = self._log.flush()
        if numbered:
            self._pub.send_multipart((self._topic, numbered[0].to_bytes(8, "big"), encode(numbered[1])))

    def close(self) -> None:
        """Ends the thread and closes the sockets."""
        self._log.close()
        self._pub.close(linger=0)
        self._context.term()  # wakes the thread, which closes the socket it waits on
        self._thread.join()

    def _answer(self) -> None:
        zmq = _zmq()
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                frames = self._replay.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8:
                    self._send_replay(frames[0], int.from_bytes(frames[2], "big"))
        self._replay.close(linger=0)

    def _send_replay(self, client: bytes, start: int) -> None:
        with self._lock:
            batches = self._log.replay(start)
            if batches and batches[0][0] > start:
                self._is_snapshot_wanted = True  # the cache is the other thread's: at its next flush
        for number, batch in batches:
            self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), encode(batch)))
        self._replay.send_multipart((client, b"", b"", END, b""))


class ZmqSubscriber:
    """Follows a publisher, vLLM's or ours: asks for what it missed, from the first batch on.

    Args:
        apply: called with each event, within `poll`.
        endpoint, replay_endpoint: the publisher's; without a replay, a gap loses all from before it.
        topic: only batches whose topic begins so.
        ask_every_s: whether anything was missed shows when the next batch comes, which may be long; so it is asked for.
        clock: seconds.
    """

    def __init__(
        self,
        apply: Callable[[Event], None],
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        ask_every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        zmq = _zmq()
        self._ask_every_s, self._clock = ask_every_s, clock
        self.follower = Follower(apply)
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(0)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._sub.connect(endpoint)
        self._replay: Any = None
        if replay_endpoint is not None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.set_hwm(0)
            self._replay.connect(replay_endpoint)
            self._ask()  # for what was published before this subscription
        self._is_asking = self._replay is not None

    def __enter__(self) -> "ZmqSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, timeout_s: float = 0.0) -> int:
        """Applies what has arrived; waits for it up to timeout_s. Returns the number of batches received."""
        zmq = _zmq()
        if self._replay is not None and self._clock() - self._asked_s >= self._ask_every_s:
            self._ask()
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        num_received = 0
        while ready := dict(poller.poll(0 if num_received else timeout_s * 1000)):
            if self._replay in ready:
                *_, number, payload = self._replay.recv_multipart()  # earlier versions leave out the topic
                if number == END:
                    self._is_asking = False
                    if self.follower.is_behind:  # the publisher no longer has it
                        self.follower.give_up()
                    continue
                self._receive(number, payload)
                num_received += 1
            if self._sub in ready:
                _, number, payload = self._sub.recv_multipart()
                self._receive(number, payload)
                num_received += 1
        return num_received

    def _receive(self, number: bytes, payload: bytes) -> None:
        missing = self.follower.receive(int.from_bytes(number, "big"), decode(payload))
        if missing is None or self._is_asking:
            return
        if self._replay is None:
            self.follower.give_up()
        else:
            self._ask()

    def _ask(self) -> None:
        self._is_asking, self._asked_s = True, self._clock()
        self._replay.send_multipart((b"", self.follower.expected.to_bytes(8, "big")))

    def close(self) -> None:
        """Closes the sockets."""
        self._sub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        raise ImportError("events over ZeroMQ need pyzmq: pip install 'radixkv[replicas]'") from error
