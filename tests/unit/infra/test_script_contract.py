"""Contracts in the headers of Lua scripts, checked against Python calls and replies. Needs no server."""

from enum import IntEnum, StrEnum
from pathlib import Path

import msgspec
import pytest

import rota
from rota.infra.redis import Script
from rota.infra.redis.keys import PATTERNS
from rota.infra.redis.script_contract import (
    ReplyField,
    ScriptArg,
    ScriptContract,
    ScriptKey,
    ScriptReply,
    parse_contract,
    render_lua,
)

RELEASE = """\
-- script: release
-- key sub      hash  acct:sub:{show}:{alloc}   int_cores, int_gpus (cores, two decimals at most)
-- key tokens   hash  acct:tokens:{show}        token -> what it holds
--     A line of prose about the keys.
-- arg token    str
-- reply released seq:int | absent              absent: released before, nothing changed

return {'absent'}
"""


class Released(msgspec.Struct, frozen=True):
    seq: int


class Absent(msgspec.Struct, frozen=True):
    pass


class Done(msgspec.Struct, frozen=True):
    n: int


class Fruit(StrEnum):
    APPLE = "apple"


class Size(IntEnum):
    BIG = 7


def header(*lines):
    return "\n".join(["-- script: sample", *lines, "return {}"])


def encode_call(*lines, **values):
    text = header(*lines, "-- reply absent")
    return Script(text, "sample.lua", replies=Absent)._arguments.encode(values)


def test_contract_of_the_style_guide_example_is_parsed():
    assert parse_contract(RELEASE, "release.lua") == ScriptContract(
        "release",
        keys=(
            ScriptKey("sub", False, "hash", "acct:sub:{show}:{alloc}"),
            ScriptKey("tokens", False, "hash", "acct:tokens:{show}"),
        ),
        args=(ScriptArg("token", False, "str"),),
        replies=(ScriptReply("released", (ReplyField("seq", False, "int"),)), ScriptReply("absent", ())),
    )


def test_rendered_script_keeps_its_lines_and_declares_locals_on_the_first():
    source = render_lua(parse_contract(RELEASE, "release.lua"), RELEASE).split("\n")
    assert source[0] == "local sub=KEYS[1] local tokens=KEYS[2] local token=ARGV[1]"
    assert source[1:] == RELEASE.split("\n")[1:]


@pytest.mark.parametrize(
    ("lines", "at", "complaint"),
    [
        (["-- keys sub hash a:b", "-- reply done"], 2, "'keys' is not a keyword of a header"),
        (["-- key sub hash", "-- reply done"], 2, "needs a name, a type and a pattern"),
        (["-- key sub table a:b", "-- reply done"], 2, "'table' is not a type of key"),
        (["-- arg token", "-- reply done"], 2, "needs a name and a type"),
        (["-- arg token string", "-- reply done"], 2, "'string' is not a type"),
        (["-- arg Token str", "-- reply done"], 2, "'Token' cannot be a name"),
        (["-- arg end int", "-- reply done"], 2, "'end' cannot be a name"),
        (["-- arg redis int", "-- reply done"], 2, "'redis' cannot be a name"),
        (["-- arg n int", "-- key n hash a:b", "-- reply done"], 3, "'n' is declared twice"),
        (["-- arg n* int", "-- arg m int", "-- reply done"], 3, "only the last"),
        (["-- key n* hash a:b", "-- key m hash a:c", "-- reply done"], 3, "only the last"),
        (["-- reply done | done seq:int"], 2, "'done' is declared twice"),
        (["-- reply done seq:int seq:int"], 2, "'seq' is declared twice"),
        (["-- reply done seq"], 2, "'seq' has no type"),
        (["-- reply done seq:number"], 2, "'number' is not a type"),
        (["-- reply done | "], 2, "cannot be a name"),
        (["-- reply done*"], 2, "a star belongs"),
        (["-- arg n int"], 1, "declares no reply"),
    ],
)
def test_wrong_header_is_refused_with_file_and_line(lines, at, complaint):
    with pytest.raises(SyntaxError, match=complaint) as refused:
        parse_contract(header(*lines), "rota/accounting/sample.lua")
    assert (refused.value.filename, refused.value.lineno) == ("rota/accounting/sample.lua", at)


@pytest.mark.parametrize("first", ["local n = 1", "--script: sample", "-- script: ", "-- script: Two Words", ""])
def test_script_without_its_name_on_the_first_line_is_refused(first):
    with pytest.raises(SyntaxError, match="the first line must be") as refused:
        parse_contract(first + "\n-- reply done\n", "sample.lua")
    assert refused.value.lineno == 1


def test_header_ends_at_the_first_line_without_a_comment():
    text = header("-- reply done", "", "-- key to success: this is prose")
    assert parse_contract(text, "sample.lua").keys == ()


def test_keys_are_sent_before_arguments_and_lists_at_their_ends():
    lines = ("-- arg names* str", "-- key first string a", "-- key rest* string b")
    assert encode_call(*lines, rest=["k2", b"k3"], first="k1", names=("n1", "n2")) == [3, "k1", "k2", b"k3", "n1", "n2"]


