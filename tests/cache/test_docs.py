"""What the docstrings of the caches show is so, and no public member is without one."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import radixkv.cache
from radixkv.cache.contract import PrefixCache
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache

MODULES = sorted(module.name for module in walk_packages(radixkv.cache.__path__, "radixkv.cache."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_so(name):
    results = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


@pytest.mark.parametrize("cache", [RadixCache, FlatHashCache, NullCache])
def test_caches_show_how_they_are_called(cache):
    """A reader of the class sees it used, beginning with its import."""
    assert f"import {cache.__name__}" in cache.__doc__


@pytest.mark.parametrize("cache", [PrefixCache, RadixCache, FlatHashCache, NullCache])
def test_every_public_member_has_a_docstring(cache):
    members = [name for name in dir(PrefixCache) if not name.startswith("_")]
    assert len(members) > 15
    for name in members:
        member = inspect.getattr_static(cache, name, None)
        if callable(member) or isinstance(member, property):
            assert member.__doc__, f"{cache.__name__}.{name}"


def test_the_policy_that_the_docs_show_evicts_the_largest_leaf_first():
    text = (Path(__file__).parents[2] / "docs/adding_a_policy.md").read_text()
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    cache = RadixCache(1, policy=names["Largest"]())
    for first, tokens in ((0, [1]), (10, [2, 3, 4]), (20, [5, 6])):
        lease = cache.acquire(tokens)
        cache.insert(lease, tokens, range(first, first + len(tokens)))
        cache.commit()
        cache.release(lease)
    assert cache.evict(4).tolist() == [12, 11, 10, 21]
