"""Checks of single JSON values that every reader needs, with errors that name the field."""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from radixkv.traces.problems import BadRecord

# More than any model takes; without a bound one line could ask for a terabyte of tokens.
MAX_TOKENS = 2**24

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)


def length_of(value: Any, name: str) -> int:
    """Returns a number of tokens in 0 .. MAX_TOKENS. Raises BadRecord."""
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise BadRecord(f"{name}: expected an integer in 0..{MAX_TOKENS}, got {shown(value)}")
    return value


def label_of(value: Any, name: str) -> str | None:
    """Returns an id or session as text, None if there is none. Raises BadRecord for anything but text and integers."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise BadRecord(f"{name}: expected a string or an integer, got {kind(value)}")


def seconds_of(value: Any, name: str, unit_s: float = 1.0) -> float | None:
    """Returns a time in seconds, None if there is none.

    Args:
        value: a finite number, text that spells one, or ISO 8601 text (without an offset: UTC; counted from 1970).
        unit_s: seconds per unit of a number.

    Raises:
        BadRecord: anything else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if type(value) in (int, float):
        try:
            seconds = value * unit_s
        except OverflowError:
            seconds = math.inf
        if math.isfinite(seconds):
            return float(seconds)
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            pass
    raise BadRecord(f"{name}: expected a finite number or an ISO 8601 time, got {shown(value)}")


def kind(value: Any) -> str:
    """Names the JSON type of a value for an error."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """Shows a value in an error, at most 40 characters of it, ASCII; of lists and objects only what they are."""
    if value is None or isinstance(value, dict | list):
        return kind(value)
    if type(value) is int and value.bit_length() > 128:
        return "a huge integer"
    text = ascii(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def shown_keys(value: Mapping[str, Any]) -> str:
    """Shows the first keys of an object in an error."""
    return "the keys " + ", ".join(shown(key) for key in list(value)[:8]) if value else "an empty object"


def check_text(text: str, name: str) -> str:
    """Returns `text`. Raises BadRecord if it holds a lone surrogate, which no tokenizer can encode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"{name}: character {error.start} is a lone surrogate, which is no text") from None
    return text
