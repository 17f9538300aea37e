"""A surveyed tree, and a difference of two prompts, in the terminal. Needs rich: pip install 'radixkv[experiments]'."""

from __future__ import annotations

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree
except ImportError as error:
    raise ImportError(f"radixkv.inspect needs {error.name}: pip install 'radixkv[experiments]'") from error

from radixkv.cache.radix.cache import Span
from radixkv.inspect.survey import Survey, below
from radixkv.inspect.why import Difference


def print_tree(found: Survey, console: Console, *, max_depth: int = 6, max_children: int = 8, width: int = 60) -> None:
    """Prints the spans that most requests went through.

    Args:
        max_depth: spans below one another.
        max_children: of each span; a line counts the others.
        width: characters of a span's text.
    """
    hit = found.num_cached_tokens / found.num_prompt_tokens if found.num_prompt_tokens else 0.0
    console.print(
        f"{found.num_requests:,} requests, {found.num_prompt_tokens:,} prompt tokens, {hit:.1%} of them found; "
        f"{found.num_spans:,} spans hold {found.num_tokens:,} tokens",
        highlight=False,
    )
    top = Tree(Text("tokens  requests  found  text", style="dim"), guide_style="dim")
    waiting = [(found.root, top, 0)]
    while waiting:
        span, branch, depth = waiting.pop()
        children = found.by_traffic(span)
        if depth == max_depth:
            branch.add(_rest(found, children))
            continue
        for child in children[:max_children]:
            made = branch.add(_line(found, child, width))
            if child.children:
                waiting.append((child, made, depth + 1))
        if len(children) > max_children:
            branch.add(_rest(found, children[max_children:]))
    console.print(top)


def _line(found: Survey, span: Span, width: int) -> Text:
    traffic = found.of(span)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{span.num_tokens:,}", style="bold")
    line.append(f"  {traffic.num_requests:,}", style="cyan")
    line.append(f"  {traffic.found:.0%}", style="green" if traffic.num_cached_tokens else "dim")
    if span.num_pins:
        line.append(f"  {span.num_pins} pins", style="magenta")
    for part in span.namespace:
        line.append(f"  {part}", style="yellow")
    line.append(f"  {shown(found.text_of(span.token_ids), width)}")
    return line


def _rest(found: Survey, spans: list[Span]) -> Text:
    inside = [span for top in spans for span in below(top)]
    num_tokens = sum(span.num_tokens for span in inside)
    num_requests = sum(found.of(span).num_requests for span in spans)
    return Text(f"… {len(inside):,} more spans, {num_tokens:,} tokens, {num_requests:,} requests", style="dim")


def shown(text: str, width: int) -> str:
    """A text on one line, its middle left out where it is longer than width: both ends tell where a span parts."""
    line = text.encode("unicode_escape").decode() if not text.isprintable() else text
    if len(line) <= width:
        return line
    half = (width - 3) // 2
    return f"{line[:half]} … {line[-half:]}"


def print_difference(found: Difference, console: Console, width: int = 70) -> None:
    """Prints where two prompts part, and a line a cache."""
    first, second = found.num_tokens
    console.print(f"the first has {first:,} tokens, the second {second:,}; the first {found.num_common:,} are the same")
    if found.namespaces_differ:
        console.print("what parts them is a namespace (model, adapter, salt or media): its KV may not be shared")
    elif found.num_common == min(first, second):
        console.print("they are equal" if first == second else "one is the start of the other: nothing parts them")
    for name, text, style in (
        ("both", found.before, "dim"),
        ("first", found.first, "red"),
        ("second", found.second, "green"),
    ):
        line = shown(text, width) if text else "(ends here)"
        console.print(Text.assemble((f"  {name:>6}  ", "bold"), (line, style)))
    if found.num_common_end and not found.namespaces_differ:
        console.print(
            f"their last {found.num_common_end:,} tokens are the same again: they are computed anew for what stands "
            "before them"
        )
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("cache", "block size", "found", "computed", "same, yet computed"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for verdict in found.verdicts:
        numbers = (verdict.num_cached_tokens, second - verdict.num_cached_tokens, verdict.num_lost_tokens)
        table.add_row(verdict.cache.cache, str(verdict.cache.block_size), *(f"{number:,}" for number in numbers))
    console.print(table)
    if any(verdict.num_lost_tokens == 1 for verdict in found.verdicts) and found.num_common == second:
        console.print("(at least one token of a prompt is always computed, to have something to sample from)")
