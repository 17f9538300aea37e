"""Synthetic workloads whose prompts grow by what was answered before: conversations, search trees, agents."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixkv.traces.request import TraceRequest
from radixkv.traces.synthetic import SyntheticConfig


@dataclass(frozen=True, kw_only=True)
class MultiTurn(SyntheticConfig):
    """Conversations under a shared system prompt; which one speaks next is random."""

    num_conversations: int = 200
    num_turns: int = 6
    system_tokens: int = 256
    min_user_tokens: int = 16
    max_user_tokens: int = 128
    min_output_tokens: int = 64
    max_output_tokens: int = 256

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        system = self.tokens(rng, self.system_tokens)
        histories = [system] * self.num_conversations
        turns = [0] * self.num_conversations
        for at in rng.permutation(self.num_conversations * self.num_turns):
            which = int(at) % self.num_conversations
            prompt = histories[which] + self.between(rng, self.min_user_tokens, self.max_user_tokens)
            output = self.between(rng, self.min_output_tokens, self.max_output_tokens)
            yield TraceRequest(f"c{which}/{turns[which]}", prompt, output, session=f"c{which}")
            histories[which] = prompt + output
            turns[which] += 1


@dataclass(frozen=True, kw_only=True)
class TreeOfThought(SyntheticConfig):
    """Beam search over thoughts: each state is continued several ways, each continuation is judged, the best are kept.

    A proposal's prompt is instruction, problem and the thoughts so far, sampled `num_branches` times; a judgement's is
    another instruction and the same path with the new thought. Problems advance level by level, side by side.
    """

    num_problems: int = 20
    num_levels: int = 3
    num_branches: int = 5
    num_kept: int = 2
    instruction_tokens: int = 300
    problem_tokens: int = 40
    min_thought_tokens: int = 20
    max_thought_tokens: int = 60
    output_tokens: int = 8

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        propose = self.tokens(rng, self.instruction_tokens)
        judge = self.tokens(rng, self.instruction_tokens)
        beams = [[self.tokens(rng, self.problem_tokens)] for _ in range(self.num_problems)]
        for level in range(self.num_levels):
            for problem, beam in enumerate(beams):
                grown: list[bytes] = []
                for state, path in enumerate(beam):
                    name = f"p{problem}/{level}.{state}"
                    for branch in range(self.num_branches):
                        thought = self.between(rng, self.min_thought_tokens, self.max_thought_tokens)
                        grown.append(path + thought)
                        yield TraceRequest(f"{name}.{branch}", propose + path, thought, session=f"p{problem}")
                    for branch, new in enumerate(grown[-self.num_branches :]):
                        verdict = self.tokens(rng, self.output_tokens)
                        yield TraceRequest(f"{name}.{branch}?", judge + new, verdict, session=f"p{problem}")
                kept = rng.choice(len(grown), min(self.num_kept, len(grown)), replace=False)
                beams[problem] = [grown[at] for at in kept]


@dataclass(frozen=True, kw_only=True)
class Agent(SyntheticConfig):
    """Agents that call tools, and sometimes send a sub-agent on a side-chain whose last words come back as a result.

    All agents share system prompt and tool definitions; all sub-agents share their own. Which agent acts is random.
    """

    num_agents: int = 20
    num_steps: int = 12
    num_side_steps: int = 4
    side_chain_probability: float = 0.15
    system_tokens: int = 600
    tools_tokens: int = 1500
    min_task_tokens: int = 50
    max_task_tokens: int = 400
    min_call_tokens: int = 20
    max_call_tokens: int = 120
    min_result_tokens: int = 30
    max_result_tokens: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.side_chain_probability <= 1:
            raise ValueError(f"side_chain_probability: expected 0 to 1, got {self.side_chain_probability!r}")

    def generate(self, rng: np.random.Generator) -> Iterator[TraceRequest]:
        main_head = self.tokens(rng, self.system_tokens) + self.tokens(rng, self.tools_tokens)
        side_head = self.tokens(rng, self.system_tokens) + self.tokens(rng, self.tools_tokens)
        histories = [main_head + self._task(rng) for _ in range(self.num_agents)]
        steps = [0] * self.num_agents
        for at in rng.permutation(self.num_agents * self.num_steps):
            agent = int(at) % self.num_agents
            session, name = f"a{agent}", f"a{agent}/{steps[agent]}"
            steps[agent] += 1
            call = self._call(rng)
            yield TraceRequest(name, histories[agent], call, session=session)
            if rng.random() < self.side_chain_probability:
                result = b""
                side = side_head + self._task(rng)
                for step in range(self.num_side_steps):
                    result = self._call(rng)
                    yield TraceRequest(f"{name}.{step}", side, result, session=session)
                    side += result + self._result(rng)
            else:
                result = self._result(rng)
            histories[agent] += call + result

    def _task(self, rng: np.random.Generator) -> bytes:
        return self.between(rng, self.min_task_tokens, self.max_task_tokens)

    def _call(self, rng: np.random.Generator) -> bytes:
        return self.between(rng, self.min_call_tokens, self.max_call_tokens)

    def _result(self, rng: np.random.Generator) -> bytes:
        return self.between(rng, self.min_result_tokens, self.max_result_tokens)
