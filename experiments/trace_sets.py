"""The requests that the policies' experiments run on: real traces where they are, and the embedded workload always."""

import os
from collections.abc import Iterator
from pathlib import Path

from radixkv.traces import TraceRequest, open_trace, open_workload

TRACES = Path(os.environ.get("RADIXKV_SHARED", Path(__file__).parent.parent.parent / "shared")) / "traces"
EMBEDDED = "embedded"
FILES = {
    "mooncake": "mooncake_conversation.jsonl",
    "tau_bench_airline": "tau_bench_airline.conversations.jsonl",
    "mtbench101": "mtbench101.conversations.jsonl",
    "mini_swe_agent": "mini_swe_agent.conversations.jsonl",
    "bbh_3shot": "bbh_3shot.requests.jsonl",
    "loogle_shortdep": "loogle_shortdep.requests.jsonl",
    "tot_game24": "tot_game24.requests.jsonl",
}


def available() -> list[str]:
    """Returns the names of the traces that are here, the embedded workload last."""
    return [name for name, file in FILES.items() if (TRACES / file).exists()] + [EMBEDDED]


def requests_of(name: str, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yields the requests of a trace; text in UTF-8 bytes as tokens.

    Raises:
        ValueError: there is no such trace, or its file is absent.
    """
    if name == EMBEDDED:
        return iter(open_workload(EMBEDDED, limit=limit))
    if name not in FILES:
        raise ValueError(f"trace: expected one of {', '.join((*FILES, EMBEDDED))}, got {name!r}")
    return iter(open_trace(TRACES / FILES[name], limit=limit))


# As many requests, or whole conversations, with bytes as tokens, as are served in seconds and not in minutes.
LIMITS = {"mooncake": 200, "tot_game24": 1_500}
NUM_SESSIONS = {"tau_bench_airline": 100, "mtbench101": 400, "mini_swe_agent": 10}


def sample_of(name: str) -> list[TraceRequest]:
    """Returns the first requests of a trace, of conversations the first with all their turns."""
    requests = list(requests_of(name, LIMITS.get(name)))
    if name not in NUM_SESSIONS:
        return requests
    chosen = set(list(dict.fromkeys(request.session for request in requests))[: NUM_SESSIONS[name]])
    return [request for request in requests if request.session in chosen]


def is_conversation(name: str) -> bool:
    """Whether a request of a session can only come when the one before it has ended."""
    return name == EMBEDDED or ".conversations." in FILES.get(name, "")
