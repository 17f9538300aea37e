"""Media are told apart by their bytes, whatever JSON stands around them."""

import base64
import itertools
import random

import pytest

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import Media
from radixkv.traces import TraceError, open_trace
from tests.traces.trace_files import write_lines

PICTURE = bytes(range(256)) * 3 + b"\xff\xfe"  # + and / in base64, and padding
OTHER = PICTURE[:-1]
URL = "https://example.com/a.png"


def encoded(data):
    return base64.b64encode(data).decode()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{encoded(data)}"


# Ways to write the same bytes as a part of a message's content.
WRAPPINGS = [
    lambda data: {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}},
    lambda data: {"image_url": {"detail": "high", "url": data_url(data, "image/jpeg")}, "type": "image_url"},
    lambda data: {"type": "image_url", "image_url": data_url(data), "cache_control": {"type": "ephemeral"}},
    lambda data: {"type": "input_image", "image_url": data_url(data), "detail": "auto"},
    lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}},
    lambda data: {
        "type": "image",
        "source": {"data": encoded(data), "media_type": "image/gif", "type": "base64"},
        "cache_control": {"type": "ephemeral"},
    },
    lambda data: {"type": "document", "source": {"type": "base64", "data": encoded(data)}},
    lambda data: {"type": "image", "data": encoded(data), "mimeType": "image/png"},
    lambda data: {"type": "image", "image": data_url(data)},
    lambda data: {"type": "image", "image": {"bytes": encoded(data)}},
    lambda data: {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}},
    lambda data: {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}},
    lambda data: {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), "filename": "a.pdf"}},
    lambda data: {"type": "input_file", "file_data": encoded(data), "filename": "b.pdf"},
    lambda data: {"type": "video", "video": base64.urlsafe_b64encode(data).decode().rstrip("=")},
    lambda data: {"type": "image", "image": base64.encodebytes(data).decode()},  # broken into lines
    lambda data: {"type": "image_url", "image_url": {"url": "data:," + "".join(f"%{byte:02x}" for byte in data)}},
]
ADDRESSES = [
    lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    lambda url: {"type": "input_image", "image_url": url},
    lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    lambda url: {"type": "image", "image": url, "cache_control": {}},
    lambda url: {"type": "input_file", "file_url": url},
]


def digests(path, parts):
    """The digest of each part, in a message of its own; nothing about them is left unread."""
    trace = open_trace(write_lines(path, *({"messages": [{"role": "user", "content": [part]}]} for part in parts)))
    found = []
    for request in trace:
        (media,) = request.namespace
        assert isinstance(media, Media)
        found.append(media.digest)
    assert trace.counts.unread == {}
    return found


def test_the_same_bytes_are_the_same_however_they_are_wrapped(tmp_path):
    first = digests(tmp_path / "t", [wrap(PICTURE) for wrap in WRAPPINGS])
    second = digests(tmp_path / "t", [wrap(OTHER) for wrap in WRAPPINGS])
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    images = [{"messages": [{"role": "user", "content": "", "images": [encoded(PICTURE)]}]}]
    ((of_ollama,),) = (r.namespace for r in open_trace(write_lines(tmp_path / "t", *images)))
    assert of_ollama.digest == first[0]


def test_one_bit_of_a_picture(tmp_path):
    rng = random.Random(2)
    for length in (1, 2, 3, 50):
        data = rng.randbytes(length)
        at = rng.randrange(length)
        changed = bytes([*data[:at], data[at] ^ 1 << rng.randrange(8), *data[at + 1 :]])
        wraps = rng.sample(WRAPPINGS, 2)
        same, other = (digests(tmp_path / "t", [wrap(each) for wrap in wraps]) for each in (data, changed))
        assert same[0] == same[1] and other[0] == other[1] != same[0]


def test_addresses_stand_for_themselves(tmp_path):
    found = digests(tmp_path / "t", [wrap(url) for url in (URL, URL + "?v=2") for wrap in ADDRESSES])
    assert len(set(found[:5])) == len(set(found[5:])) == 1 and found[0] != found[5]
    files = [{"type": "file", "file": {"file_id": name}} for name in ("file-1", "file-2")]
    files += [{"type": "image", "source": {"type": "file", "file_id": "file-1"}}]
    one, two, again = digests(tmp_path / "t", files)
    assert one == again != two
    # The bytes of a picture that happen to spell an address are not that address.
    assert digests(tmp_path / "t", [WRAPPINGS[0](URL.encode())])[0] not in found


def test_a_conversation_hits_its_picture_in_another_wrapping(tmp_path):
    def request(at):
        part = WRAPPINGS[at](PICTURE)
        return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it? " * 50}]}]}

    for one, other in itertools.permutations(range(4), 2):
        replay = Replay(CacheConfig("radix", 1))
        hits = [
            replay.feed(r.prompt, b"", r.namespace)
            for r in open_trace(write_lines(tmp_path / "t", request(one), request(other)))
        ]
        assert hits[1] == replay.num_prompt_tokens // 2 - 1 > 600


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image"}, "expected its data, url or file_id, got the keys 'type'"),
        ({"type": "image_url", "image_url": {}}, "expected its data, url or file_id, got an empty object"),
        ({"type": "image_url", "image_url": {"url": ""}}, "expected base64 data or a url, got no text"),
        ({"type": "image_url", "image_url": 5}, "expected base64 data or a url, got a number"),
        ({"type": "image", "source": {"type": "base64", "data": [1]}}, "expected base64 data or a url, got a list"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}, "expected base64 data, got 'data:"),
    ],
)
def test_media_without_bytes_or_address(tmp_path, part, reason):
    path = write_lines(tmp_path / "t", {"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(TraceError, match=rf"line 1: messages\[0\]\.content\[0\].*: {reason}"):
        list(open_trace(path))


@pytest.mark.parametrize(
    "value", ["\ud800", "data:\ud800,\udfff", "data:;base64,\ud800", "data:,%zz", "A", "====", "data:;base64,"]
)
def test_odd_text_where_a_picture_is_expected(tmp_path, value):
    """A digest or a TraceError, never anything else."""
    for part in ({"type": "image", "image": value}, {"type": "image_url", "image_url": value}):
        path = write_lines(tmp_path / "t", {"messages": [{"role": "user", "content": [part]}]})
        assert len(list(open_trace(path, skip_bad=True))) < 2


@pytest.mark.parametrize(
    ("one", "other"),
    [("img001", "img002"), ("img/01", "img/02"), ("clips/a1", "clips/a 1"), ("a-1", "a+1"), ("a", "a=")],
)
@pytest.mark.parametrize("key", ["image", "image_url", "video"])
def test_names_that_could_be_base64_are_told_apart(tmp_path, one, other, key):
    """Both decode to the same bytes where the last character's unused bits, blanks and the alphabet don't count."""
    found = digests(tmp_path / "t", [{"type": key, key: name} for name in (one, other)])
    assert len(set(found)) == 2


def test_text_that_encodes_nothing_exactly_is_a_name(tmp_path):
    data = encoded(bytes(range(100)))  # ends with "Yw==": the unused bits of "w" are 0
    other = data.replace("Yw==", "Yx==")
    assert (
        len(set(digests(tmp_path / "t", [{"type": "image", "source": {"data": text}} for text in (data, other)]))) == 2
    )
