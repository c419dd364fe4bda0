"""Media types for schemathesis: how NDJSON and msgpack bodies are encoded and decoded. Loaded by SCHEMATHESIS_HOOKS."""

import json

import msgspec
import schemathesis
from hypothesis import strategies as st

SUBMISSIONS = st.fixed_dictionaries(
    {"show": st.sampled_from(["film", "", "none"]), "layers": st.just([{"task": "noop"}])},
    optional={"name": st.text(), "labels": st.dictionaries(st.text(), st.text()), "priority": st.integers()},
).map(lambda each: json.dumps(each).encode())
BODIES = st.lists(st.one_of(SUBMISSIONS, st.binary()), max_size=3).map(b"\n".join)

schemathesis.openapi.media_type("application/x-ndjson", BODIES)


@schemathesis.serializer("application/msgpack")
def packed(_context, value):
    return {"data": value if isinstance(value, bytes) else msgspec.msgpack.encode(_packable(value))}


@schemathesis.deserializer("application/msgpack")
def unpacked(_context, response):
    return msgspec.msgpack.decode(response.content)


def _packable(value):
    """Integers beyond the msgpack range become floats."""
    match value:
        case dict():
            return {str(key): _packable(each) for key, each in value.items()}
        case list():
            return [_packable(each) for each in value]
        case int() if not -(2**63) <= value < 2**64:
            return float(value) if abs(value) < 2**1000 else "a very large number"
    return value
