"""Media in messages, told apart by their bytes, whatever JSON stands around them.

Understood: `data:` URLs and other URLs in OpenAI's `image_url`, `input_image`, `input_audio`, `file`, base64 and URL
sources of Anthropic, Ollama's `images`, and parts that hold the data, URL or file id under the name of their type.
"""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from radixkv.traces.fields import Fields
from radixkv.traces.keys import MEDIA
from radixkv.traces.problems import BadRecord
from radixkv.traces.values import kind, shown, shown_keys

MEDIA_TYPES = (
    *("image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video_url", "video", "input_video"),
    *("file", "input_file", "document"),
)
# Where a part keeps what it shows, from the outside in; names and addresses stand for bytes that are not there.
_HOLDERS = ("source", "image_url", "input_audio", "audio_url", "video_url", "image", "audio", "video", "file")
_DATA = ("data", "file_data", "bytes", "base64")
_NAMES = ("url", "file_url", "uri", "path", "file_id", "fileId")
_LEAST_DATA = 64
"""Shorter texts under the name of a type are names: the smallest PNG has 67 bytes, and "img001" would decode too."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, recording or file in a message, known by the digest of its bytes, or of its address."""

    digest: str


def media_part(part: Fields) -> MediaPart:
    """Finds what a part shows.

    Raises:
        BadRecord: neither data nor an address in it.
    """
    for key in (*_HOLDERS, *_DATA, *_NAMES):
        if key in part:
            value = part.value[key]
            if isinstance(value, dict):
                return media_part(part.inside(key, MEDIA))
            return media_of(part.get(key), part.path(key), is_data=None if key in _HOLDERS else key in _DATA)
    raise BadRecord(f"{part.name}: expected its data, url or file_id, got {shown_keys(part.value)}")


def media_of(value: Any, name: str, *, is_data: bool | None = None) -> MediaPart:
    """Digests data in base64, a URL, or a name.

    Args:
        value: decoded JSON; a `data:` URL is its data.
        name: what errors call it.
        is_data: whether it is base64 where it can be; else it is a name. None: where it can be and is long.

    Raises:
        BadRecord: no text, or none in it.
    """
    if not isinstance(value, str) or not value:
        raise BadRecord(f"{name}: expected base64 data or a url, got {'no text' if value == '' else kind(value)}")
    text = value.encode("utf-8", "surrogatepass")
    scheme, _, rest = text.partition(b":")
    if scheme.lower() == b"data" and b"," in rest:
        described, _, quoted = rest.partition(b",")
        data = unquote_to_bytes(quoted)
        found = _base64(data) if described.lower().endswith(b";base64") else data
        if found is None:
            raise BadRecord(f"{name}: expected base64 data, got {shown(value)}")
    else:
        is_data = len(text) >= _LEAST_DATA if is_data is None else is_data
        found = _base64(text) if is_data and b"://" not in text else None
        if found is None:
            found = b"name:" + text
    return MediaPart(hashlib.sha256(found).hexdigest()[:32])


def _base64(data: bytes) -> bytes | None:
    """Returns what is encoded, of either alphabet, broken into lines or not, padded or not; None where nothing is.

    Two texts that encode the same differ in nothing else: the unused bits of the last character are 0.
    """
    packed = b"".join(data.split()).translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    try:
        found = base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except binascii.Error:
        return None
    return found if base64.b64encode(found).rstrip(b"=") == packed else None
