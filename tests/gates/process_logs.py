"""Whether a secret got into what a process wrote: for the tests that run one and keep its output."""

import base64
import json
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus


def leaks(text: str, secrets: Mapping[str, str]) -> list[str]:
    """Where `text` holds one of `secrets` (name -> value), plain or in disguise. The value is never repeated."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in secrets.items():
            assert len(value) >= 6, f"{name} is too short to be searched for"
            found += [f"line {number} holds {name} ({form})" for form, shape in disguises(value) if shape in line]
    return found


def disguises(value: str) -> Iterator[tuple[str, str]]:
    """The shapes in which a value travels through URLs, JSON, reprs and headers; equal ones once."""
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
