"""What would a radix tree of token spans save over the flat hash of blocks, on this trace?

Replays a trace through the real managers and caches, one request at a time, all caches side by side. Expected: without
a bound radix hits at least as much, at every block size what an infinite cache that shares to the token would hit. It
holds more blocks for it (each request's partly filled last one), so where nothing diverges inside blocks it can lose a
little in a tight pool. Its index costs less than the flat hash with hashing counted.

    python -m experiments.compare                                         the embedded workload, under a minute
    python -m experiments.compare --trace my.jsonl --tokenizer qwen3      your own: chats, requests, Mooncake, CSV
    python -m experiments.compare --trace my.jsonl --num-blocks 1000 10000 unbounded --block-size 16 64
    python -m experiments.compare --workload few_shot --cache-outputs on
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from experiments.compare_options import EMBEDDED, Config, read_options
from experiments.compare_replay import replay, serve_embedded
from experiments.compare_report import answer, plot, print_rows, show
from experiments.lab.harness import Row, console, fail, save
from radixkv.traces import open_trace, open_workload

__all__ = ["answer", "plot", "show"]  # what shows the rows


def run(config: Config) -> Iterator[list[Row]]:
    """Replays each trace of the config through every cache of it; yields a trace's rows when it has ended.

    Raises:
        ValueError: a file can't be read, or an option has no such value, or concerns nothing that is asked for.
    """
    _check(config)
    traces = _traces(config)  # all of them opened before the first is read
    names = _names([trace.name for trace in traces], config)
    for trace, name in zip(traces, names, strict=True):
        rows = replay(trace, name, config)
        if rows[0]["num_requests"]:
            yield rows
        else:
            console.print(f"{name}: no request in it", *trace.counts.remarks(), sep="\n", markup=False)


def _check(config: Config) -> None:
    default = Config()
    idle = {"policy", "partial_blocks"} if "radix" not in config.cache else set()
    if "flat_hash" not in config.cache:
        idle.add("hash_algorithm")
    if config.trace:
        idle.add("seed")
    else:
        idle |= {"format", "join", "skip_bad"}
    for name in sorted(idle):
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"--{name.replace('_', '-')}: concerns nothing that is asked for")


def _traces(config: Config) -> list[Any]:
    if not config.trace:
        name = config.workload or EMBEDDED
        if name != EMBEDDED and config.tokenizer != "bytes":
            raise ValueError(f"--tokenizer: the tokens of {name} are random numbers, got {config.tokenizer!r}")
        more = {"tokenizer": config.tokenizer} if name == EMBEDDED else {}
        return [open_workload(name, seed=config.seed, limit=config.limit, **more)]
    groups = [list(config.trace)] if config.join else [[path] for path in config.trace]
    return [
        open_trace(
            paths, tokenizer=config.tokenizer, format=config.format, limit=config.limit, skip_bad=config.skip_bad
        )
        for paths in groups
    ]


def _names(names: Sequence[str], config: Config) -> list[str]:
    """Names of traces, their whole paths where they would be the same."""
    return list(names) if len(set(names)) == len(names) else [str(path) for path in config.trace]


def main(arguments: Sequence[str] | None = None) -> None:
    out, config = read_options(__doc__, arguments)
    rows: list[Row] = []
    stopped = ""
    try:
        out.mkdir(parents=True, exist_ok=True)  # before all the work, not after it
        for of_trace in run(config):
            rows += of_trace
            print_rows(of_trace)
    except (ValueError, ImportError, OSError) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    if not rows:
        fail(stopped or "there was no request to replay")
    serving: list[Row] = []
    if config.serve and not stopped:
        serving = serve_embedded(config)
    path = save(out, "compare", asdict(config), rows, serving=serving)
    console.print(f"{path}\n{plot(path)}", highlight=False)
    if stopped:  # what had ended by then is kept
        fail(stopped)


if __name__ == "__main__":
    main()
