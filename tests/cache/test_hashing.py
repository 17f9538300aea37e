"""Block hashes: the reference digests, extra keys, what is optional."""

import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from radixkv.cache.hashing import ALGORITHMS, BlockHasher, extra_keys
from radixkv.cache.namespace import LoRA, Media, Salt, parts
from radixkv.cache.tokens import pack

TOKENS = pack(range(40))

# What vLLM computes for tokens 0..39 in blocks of 16: the seed, both full blocks, block 0 under the salt "tenant-1".
REFERENCE = {
    "sha256_cbor": (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
        "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
        "c04a0f3e63a2df69558964d8f091ce5a90b3324db22755787b28010dc6bc94e0",
    ),
    "sha256": (
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629",
        "e7fef13075218c9212e126e50dff5e27a269621143869b7106ff349ace92448c",
    ),
}


@pytest.mark.parametrize("algorithm", REFERENCE)
def test_reference_digests(algorithm):
    hasher = BlockHasher(algorithm, 16)
    blocks = list(hasher.chain(hasher.seed, TOKENS))
    salted = next(hasher.chain(hasher.seed, TOKENS, (Salt("tenant-1"),)))
    assert tuple(digest.hex() for digest in (hasher.seed, *blocks, salted)) == REFERENCE[algorithm]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_is_xxh3_128_over_the_same_bytes(algorithm):
    cbor2, xxhash = pytest.importorskip("cbor2"), pytest.importorskip("xxhash")
    hasher = BlockHasher(algorithm, 16)
    value = (hasher.seed, tuple(range(16)), None)
    if algorithm == "xxhash":
        serialized = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    else:
        serialized = cbor2.dumps(value, canonical=True)
    assert next(hasher.chain(hasher.seed, TOKENS)) == xxhash.xxh3_128_digest(serialized)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_chain_goes_on_from_anywhere(algorithm):
    hasher = BlockHasher(algorithm, 8)
    found = parts((LoRA("a"), Media("x", 5, 20), Salt("t", start=17)))
    whole = list(hasher.chain(hasher.seed, TOKENS, found))
    assert len(whole) == 5
    assert list(hasher.chain(whole[1], memoryview(TOKENS)[64:], found, 16)) == whole[2:]
    assert list(hasher.chain(whole[-1], b"", found, 40)) == []


def keys(namespace, position=0, count=3, block_size=16):
    return list(islice(extra_keys(parts(namespace), position, block_size), count))


def test_extra_keys():
    assert keys(None) == [None, None, None]
    assert keys(Salt("s")) == [(("cache_salt", "s"),), None, None]
    assert keys(LoRA("n", "p")) == [(("lora", "n", "p"),)] * 3
    assert keys(Media("x", 10, 23)) == [(("mm", "x", 10),), (("mm", "x", -6),), (("mm", "x", -22),)]
    assert keys(Media("x", 10, 22)) == [(("mm", "x", 10),), (("mm", "x", -6),), None]
    everything = (Salt("s"), Media("y", 3, 2), Media("x", 1, 2), LoRA("n"))
    assert keys(everything, count=2) == [
        (("lora", "n", ""), ("mm", "x", 1), ("mm", "y", 3), ("cache_salt", "s")),
        (("lora", "n", ""),),
    ]
    assert keys(everything, position=16, count=1) == [(("lora", "n", ""),)]


def test_extra_keys_beyond_vllms():
    assert keys(LoRA("n", "p", version=3)) == [(("lora", "n", "p", 3),)] * 3
    assert keys(LoRA("n", "p", start=16)) == [None, (("lora", "n", "p"),), (("lora", "n", "p"),)]
    assert keys(LoRA("n", "p", start=18)) == [None, (("lora", "n", "p", 0, 2),), (("lora", "n", "p"),)]
    assert keys(Salt("s", start=16)) == [None, (("cache_salt", "s"),), None]
    assert keys(Salt("s", start=18)) == [None, (("cache_salt", "s", 2),), None]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digests_depend_on_values_and_not_on_which_objects_hold_them(algorithm):
    hasher = BlockHasher(algorithm, 16)
    name = "".join(["a", "b"])
    digests = {
        next(hasher.chain(hasher.seed, TOKENS, parts((LoRA(first, second), Salt(third)))))
        for first, second, third in [("ab", "ab", "ab"), (name, "ab", "".join(["a", "b"])), (name, name, name)]
    }
    assert len(digests) == 1


@pytest.mark.parametrize("bits", [1, 4, 8, 13, 256])
def test_digests_are_cut_to_their_first_bits(bits):
    whole, cut = BlockHasher("sha256", 16), BlockHasher("sha256", 16, digest_bits=bits)
    expected, got = (int.from_bytes(hasher.digest("x"), "big") for hasher in (whole, cut))
    assert got >> (-bits % 8) == expected >> (256 - bits)
    assert got % (1 << (-bits % 8)) == 0


def test_importing_needs_no_optional_library():
    code = (
        "import sys, radixkv.cache.flat_hash.cache as f; f.FlatHashCache(16).acquire(range(64));"
        "assert not {'cbor2', 'xxhash', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("algorithm", "library"), [("xxhash", "xxhash"), ("xxhash_cbor", "cbor2"), ("sha256_cbor", "cbor2")]
)
def test_a_missing_library_names_the_extra(monkeypatch, algorithm, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install radixkv\[hashes\]"):
        BlockHasher(algorithm, 16)


def test_tokens_are_hashed_as_plain_ints():
    hasher = BlockHasher("sha256", 4)
    seen = []
    digest, hasher.digest = hasher.digest, lambda value: seen.append(value) or digest(value)
    list(hasher.chain(hasher.seed, pack(np.arange(8))))
    assert [tokens for _, tokens, _ in seen] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {type(token) for _, tokens, _ in seen for token in tokens} == {int}
