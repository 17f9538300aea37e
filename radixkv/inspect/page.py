"""A surveyed tree as one page that folds: HTML without scripts, fonts or requests, light and dark."""

from __future__ import annotations

from heapq import nlargest
from html import escape

from radixkv.cache.radix.cache import Span
from radixkv.inspect.survey import Survey, below

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --faint: #687086; --line: #d9dde6; --bar: #3b6fd4;
  --hit: #1f8a57; --mark: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171e; --faint: #98a1b5; --line: #303644;
  --bar: #6f9cf0; --hit: #5cc695; --mark: #e0a34a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } p { color: var(--faint); margin: .25rem 0 1rem; }
details, .leaf { border-left: 1px solid var(--line); margin-left: .55rem; padding-left: .7rem; }
summary { cursor: pointer; } summary:focus-visible { outline: 2px solid var(--bar); }
.leaf { padding-left: 1.7rem; }
.numbers { font-variant-numeric: tabular-nums; color: var(--faint); margin-right: .5rem; }
.numbers b { color: var(--ink); } .hits { color: var(--hit); } .more { color: var(--mark); }
.bar { display: inline-block; height: .55rem; background: var(--bar); border-radius: 2px; margin-right: .5rem;
  min-width: 2px; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def to_html(found: Survey, title: str, *, max_spans: int = 2000, width: int = 240) -> str:
    """Returns the page.

    Args:
        title: what the tree is of.
        max_spans: shown at most, those that most requests went through; the others are counted where they would be.
        width: characters of a span's text before its middle is left out.

    Cost: O(spans log max_spans), and the text of those shown.
    """
    spans = [span for span in below(found.root) if span is not found.root]
    # A span has no more traffic than its parent, which comes first among equals: so what is shown is one tree.
    chosen = set(nlargest(max_spans, spans, key=lambda span: (found.of(span).num_requests, -span.start)))
    chosen.add(found.root)
    hit = found.num_cached_tokens / found.num_prompt_tokens if found.num_prompt_tokens else 0.0
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>",
        f"<p>{found.num_requests:,} requests, {found.num_prompt_tokens:,} prompt tokens, {hit:.1%} of them found. "
        f"{len(spans):,} spans hold {found.num_tokens:,} tokens. Each line: tokens, requests through it, the share "
        "of their tokens in it that was found, text; the bar is the share of all requests.</p>",
    ]
    waiting: list[Span | str] = [found.root]
    while waiting:  # a path may be deeper than Python's stack
        span = waiting.pop()
        if isinstance(span, str):
            parts.append(span)
            continue
        below_it: list[Span | str] = [child for child in found.by_traffic(span) if child in chosen]
        hidden = [child for child in span.children if child not in chosen]
        if hidden:
            below_it.append(_more(found, hidden))
        if span is found.root:
            waiting.extend(reversed(below_it))
        elif below_it:
            is_open = " open" if found.of(span).num_requests * 20 >= max(found.num_requests, 1) else ""
            parts.append(f"<details{is_open}><summary>{_line(found, span, width)}</summary>")
            waiting.append("</details>")
            waiting.extend(reversed(below_it))
        else:
            parts.append(f'<div class="leaf">{_line(found, span, width)}</div>')
    parts.append("</main></body></html>\n")
    return "\n".join(parts)


def _line(found: Survey, span: Span, width: int) -> str:
    traffic = found.of(span)
    share = traffic.num_requests / max(found.num_requests, 1)
    numbers = f"<b>{span.num_tokens:,}</b> · {traffic.num_requests:,} · <span class=hits>{traffic.found:.0%}</span>"
    pins = f" · {span.num_pins} pins" if span.num_pins else ""
    namespace = "".join(f" · {escape(str(part))}" for part in span.namespace)
    text = found.text_of(span.token_ids)
    if len(text) > width:
        text = f"{text[: width // 2]} … {text[-width // 2 :]}"
    return (
        f'<span class="bar" style="width:{share * 8:.2f}rem"></span><span class="numbers">{numbers}{pins}{namespace}'
        f"</span><code>{escape(text)}</code>"
    )


def _more(found: Survey, hidden: list[Span]) -> str:
    inside = [span for top in hidden for span in below(top)]
    num_tokens = sum(span.num_tokens for span in inside)
    num_requests = sum(found.of(span).num_requests for span in hidden)
    counts = f"{len(inside):,} more spans, {num_tokens:,} tokens, {num_requests:,} requests"
    return f'<div class="leaf more">… {counts}</div>'
