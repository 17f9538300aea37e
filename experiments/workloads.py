"""What several experiments run on: real traces where their files are, and the workloads of the RadixAttention paper.

The paper's (section 6.1) are rebuilt as shapes: which requests share what, and how much of it. Lengths are roughly
those that the paper or the benchmark's own prompts have; tokens are random. Calls of a program that depend on each
other are one session; those that may run side by side are a session each.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from radixkv.traces import TraceRequest, open_trace, open_workload

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


def shared_traces(*files: str) -> list[Path]:
    """Returns those of these files that are in `shared/traces` beside the checkout, or under RADIXKV_SHARED."""
    folder = Path(os.environ.get("RADIXKV_SHARED", Path(__file__).parents[2] / "shared")) / "traces"
    return [folder / file for file in files if (folder / file).exists()]


def available() -> list[str]:
    """Returns the names of the traces that are here, the embedded workload last."""
    return [name for name, file in FILES.items() if shared_traces(file)] + [EMBEDDED]


def requests_of(name: str, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yields the requests of a trace; text in UTF-8 bytes as tokens.

    Raises:
        ValueError: there is no such trace, or its file is absent.
    """
    if name == EMBEDDED:
        return iter(open_workload(EMBEDDED, limit=limit))
    if name not in FILES:
        raise ValueError(f"trace: expected one of {', '.join((*FILES, EMBEDDED))}, got {name!r}")
    if not (found := shared_traces(FILES[name])):
        raise ValueError(f"trace: expected {FILES[name]} in shared/traces, got no such file")
    return iter(open_trace(found, limit=limit))


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


def pool_blocks(requests: Iterable[TraceRequest], num_unique_tokens: int, block_size: int) -> int:
    """Returns max(25 % of the unique tokens, twice the longest request) in blocks."""
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    return -(-max(num_unique_tokens // 4, 2 * longest) // block_size)


Rng = np.random.Generator


def _tokens(rng: Rng, low: int, high: int) -> bytes:
    return rng.integers(0, 32_000, int(rng.integers(low, high + 1)), dtype=np.int32).tobytes()


def mmlu(rng: Rng) -> Iterator[TraceRequest]:
    """57 subjects, five examples each, then a question that is asked once; one token out."""
    subjects = [_tokens(rng, 300, 900) for _ in range(57)]
    for number in rng.permutation(57 * 20).tolist():
        yield TraceRequest(f"{number}", subjects[number % 57] + _tokens(rng, 40, 160), _tokens(rng, 1, 1))


def hellaswag(rng: Rng) -> Iterator[TraceRequest]:
    """Two levels: twenty examples that all share, a context, and its four endings; one token out."""
    examples = _tokens(rng, 2_000, 2_000)
    contexts = [examples + _tokens(rng, 30, 120) for _ in range(300)]
    for number in rng.permutation(1_200).tolist():
        yield TraceRequest(f"{number}", contexts[number // 4] + _tokens(rng, 10, 40), _tokens(rng, 1, 1))


def react_agents(rng: Rng) -> Iterator[TraceRequest]:
    """HotpotQA with tools: few-shot trajectories that all share, then thoughts and observations that grow."""
    shots = _tokens(rng, 1_600, 1_600)
    histories = [shots + _tokens(rng, 20, 60) for _ in range(150)]
    for step in range(6):
        for agent, history in enumerate(histories):
            out = _tokens(rng, 30, 80)
            yield TraceRequest(f"a{agent}/{step}", history, out, session=f"a{agent}")
            histories[agent] = history + out + _tokens(rng, 50, 250)


def generative_agents(rng: Rng) -> Iterator[TraceRequest]:
    """Townspeople: a few prompt templates, a persona each, and what is different at every step."""
    templates = [_tokens(rng, 100, 400) for _ in range(8)]
    personas = [_tokens(rng, 150, 300) for _ in range(25)]
    for number in range(1_200):
        prompt = templates[int(rng.integers(8))] + personas[number % 25] + _tokens(rng, 50, 250)
        yield TraceRequest(f"{number}", prompt, _tokens(rng, 16, 64))


def skeleton_of_thought(rng: Rng) -> Iterator[TraceRequest]:
    """A skeleton, then its points side by side behind template, question and skeleton."""
    ask, expand = _tokens(rng, 300, 300), _tokens(rng, 250, 250)
    for number in range(150):
        question, skeleton = _tokens(rng, 20, 80), _tokens(rng, 60, 120)
        yield TraceRequest(f"q{number}", ask + question, skeleton)
        for point in range(int(rng.integers(4, 9))):
            yield TraceRequest(
                f"q{number}/{point}", expand + question + skeleton + _tokens(rng, 8, 16), _tokens(rng, 60, 140)
            )


def judge(rng: Rng) -> Iterator[TraceRequest]:
    """Branch, solve, merge: an essay judged along six dimensions side by side, and a verdict on all of them."""
    system = _tokens(rng, 150, 150)
    dimensions = [_tokens(rng, 30, 60) for _ in range(6)]
    for number in range(150):
        essay = system + _tokens(rng, 400, 1_200)
        said = [_tokens(rng, 64, 128) for _ in dimensions]
        for branch, dimension in enumerate(dimensions):
            yield TraceRequest(f"e{number}/{branch}", essay + dimension, said[branch])
        yield TraceRequest(f"e{number}/verdict", essay + b"".join(said), _tokens(rng, 32, 64))


def json_decoding(rng: Rng) -> Iterator[TraceRequest]:
    """A schema and an instruction that all share, then a document of its own."""
    schema = _tokens(rng, 400, 400)
    for number in range(600):
        yield TraceRequest(f"{number}", schema + _tokens(rng, 300, 900), _tokens(rng, 120, 200))


def multi_turn(rng: Rng, low: int, high: int) -> Iterator[TraceRequest]:
    """Four turns of 256 to 512 tokens, answers short (4 to 8) or long (256 to 512), nothing shared between chats."""
    histories = [b""] * 200
    for turn in range(4):
        for chat, history in enumerate(histories):
            prompt, out = history + _tokens(rng, 256, 512), _tokens(rng, low, high)
            yield TraceRequest(f"c{chat}/{turn}", prompt, out, session=f"c{chat}")
            histories[chat] = prompt + out


def _tree_of_thought(rng: Rng) -> Iterator[TraceRequest]:
    for number, request in enumerate(open_workload("tree_of_thought", seed=rng, num_problems=40)):
        yield TraceRequest(str(number), request.prompt, request.output)


def _document_qa(rng: Rng) -> Iterator[TraceRequest]:
    for request in open_workload("document_qa", seed=rng, num_documents=20, num_questions=15):
        yield TraceRequest(request.id, request.prompt, request.output)


PAPER_WORKLOADS: dict[str, Callable[[Rng], Iterator[TraceRequest]]] = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "react agents": react_agents,
    "generative agents": generative_agents,
    "tree of thought": _tree_of_thought,
    "skeleton of thought": skeleton_of_thought,
    "llm judge": judge,
    "json decoding": json_decoding,
    "multi-turn short": lambda rng: multi_turn(rng, 4, 8),
    "multi-turn long": lambda rng: multi_turn(rng, 256, 512),
    "document qa": _document_qa,
}
