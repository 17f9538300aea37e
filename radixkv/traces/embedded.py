"""The embedded workload: five kinds of traffic made of Python's own documentation, arriving over ten minutes.

Questions on documents, conversations under one system prompt, few-shot prompts with chosen examples, a search over
short thoughts, and agents with tools. Real text, because how far prompts agree, and where within a block they part, is
what tells caches apart. The default of `experiments.compare`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from radixkv.traces.chat import ChatEncoder
from radixkv.traces.messages import ASSISTANT, Message
from radixkv.traces.python_docs import Entry, PythonDocs, load_python_docs, paragraphs
from radixkv.traces.readers.requests import Request
from radixkv.traces.request import TraceRequest
from radixkv.traces.tokenizers import load_tokenizer

_RULES = (
    "You are an assistant for people who program in Python.",
    "Answer from the documentation of the installed version, and say so where it is silent.",
    "Prefer a short example to a long explanation. Never invent names, arguments or defaults.",
    "If a question has two readings, answer the likelier one and name the other in one sentence.",
    "Quote signatures exactly. Use British spelling. Do not apologise.",
)
_TOOLS = [
    {"name": "list_topics", "description": "Lists the topics of the language reference.", "parameters": {}},
    {
        "name": "read_topic",
        "description": "Returns one paragraph of a topic of the language reference.",
        "parameters": {"topic": {"type": "string"}, "paragraph": {"type": "integer", "minimum": 0}},
    },
    {
        "name": "docstring",
        "description": "Returns the docstring of a built-in, such as str.split.",
        "parameters": {"name": {"type": "string"}},
    },
]
_ASKED = ("What is meant by", "When does one need", "Give an example for", "Explain to a beginner", "What follows from")

_T = TypeVar("_T")
# A prompt and its output.
_Turn = tuple[str | tuple[Message, ...], str]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """How much of each kind; the defaults make about 2,000 requests and 4.6 million byte tokens.

    Attributes:
        num_documents: at most; there are about two dozen.
        num_searches: each asks 30 times.
        duration_s: sessions start within it.
        tokenizer: name or path for `load_tokenizer`.
    """

    num_documents: int = 20
    num_questions: int = 12
    num_conversations: int = 60
    num_turns: int = 6
    num_few_shot_tasks: int = 8
    num_few_shot_questions: int = 60
    num_searches: int = 25
    num_agents: int = 16
    num_steps: int = 12
    duration_s: float = 600.0
    tokenizer: str = "bytes"

    def __post_init__(self) -> None:
        """Raises ValueError naming the size that is out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 0):
                raise ValueError(f"{field.name}: expected an integer >= 0, got {value!r}")
        if not 0 < self.duration_s < float("inf"):
            raise ValueError(f"duration_s: expected a positive number, got {self.duration_s!r}")

    def requests(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        """Yields all kinds, interleaved by arrival time. Cost: 0.1 s; the texts are shared, about 1 MB."""
        encoder = ChatEncoder(load_tokenizer(self.tokenizer))
        arrivals = []
        for session, turns, mean_gap_s in self._sessions(load_python_docs(), rng):
            now = float(rng.uniform(0, self.duration_s))
            for turn, (prompt, output) in enumerate(turns):
                arrivals.append((now, session, turn, prompt, output))
                now += float(rng.exponential(mean_gap_s))
        for now, session, turn, prompt, output in sorted(arrivals, key=lambda arrival: arrival[0]):
            item = Request(
                encoder,
                f"{session}/{turn}",
                prompt,
                Message(ASSISTANT, (output,)),
                timestamp_s=now,
                session=session,
            )
            yield item.request(0)

    def _sessions(self, docs: PythonDocs, rng: np.random.Generator) -> Iterator[tuple[str, list[_Turn], float]]:
        """Yields (session, its turns, mean seconds between them)."""
        for i in range(min(self.num_documents, len(docs.documents))):
            yield f"document{i}", _document_turns(docs, i, self.num_questions, rng), 15.0
        for i in range(self.num_conversations):
            yield f"conversation{i}", _conversation_turns(docs, self.num_turns, rng), 20.0
        for i in range(self.num_few_shot_tasks):
            yield f"few_shot{i}", _few_shot_turns(docs, self.num_few_shot_questions, rng), 3.0
        for i in range(self.num_searches):
            yield f"search{i}", _search_turns(docs, rng), 1.0
        for i in range(self.num_agents):
            yield f"agent{i}", _agent_turns(docs, self.num_steps, rng), 5.0


def _document_turns(docs: PythonDocs, which: int, num_questions: int, rng: np.random.Generator) -> list[_Turn]:
    """Independent questions on one text, which comes before the question."""
    title, text = docs.documents[which]
    parts = paragraphs(text)
    turns: list[_Turn] = []
    for _ in range(num_questions):
        at = int(rng.integers(len(parts)))
        asked = f'{_pick(_ASKED, rng)} "{_first_words(parts[at], 12)}"?'
        system = Message("system", (f"{_RULES[0]} Answer from the text on {title} alone.",))
        turns.append(((system, Message("user", (f"{text}\n\nQuestion: {asked}",))), parts[(at + 1) % len(parts)]))
    return turns


def _conversation_turns(docs: PythonDocs, num_turns: int, rng: np.random.Generator) -> list[_Turn]:
    """One person asking about one type or module."""
    owner = _pick(sorted({entry.owner for entry in docs.entries}), rng)
    about = [entry for entry in docs.entries if entry.owner == owner]
    history = [Message("system", ("\n".join(_RULES),))]
    turns: list[_Turn] = []
    for turn in range(num_turns):
        entry = _pick(about, rng)
        opening = f"I am working with {owner}. " if not turn else ""
        history.append(Message("user", (f"{opening}{_pick(_ASKED, rng)} {entry.name}?",)))
        turns.append((tuple(history), entry.text))
        history.append(Message(ASSISTANT, (entry.text,)))
    return turns


def _few_shot_turns(docs: PythonDocs, num_questions: int, rng: np.random.Generator) -> list[_Turn]:
    """Three fixed examples, two that a retriever chose out of six, and the question."""
    drawn = [docs.entries[at] for at in rng.choice(len(docs.entries), min(9, len(docs.entries)), replace=False)]
    fixed, pool = drawn[:3], drawn[3:]
    head = "Say in one sentence what the function does.\n\n" + "".join(map(_example, fixed))
    turns: list[_Turn] = []
    for _ in range(num_questions):
        chosen = [pool[at] for at in rng.choice(len(pool), min(2, len(pool)), replace=False)]
        asked = _pick(docs.entries, rng)
        prompt = head + "".join(map(_example, chosen)) + f"Function: {asked.text}\nSummary:"
        turns.append((prompt, " " + _first_words(asked.text.rpartition("\n\n")[2], 25)))
    return turns


def _search_turns(docs: PythonDocs, rng: np.random.Generator) -> list[_Turn]:
    """Three levels of short thoughts: each of two states is continued three ways, each way judged."""
    _, text = _pick(docs.documents, rng)
    thoughts = [_first_words(part, 16) for part in paragraphs(text)]
    propose = "Goal: order the statements so that each needs only those before it. Suggest the next one.\n"
    judge = "Can the statements, in this order, be understood from the top? (sure/likely/impossible)\n"
    goal = f"Statements on: {_first_words(text, 6)}\n"
    beam = [goal]
    turns: list[_Turn] = []
    for _ in range(3):
        grown = []
        for path in beam:
            new = [f"{path}- {_pick(thoughts, rng)}\n" for _ in range(3)]
            turns.extend((propose + path, state[len(path) :]) for state in new)
            turns.extend((judge + state, _pick(("sure\n", "likely\n", "impossible\n"), rng)) for state in new)
            grown.extend(new)
        beam = [grown[at] for at in rng.choice(len(grown), 2, replace=False)]
    return turns


def _agent_turns(docs: PythonDocs, num_steps: int, rng: np.random.Generator) -> list[_Turn]:
    """An agent that reads up on something with tools; every result joins its context."""
    title, text = _pick(docs.documents, rng)
    parts = paragraphs(text)
    tools = "\n".join(json.dumps(tool) for tool in _TOOLS)
    system = "\n".join(_RULES) + f"\n\n# Tools\n\n<tools>\n{tools}\n</tools>"
    history = [
        Message("system", (system,)),
        Message("user", (f'Collect what the reference says about "{_first_words(_pick(parts, rng), 10)}".',)),
    ]
    turns: list[_Turn] = []
    for _ in range(num_steps):
        if rng.random() < 0.7:
            at = int(rng.integers(len(parts)))
            call, result = {"name": "read_topic", "arguments": {"topic": title, "paragraph": at}}, parts[at]
        else:
            entry = _pick(docs.entries, rng)
            call, result = {"name": "docstring", "arguments": {"name": entry.name}}, entry.text
        output = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        turns.append((tuple(history), output))
        history += [Message(ASSISTANT, (output,)), Message("tool", (result,))]
    return turns


def _example(entry: Entry) -> str:
    return f"Function: {entry.text}\nSummary: {_first_words(entry.text.rpartition(chr(10) * 2)[2], 25)}\n\n"


def _first_words(text: str, count: int) -> str:
    return " ".join(text.split()[:count])


def _pick(options: Sequence[_T], rng: np.random.Generator) -> _T:
    return options[int(rng.integers(len(options)))]
