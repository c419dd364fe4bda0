"""Searches the output of a process for secrets, for tests that capture it."""

import base64
import json
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus


def leaks(text: str, secrets: Mapping[str, str]) -> list[str]:
    """Lines of `text` that contain one of `secrets` (name -> value), plain or encoded. Values are not repeated."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in secrets.items():
            assert len(value) >= 6, f"{name} is too short to be searched for"
            found += [f"line {number} holds {name} ({form})" for form, shape in disguises(value) if shape in line]
    return found


def disguises(value: str) -> Iterator[tuple[str, str]]:
    """The encodings of a value in URLs, JSON, reprs and headers, without duplicates."""
    shapes = {
        value: "plain",
        quote(value, safe=""): "percent-encoded",
        quote_plus(value): "form-encoded",
        json.dumps(value)[1:-1]: "in JSON",
        repr(value)[1:-1]: "in a repr",
        base64.b64encode(value.encode()).decode().rstrip("="): "base64",
        value.encode().hex(): "hex",
    }
    seen: set[str] = set()
    for shape, form in [(value, "plain"), *shapes.items()]:
        if shape not in seen:
            seen.add(shape)
            yield form, shape