def test_each_type_is_encoded_as_declared():
    lines = ("-- arg i int", "-- arg f float", "-- arg b bool", "-- arg s str", "-- arg y bytes", "-- arg p packed")
    sent = encode_call(*lines, i=Size.BIG, f=2, b=True, s=Fruit.APPLE, y=b"\xff", p={"rows": [[1, "a"]]})
    assert sent == [0, 7, 2.0, b"1", "apple", b"\xff", msgspec.msgpack.encode({"rows": [[1, "a"]]})]
    assert type(sent[1]) is int  # redis-py would send the repr of an IntEnum


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("-- arg n int", "1"),
        ("-- arg n int", True),
        ("-- arg n int", 1.0),
        ("-- arg n int", None),
        ("-- arg n int", 2**53 + 1),
        ("-- arg n int", -(2**53) - 1),
        ("-- arg n float", float("nan")),
        ("-- arg n float", "1"),
        ("-- arg n bool", 1),
        ("-- arg n str", b"bytes"),
        ("-- arg n bytes", "text"),
        ("-- arg n* str", "text"),
        ("-- arg n* int", [1, "2"]),
        ("-- key n string a", 5),
        ("-- key n* string a", "one"),
    ],
)
def test_value_of_the_wrong_type_is_refused_before_sending(line, value):
    with pytest.raises(TypeError, match="script sample: n must be"):
        encode_call(line, n=value)


def test_refused_value_is_not_repeated_in_the_error():
    with pytest.raises(TypeError) as refused:
        encode_call("-- arg password bytes", password="hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("given", [{}, {"n": 1, "m": 2}, {"m": 1}])
def test_call_with_missing_or_unknown_names_is_refused(given):
    with pytest.raises(TypeError, match=r"script sample takes \['n'\]: missing \[.*\], unknown \["):
        encode_call("-- arg n int", **given)


class Mutable(msgspec.Struct):
    seq: int


class Everything(msgspec.Struct, frozen=True):
    i: int
    f: float
    b: bool
    s: str
    y: bytes
    p: dict[str, tuple[int, ...]]
    fruit: Fruit
    size: Size
    names: tuple[str, ...]


EVERYTHING = "-- reply everything i:int f:float b:bool s:str y:bytes p:packed fruit:str size:int names:str*"


def decode_reply(line, replies, reply):
    return Script(header(line), "sample.lua", replies=replies)._replies.decode(reply)


def test_reply_becomes_the_struct_of_its_tag():
    line = "-- reply released seq:int | absent"
    assert decode_reply(line, Released | Absent, [b"released", 4]) == Released(4)
    assert decode_reply(line, Released | Absent, [b"absent"]) == Absent()


def test_every_reply_type_is_decoded():
    packed = msgspec.msgpack.encode({"a": [1, 2]})
    reply = [b"everything", 1, b"0.25", 1, "é".encode(), b"\xff", packed, b"apple", 7, [b"x", b"y"]]
    assert decode_reply(EVERYTHING, Everything, reply) == Everything(
        1, 0.25, True, "é", b"\xff", {"a": (1, 2)}, Fruit.APPLE, Size.BIG, ("x", "y")
    )


@pytest.mark.parametrize(
    "reply",
    [None, b"released", [], [b"other"], [b"released"], [b"released", b"4"], [b"released", 4, 5], [b"absent", 1]],
)
def test_reply_outside_the_contract_fails_an_assertion(reply):
    with pytest.raises(AssertionError, match="script sample answered"):
        decode_reply("-- reply released seq:int | absent", Released | Absent, reply)


@pytest.mark.parametrize(
    ("line", "replies", "complaint"),
    [
        ("-- reply released seq:int | absent", Released, "the caller expects"),
        ("-- reply absent", Released | Absent, "the caller expects"),
        ("-- reply released sequence:int", Released, "the fields of Released"),
        ("-- reply released seq:int more:int", Released, "the fields of Released"),
        ("-- reply released seq:str", Released, "Released.seq is not str"),
        ("-- reply released seq:int*", Released, r"Released.seq must be tuple"),
        ("-- reply mutable seq:int", Mutable, "frozen"),
        ("-- reply int", int, "frozen"),
    ],
)
def test_reply_structs_that_differ_from_the_header_are_refused_at_import(line, replies, complaint):
    with pytest.raises(TypeError, match=complaint):
        Script(header(line), "sample.lua", replies=replies)


def test_every_script_has_a_header_and_uses_declared_keys():
    files = sorted(Path(rota.__file__).parent.rglob("*.lua"))
    scripts = [file for file in files if file.read_text().startswith("-- script:")]
    used = set()
    for file in scripts:
        found = parse_contract(file.read_text(), str(file))
        assert found.script == file.stem
        patterns = [pattern for key in found.keys for pattern in key.pattern.split("|")]
        undeclared = [pattern for pattern in patterns if pattern not in PATTERNS]
        assert not undeclared, f"{file}: declare {undeclared} in infra/redis/keys.py"
        used |= {file.with_name(f"{name}.lua") for name in found.uses}
    assert used == set(files) - set(scripts), "every Lua file without a header is used by a script in its folder"


def test_library_of_a_script_runs_before_it_and_keeps_line_numbers():
    library = "-- Why it is there.\nlocal function twice(x)\n  -- Of the script: wanted.\n  return x * wanted\nend\n"
    text = "-- script: sample\n-- use doubling\n-- arg wanted int\n-- reply done n:int\n\nreturn {'done', twice(2)}\n"
    sample = Script(text, "sample.lua", replies=Done, library={"doubling": library}.__getitem__)
    first, *rest = sample.text.split("\n")
    assert first == "local wanted=tonumber(ARGV[1]) local function twice(x) return x * wanted end"
    assert rest == text.split("\n")[1:]
