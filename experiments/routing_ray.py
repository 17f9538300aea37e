"""Real engines behind Ray Serve: its own router against ours, in one run, and the tokens of one engine as the check.

Conversations on tiny_gpt, random weights: groups of four share a system prompt, each turn adds a question and the
answer before it; eight run at a time, each pausing between turns as people do. (Without pauses Serve's router, which
looks for the shortest queue, finds the replica that has just answered, and hits by accident.) Both routers serve the
same conversations with fresh replicas, one after the other; every answer has to be the one engine's, token for token.
Time to first token is the client's, Serve included.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.harness import Row, console, fail, print_table, progress, save
from experiments.lab.plots import Figure, png, pyplot
from radixkv.engine.engine import Engine
from radixkv.scheduling.request import SamplingParams

COLUMNS = {
    "router": "{router}",
    "replicas": "{num_replicas}",
    "requests": "{num_requests}",
    "hit rate": "{hit_rate:.1%}",
    "busiest": "{busiest:.0%}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "latency p50 ms": "{latency_p50_ms:.0f}",
    "requests/s": "{request_throughput:.1f}",
}


@dataclass(frozen=True)
class Config:
    """What is said, in tokens, and how fast."""

    num_replicas: int = 2
    num_conversations: int = 16
    num_turns: int = 6
    num_at_once: int = 8
    pause_s: float = 1.0  # in the mean, exponential
    system_tokens: int = 256
    question_tokens: int = 96
    answer_tokens: int = 8
    num_blocks: int = 4096
    seed: int = 0


Answers = dict[tuple[int, int], list[int]]  # by conversation and turn


def questions(config: Config) -> list[list[list[int]]]:
    """Returns the questions of each conversation, the first with its system prompt before it."""
    rng = np.random.default_rng(config.seed)
    systems = rng.integers(0, 256, (-(-config.num_conversations // 4), config.system_tokens)).tolist()
    found = []
    for which in range(config.num_conversations):
        turns = rng.integers(0, 256, (config.num_turns, config.question_tokens)).tolist()
        found.append([systems[which % len(systems)] + turns[0], *turns[1:]])
    return found


def one_engine(config: Config) -> Answers:
    """Returns the answers of one engine that serves the conversations one after the other."""
    engine = Engine.from_pretrained("tiny_gpt", num_blocks=config.num_blocks)
    params = SamplingParams(max_tokens=config.answer_tokens, ignore_eos=True)
    answers: Answers = {}
    for which, turns in enumerate(questions(config)):
        said: list[int] = []
        for turn, question in enumerate(turns):
            said += question
            answers[which, turn] = engine.generate([said], params)[0].outputs[0].token_ids
            said += answers[which, turn]
    return answers


async def converse(handle: Any, config: Config, title: str) -> tuple[Answers, list[Row]]:
    """Serves the conversations; returns the answers, and a record of each request."""
    from radixkv.fleet.ray import stream

    params = SamplingParams(max_tokens=config.answer_tokens, ignore_eos=True)
    answers: Answers = {}
    records: list[Row] = []
    at_once = asyncio.Semaphore(config.num_at_once)
    with progress(title, config.num_conversations * config.num_turns) as bar:

        async def converse_one(which: int, turns: list[list[int]]) -> None:
            async with at_once:
                said: list[int] = []
                rng = np.random.default_rng([config.seed, which])
                for turn, question in enumerate(turns):
                    said += question
                    await asyncio.sleep(rng.exponential(config.pause_s))
                    started, first, found = time.perf_counter(), None, []
                    async for chunk in stream(handle, said, params):
                        first = first or time.perf_counter() - started
                        found += chunk.token_ids
                    ended = time.perf_counter()
                    records.append(
                        {
                            "conversation": which,
                            "replica": chunk.replica,
                            "num_prompt_tokens": len(said),
                            "num_cached_tokens": chunk.num_cached_tokens,
                            "ttft_s": first,
                            "latency_s": ended - started,
                        }
                    )
                    answers[which, turn] = found
                    said += found
                    bar.advance(bar.task_ids[0])

        await asyncio.gather(*(converse_one(which, turns) for which, turns in enumerate(questions(config))))
    return answers, records


def summarize(router: str, config: Config, records: list[Row], duration_s: float) -> Row:
    """Returns the row of one router."""
    cached, prompt = (sum(r[name] for r in records) for name in ("num_cached_tokens", "num_prompt_tokens"))
    replicas = [record["replica"] for record in records]
    times = {name: np.array([record[name] for record in records]) * 1e3 for name in ("ttft_s", "latency_s")}
    return {
        "router": router,
        "num_replicas": config.num_replicas,
        "num_requests": len(records),
        "hit_rate": cached / prompt,
        "busiest": max(map(replicas.count, set(replicas))) / len(replicas),
        "ttft_p50_ms": float(np.percentile(times["ttft_s"], 50)),
        "ttft_p99_ms": float(np.percentile(times["ttft_s"], 99)),
        "latency_p50_ms": float(np.percentile(times["latency_s"], 50)),
        "request_throughput": len(records) / duration_s,
    }


def run(num_replicas: int, out: Path, *, smoke: bool = False) -> None:
    """Runs both routers and writes routing_ray.json and routing_ray.png."""
    try:
        import ray
        from ray import serve

        from radixkv.fleet.ray import deploy
    except ImportError as error:
        fail(f"--backend ray needs {error.name}: pip install 'radixkv[replicas]'")
    config = Config(num_replicas, num_conversations=8, num_turns=3) if smoke else Config(num_replicas)
    expected = one_engine(config)
    ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    rows = []
    try:
        for router in (None, "cache_aware"):
            title = router or "serve default"
            console.print(f"{title}: starting {num_replicas} replicas")
            share = ray.cluster_resources()["CPU"] / (num_replicas + 1)
            cpus = min(1.0, share)
            name = f"radixkv-{router or 'default'}"  # a handle of an application's name keeps the router it began with
            handle = deploy(
                "tiny_gpt",
                num_replicas=num_replicas,
                router=router,
                num_cpus=cpus,
                name=name,
                num_blocks=config.num_blocks,
            )
            short = Config(num_replicas, num_conversations=4, num_turns=1, seed=config.seed + 1)
            asyncio.run(converse(handle, short, "first calls"))  # of everything
            started = time.perf_counter()
            answers, records = asyncio.run(converse(handle, config, title))
            rows.append(summarize(title, config, records, time.perf_counter() - started))
            assert answers == expected, f"{title}: other tokens than one engine's"
            serve.delete(name)
    finally:
        serve.shutdown()
        ray.shutdown()
    print_table("The same conversations, the same tokens as one engine", COLUMNS, rows)
    path = save(out, "routing_ray", asdict(config), rows)
    picture = path.with_suffix(".png")
    picture.write_bytes(png(plot(rows)))
    console.print(f"{path}\n{picture}", highlight=False)


def plot(rows: list[Row]) -> Figure:
    """Draws hit rate and time to first token of each router."""
    figure, axes = pyplot().subplots(1, 2, figsize=(7, 3.2))
    for axis, name, title in zip(axes, ("hit_rate", "ttft_p50_ms"), ("hit rate", "TTFT p50 (ms)"), strict=True):
        axis.bar([row["router"] for row in rows], [row[name] for row in rows], 0.5, color=["C7", "C0"])
        axis.set(title=title, ylim=(0, None))
    figure.tight_layout()
    return figure
