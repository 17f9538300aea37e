"""The command: `python -m radixkv.inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.contract import check_block_size
from radixkv.cache.namespace import Interner
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import num_common_tokens
from radixkv.inspect import __doc__ as description
from radixkv.inspect.page import to_html
from radixkv.inspect.survey import Passage, survey, token_list
from radixkv.inspect.why import compare_prompts
from radixkv.traces import FORMATS, TraceError, TraceRequest, load_tokenizer, open_trace, open_workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _why(given[1:]) if given[:1] == ["why"] else _tree(given)
    except (ValueError, ImportError, OSError) as error:
        print(f"radixkv.inspect: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        return 0


def _parser(usage: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m radixkv.inspect",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--tokenizer", default="bytes", metavar="bytes|NAME|PATH", help="of text (UTF-8 bytes)")
    made.add_argument("--format", choices=FORMATS, help="where the format is not to be recognised from the content")
    made.add_argument("--skip-bad", action="store_true", help="pass over lines that can't be read")
    return made


def _reading(given: argparse.Namespace) -> dict[str, Any]:
    return {"tokenizer": given.tokenizer, "format": given.format, "skip_bad": given.skip_bad}


def _tree(arguments: Sequence[str]) -> int:
    options = _parser("python -m radixkv.inspect [TRACE ...] [options] | why A B")
    add = options.add_argument
    add("trace", nargs="*", metavar="TRACE", help="files of requests (default: the embedded workload)")
    add("--block-size", type=int, default=1, metavar="N", help="tokens in a block (1: spans end where texts part)")
    add("--num-blocks", type=int, metavar="N", help="blocks in the pool: what is left after evictions (unbounded)")
    add("--limit", type=int, metavar="N", help="read at most so many requests")
    add("--depth", type=int, default=6, metavar="N", help="spans below one another in the terminal (6)")
    add("--children", type=int, default=8, metavar="N", help="of each span in the terminal (8)")
    add("--html", type=Path, metavar="FILE", help="write a page that folds, too")
    given = options.parse_args(arguments)
    from radixkv.inspect.terminal import Console, print_tree

    check_block_size(given.block_size)
    trace: Any
    if given.trace:
        trace = open_trace(given.trace, limit=given.limit, **_reading(given))
    else:
        trace = open_workload("embedded", tokenizer=given.tokenizer, limit=given.limit)
    replay = Replay(CacheConfig("radix", given.block_size, num_blocks=given.num_blocks))
    hits = [replay.feed(request.prompt, b"", request.namespace) for request in trace]
    passages = (Passage(r.prompt, hit, r.namespace) for r, hit in zip(trace, hits, strict=True))  # read once more
    assert isinstance(replay.cache, RadixCache)
    text_of = trace.tokenizer.decode if trace.tokenizer else token_list
    found = survey(replay.cache.snapshot(), passages, text_of)
    console = Console()
    print_tree(found, console, max_depth=given.depth, max_children=given.children, width=max(console.width - 50, 30))
    _warn(trace, console)
    if given.html:
        given.html.write_text(to_html(found, f"Radix tree of {trace.name}"), encoding="utf-8")
        console.print(str(given.html), highlight=False)
    return 0


def _why(arguments: Sequence[str]) -> int:
    options = _parser("python -m radixkv.inspect why TRACE N [M] | why FILE FILE [options]")
    options.add_argument(
        "what",
        nargs="+",
        help="a trace and one of its requests, counted from 0, compared with the earlier one that it shares most with, "
        "or with the one that a second number names; or two text files",
    )
    given = options.parse_args(arguments)
    from radixkv.inspect.terminal import Console, print_difference

    console = Console()
    trace: Any = None
    path, *others = given.what
    if others and all(other.isdigit() for other in others) and len(others) < 3:
        trace = open_trace(path, **_reading(given))
        first, second = _pair(trace, path, [int(other) for other in others], console)
        text_of = trace.tokenizer.decode if trace.tokenizer else token_list
        namespaces = (first.namespace, second.namespace)
        difference = compare_prompts(first.prompt, second.prompt, text_of, namespaces=namespaces)
    elif len(others) == 1:
        tokenizer = load_tokenizer(given.tokenizer)
        one, other = (tokenizer.encode(Path(file).read_text(encoding="utf-8")) for file in given.what)
        difference = compare_prompts(one, other, tokenizer.decode)
    else:
        options.error("expected a trace and the number of a request or of two, or two text files")
    print_difference(difference, console)
    if trace is not None:
        _warn(trace, console)
    return 0


def _warn(trace: Any, console: Any) -> None:
    """Says what was odd about what was read of a trace, and what was not read."""
    for line in trace.counts.remarks():
        console.print(line if line.startswith(" ") else f"warning: {line}", highlight=False, markup=False)


def _pair(trace: Any, path: str, numbers: list[int], console: Any) -> tuple[TraceRequest, TraceRequest]:
    """Returns the requests of these numbers; of one number, the earlier request that it shares most with, and it."""
    if len(numbers) == 2:
        return _request(trace, path, numbers[0]), _request(trace, path, numbers[1])
    (last,) = numbers
    if not last:
        raise ValueError("request: expected one with others before it, got 0")
    of = _request(trace, path, last)
    best, most, found = of, -1, 0
    interner = Interner()  # what another model has computed is not shared, however equal the prompts
    wanted = _marked(interner, of)
    for at, earlier in enumerate(islice(trace, last)):  # read once more: a trace need not fit in memory
        common = num_common_tokens(_marked(interner, earlier, add=False), wanted)
        if common >= most:
            best, most, found = earlier, common, at
    console.print(f"the first is request {found}: of all before request {last} it shares most with it", highlight=False)
    return best, of


def _marked(interner: Interner, request: TraceRequest, *, add: bool = True) -> bytes:
    """The tokens of a prompt with its namespace folded in, as a radix tree compares them."""
    if request.namespace is None:
        return request.prompt
    return interner.mark(request.prompt, request.namespace, add=add)


def _request(trace: Any, path: str, number: int) -> TraceRequest:
    for request in islice(trace, number, None):
        return request
    raise TraceError(Path(path), "", f"it has no request {number}: it has {trace.counts.num_requests}, counted from 0")


if __name__ == "__main__":
    raise SystemExit(main())
