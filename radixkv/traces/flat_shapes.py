"""Synthetic workloads whose prefixes are given from the start: prompts, examples, documents, chosen cuts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixkv.cache.tokens import TOKEN_BYTES, pack
from radixkv.traces.request import TraceRequest
from radixkv.traces.synthetic import SyntheticConfig


@dataclass(frozen=True, kw_only=True)
class Chat(SyntheticConfig):
    """A shared system prompt, then a question of its own; Poisson arrivals."""

    num_requests: int = 1000
    num_system_prompts: int = 1
    system_tokens: int = 512
    min_question_tokens: int = 16
    max_question_tokens: int = 256
    output_tokens: int = 128
    rate_per_s: float | None = 10.0

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        systems = [self.tokens(rng, self.system_tokens) for _ in range(self.num_system_prompts)]
        for i in range(self.num_requests):
            which = int(rng.integers(self.num_system_prompts))
            question = self.between(rng, self.min_question_tokens, self.max_question_tokens)
            yield TraceRequest(f"r{i}", systems[which] + question, self.tokens(rng, self.output_tokens))


@dataclass(frozen=True, kw_only=True)
class Uniform(SyntheticConfig):
    """Random tokens throughout: what a prefix cache costs where it can't help."""

    num_requests: int = 500
    min_prompt_tokens: int = 100
    max_prompt_tokens: int = 4000
    output_tokens: int = 128

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        for i in range(self.num_requests):
            prompt = self.between(rng, self.min_prompt_tokens, self.max_prompt_tokens)
            yield TraceRequest(f"r{i}", prompt, self.tokens(rng, self.output_tokens))


@dataclass(frozen=True, kw_only=True)
class FewShot(SyntheticConfig):
    """An instruction and fixed examples of a task, examples chosen from a pool for the question, and the question."""

    num_requests: int = 1000
    num_tasks: int = 8
    instruction_tokens: int = 64
    num_fixed_examples: int = 3
    num_chosen_examples: int = 2
    num_pool_examples: int = 8
    min_example_tokens: int = 50
    max_example_tokens: int = 150
    min_question_tokens: int = 16
    max_question_tokens: int = 64
    output_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_chosen_examples > self.num_pool_examples:
            raise ValueError(
                f"num_chosen_examples: expected at most num_pool_examples, got {self.num_chosen_examples} of "
                f"{self.num_pool_examples}"
            )

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        heads, pools = [], []
        for _ in range(self.num_tasks):
            fixed = [self._example(rng) for _ in range(self.num_fixed_examples)]
            heads.append(self.tokens(rng, self.instruction_tokens) + b"".join(fixed))
            pools.append([self._example(rng) for _ in range(self.num_pool_examples)])
        for i in range(self.num_requests):
            task = int(rng.integers(self.num_tasks))
            chosen = rng.choice(self.num_pool_examples, self.num_chosen_examples, replace=False)
            question = self.between(rng, self.min_question_tokens, self.max_question_tokens)
            prompt = heads[task] + b"".join(pools[task][at] for at in chosen) + question
            yield TraceRequest(f"r{i}", prompt, self.tokens(rng, self.output_tokens), session=f"task{task}")

    def _example(self, rng: np.random.Generator) -> bytes:
        return self.between(rng, self.min_example_tokens, self.max_example_tokens)


@dataclass(frozen=True, kw_only=True)
class DocumentQA(SyntheticConfig):
    """Many questions on each of a few long documents, in random order."""

    num_documents: int = 10
    num_questions: int = 20
    instruction_tokens: int = 50
    min_document_tokens: int = 3000
    max_document_tokens: int = 9000
    min_question_tokens: int = 10
    max_question_tokens: int = 50
    output_tokens: int = 64

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        instruction = self.tokens(rng, self.instruction_tokens)
        documents = [
            instruction + self.between(rng, self.min_document_tokens, self.max_document_tokens)
            for _ in range(self.num_documents)
        ]
        for i, at in enumerate(rng.permutation(self.num_documents * self.num_questions)):
            which = int(at) % self.num_documents
            question = self.between(rng, self.min_question_tokens, self.max_question_tokens)
            prompt = documents[which] + question
            yield TraceRequest(f"r{i}", prompt, self.tokens(rng, self.output_tokens), session=f"document{which}")


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(SyntheticConfig):
    """One prompt sampled many times: requests equal to the last token, outputs that differ."""

    num_questions: int = 50
    num_samples: int = 16
    shared_tokens: int = 500
    min_question_tokens: int = 50
    max_question_tokens: int = 200
    min_output_tokens: int = 100
    max_output_tokens: int = 300

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        shared = self.tokens(rng, self.shared_tokens)
        for q in range(self.num_questions):
            prompt = shared + self.between(rng, self.min_question_tokens, self.max_question_tokens)
            for s in range(self.num_samples):
                output = self.between(rng, self.min_output_tokens, self.max_output_tokens)
                yield TraceRequest(f"q{q}/{s}", prompt, output, session=f"q{q}")


@dataclass(frozen=True, kw_only=True)
class Diverge(SyntheticConfig):
    """Groups of requests that share exactly `shared_tokens` and differ in the next token; groups share nothing.

    The groups take turns, one request each.
    """

    num_groups: int = 10
    num_requests_per_group: int = 16
    shared_tokens: int = 1000
    own_tokens: int = 200
    output_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = max(self.num_groups, self.num_requests_per_group)
        if not self.shared_tokens:
            needed = self.num_groups * self.num_requests_per_group
        if self.vocab_size < needed:
            raise ValueError(f"vocab_size: expected at least {needed}, for all to differ, got {self.vocab_size}")

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        shared = [self._starting_with(rng, g, self.shared_tokens) for g in range(self.num_groups)]
        for i in range(self.num_requests_per_group):
            for g in range(self.num_groups):
                first = i if self.shared_tokens else i * self.num_groups + g
                prompt = shared[g] + self._starting_with(rng, first, self.own_tokens)
                yield TraceRequest(f"g{g}/{i}", prompt, self.tokens(rng, self.output_tokens), session=f"g{g}")

    def _starting_with(self, rng: np.random.Generator, first: int, count: int) -> bytes:
        drawn = self.tokens(rng, count)
        return pack([first]) + drawn[TOKEN_BYTES:] if count else b""
