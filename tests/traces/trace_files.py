"""Small traces for tests: writes lines or a JSON value to a file, and reads a trace back as text."""

import json
from pathlib import Path

from radixkv.cache.tokens import unpack
from radixkv.traces import open_trace


def write_lines(path: Path, *records) -> Path:
    """Writes one JSON value a line; strings and bytes as they are."""
    lines = [
        record if isinstance(record, bytes) else (record if isinstance(record, str) else json.dumps(record)).encode()
        for record in records
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def text_of(packed: bytes) -> str:
    return bytes(unpack(packed).astype("u1")).decode()


def read_texts(path: Path, **options) -> list[tuple[str, str, str]]:
    """Returns (id, prompt, output) of every request, bytes as tokens."""
    return [(r.id, text_of(r.prompt), text_of(r.output)) for r in open_trace(path, **options)]


def conversation(label: str, num_turns: int, **more) -> dict:
    """Returns a conversation whose messages say whose and which they are."""
    messages = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{label} asks {turn}"})
        messages.append({"role": "assistant", "content": f"{label} says {turn}"})
    return {"id": label, "messages": messages, **more}
