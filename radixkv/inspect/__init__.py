"""The radix tree of a trace, or of a running engine's cache, as people want to see it; and why a prefix does not hit.

    python -m radixkv.inspect trace.jsonl                    the tree in the terminal
    python -m radixkv.inspect trace.jsonl --html tree.html   and as a page that folds
    python -m radixkv.inspect why trace.jsonl 17             where request 17 leaves all that came before it
    python -m radixkv.inspect why trace.jsonl 17 3           where request 3 leaves request 17
    python -m radixkv.inspect why a.txt b.txt                where one prompt leaves another

In a program: `survey(cache.snapshot(), requests)` and then `to_html` or `print_tree`; no torch.
"""

from radixkv.inspect.page import to_html
from radixkv.inspect.survey import Survey, survey
from radixkv.inspect.why import Difference, compare_prompts

__all__ = ["Difference", "Survey", "compare_prompts", "survey", "to_html"]
