"""API keys: valid ones survive parsing, mistyped ones are distinguished from malformed ones, no error repeats a key."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rota.model.errors import Unauthenticated
from rota.model.identity.api_key_format import (
    ALPHABET,
    ENTROPY_BYTES,
    SECRET_CHARS,
    key_from_headers,
    new_key,
    parse_key,
    without_secret,
)

KEYS = st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES).map(new_key)


def refused(call, *args):
    with pytest.raises(Unauthenticated) as error:
        call(*args)
    assert error.value.code == "unauthenticated"
    return error.value


@given(KEYS)
def test_key_survives_text(key):
    assert parse_key(key.text) == key
    assert key.text.startswith(f"rota_{key.id}_")
    assert without_secret(key.text) == without_secret(key.id) == key.id


@given(KEYS)
def test_only_the_text_of_a_key_contains_its_secret(key):
    secret = key.text.rpartition("_")[2]
    assert secret not in repr(key)
    assert secret not in str(key)
    assert secret not in without_secret(key.text)


@given(st.sets(st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES), min_size=2, max_size=2))
def test_secret_keeps_all_entropy(entropies):
    one, other = (entropy[-20:] for entropy in entropies)
    assume(one != other)
    secrets = {new_key(bytes(7) + entropy).text for entropy in (one, other)}
    assert len(secrets) == 2
    assert SECRET_CHARS * 5 >= 128


@given(KEYS, st.data())
def test_key_with_one_wrong_character_is_refused_as_mistyped(key, data):
    index = data.draw(st.integers(len("rota_"), len(key.text) - 1))
    letter = data.draw(st.sampled_from(ALPHABET + "ilouA_ ").filter(lambda letter: letter != key.text[index]))
    assert refused(parse_key, key.text[:index] + letter + key.text[index + 1 :]).facts == {"reason": "mistyped"}


@given(KEYS, st.data())
def test_key_with_two_swapped_characters_is_refused_as_mistyped(key, data):
    index = data.draw(st.integers(len("rota_"), len(key.text) - 2))
    one, two = key.text[index : index + 2]
    assume(one != two)
    assert refused(parse_key, key.text[:index] + two + one + key.text[index + 2 :]).facts == {"reason": "mistyped"}


@given(KEYS, st.data())
def test_truncated_key_is_refused_as_mistyped(key, data):
    end = data.draw(st.integers(len("rota_"), len(key.text) - 1))
    error = refused(parse_key, key.text[:end])
    assert error.facts == {"reason": "mistyped"}


@given(st.text(max_size=80))
def test_other_text_is_refused_as_malformed_and_not_repeated(text):
    assume(not text.startswith("rota_"))
    error = refused(parse_key, text)
    assert error.facts == {"reason": "malformed"}
    assert error.sentence.count("\n") == 0
    assert refused(parse_key, f"x{text}{'q' * 20}").sentence == error.sentence


@given(KEYS, st.sampled_from(["Bearer ", "bearer ", "BEARER  "]))
def test_key_is_accepted_in_either_header(key, scheme):
    assert key_from_headers(f"{scheme}{key.text}", None) == key.text
    assert key_from_headers(None, f" {key.text} ") == key.text
    assert key_from_headers(f"{scheme}{key.text}", key.text) == key.text


@given(KEYS, KEYS)
def test_headers_without_exactly_one_key_are_refused_and_not_repeated(key, other):
    assume(key != other)
    assert refused(key_from_headers, None, None).facts == {"reason": "missing"}
    for headers in ((f"Basic {key.text}", None), (key.text, None), (f"Bearer {key.text}", other.text), ("", None)):
        error = refused(key_from_headers, *headers)
        assert error.facts == {"reason": "malformed"}
        assert key.id not in error.sentence
