"""The contract in the header of a Lua file, and the Lua generated from it.

    -- script: release
    -- use common
    -- key sub      hash  acct:sub:{show}:{alloc}   int_cores, int_gpus (cores, two decimals at most)
    -- key tokens   hash  acct:tokens:{show}        token -> what it holds
    -- arg token    str
    -- reply released seq:int | absent              absent: released before, nothing changed

The header is the comment block at the top of the file; it ends at the first line that is not a comment. Each line
begins with one of the five keywords, or is prose, indented by two spaces or more. The rest of the line is a comment
after a key's pattern, after an argument's type and, separated by two spaces, after a reply's last field. Several
`reply` lines add up.

`-- use common` includes the definitions of `common.lua` from the same folder. That file contains functions and
constants, may refer to the script's keys and arguments, and has comments only on lines of their own. A key's pattern
may list alternatives, separated by `|`.

A star after the name (`-- key sub* hash …`, `-- arg token* str`) makes the last key or the last argument a list. There
is at most one of each, because KEYS and ARGV have no other boundary; further lists go into one `packed` argument.

    type      in an argument                                in a reply
    int       within ±2^53, the exact range of a Lua number a whole number; Redis truncates fractions
    float     a Lua number                                  a string, because Redis truncates fractions
    bool      true or false                                 1 or 0
    str       UTF-8                                         UTF-8
    bytes     as it is                                      as it is
    packed    msgpack; strings and numbers, no bytes        cmsgpack.pack of anything
    t*                                                      an array of t

Line n of the text sent to Redis is line n of the file, so that Redis's error messages name the right line: the locals
are declared on line 1, in place of the script's name. An invalid header raises `SyntaxError` with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

import msgspec

TYPES: Final = ("int", "float", "bool", "str", "bytes", "packed")
KINDS: Final = ("string", "hash", "list", "set", "zset", "stream")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = re.compile(
    "and|break|do|else|elseif|end|false|for|function|if|in|local|nil|not|or|repeat|return|then|true|until|while"
    "|assert|bit|cjson|cmsgpack|error|ipairs|math|next|pairs|pcall|redis|select|string|struct|table|tonumber|tostring"
    "|type|unpack"
)


class ScriptKey(msgspec.Struct, frozen=True):
    name: str
    many: bool
    kind: str
    pattern: str


class ScriptArg(msgspec.Struct, frozen=True):
    name: str
    many: bool
    type: str


class ReplyField(msgspec.Struct, frozen=True):
    name: str
    many: bool
    type: str


class ScriptReply(msgspec.Struct, frozen=True):
    tag: str
    fields: tuple[ReplyField, ...]


class ScriptContract(msgspec.Struct, frozen=True):
    script: str
    keys: tuple[ScriptKey, ...]
    args: tuple[ScriptArg, ...]
    replies: tuple[ScriptReply, ...]
    uses: tuple[str, ...] = ()


class ContractLine(msgspec.Struct, frozen=True):
    """One line of a header, with its position for error messages."""

    source: str
    number: int
    text: str

    def fail(self, why: str) -> NoReturn:
        raise SyntaxError(why, (self.source, self.number, 1, self.text))


def parse_contract(text: str, source: str) -> ScriptContract:
    """Parse the header of the Lua file `source`."""
    first = ContractLine(source, 1, text.partition("\n")[0])
    script = first.text.removeprefix("-- script: ")
    if script == first.text or not _NAME.fullmatch(script):
        first.fail("the first line must be '-- script: name', in lower case")
    keys: list[ScriptKey] = []
    args: list[ScriptArg] = []
    replies: list[ScriptReply] = []
    uses: list[str] = []
    for line, keyword, rest in _declarations(text, source):
        match keyword:
            case "use":
                uses.append(_name(line, rest)[0])
            case "key":
                keys.append(_key(line, rest))
            case "arg":
                args.append(_arg(line, rest))
            case "reply":
                replies.extend(_replies(line, rest))
            case _:
                line.fail(f"'{keyword}' is not a keyword of a header: use, key, arg, reply; indent prose by two spaces")
        _check_lists(line, keys, args)
        _check_names(line, [*(key.name for key in keys), *(arg.name for arg in args)])
        _check_names(line, [reply.tag for reply in replies])
    if not replies:
        first.fail("the header declares no reply")
    return ScriptContract(script, tuple(keys), tuple(args), tuple(replies), tuple(uses))


def render_lua(header: ScriptContract, text: str, libraries: Sequence[str] = ()) -> str:
    """The text sent to Redis: the file, with locals and used libraries in place of line 1."""
    return " ".join([_locals(header), *map(_join_lines, libraries)]) + text[text.index("\n") :]


def _join_lines(library: str) -> str:
    lines = [line.strip() for line in library.split("\n")]
    return " ".join(line for line in lines if line and not line.startswith("--"))


def _declarations(text: str, source: str) -> Iterator[tuple[ContractLine, str, str]]:
    for number, raw in enumerate(text.split("\n")[1:], start=2):
        if not raw.startswith("--"):
            return
        if raw.rstrip() == "--" or raw.startswith("--  "):
            continue
        keyword, _, rest = raw.removeprefix("--").strip().partition(" ")
        yield ContractLine(source, number, raw), keyword, rest.strip()


def _key(line: ContractLine, rest: str) -> ScriptKey:
    parts = rest.split(maxsplit=3)
    if len(parts) < 3:
        line.fail("a key needs a name, a type and a pattern: '-- key tokens hash acct:tokens:{show}'")
    name, many = _name(line, parts[0])
    if parts[1] not in KINDS:
        line.fail(f"'{parts[1]}' is not a type of key: {', '.join(KINDS)}")
    return ScriptKey(name, many, parts[1], parts[2])


def _arg(line: ContractLine, rest: str) -> ScriptArg:
    parts = rest.split(maxsplit=2)
    if len(parts) < 2:
        line.fail("an argument needs a name and a type: '-- arg token str'")
    name, many = _name(line, parts[0])
    return ScriptArg(name, many, _type(line, parts[1]))


def _replies(line: ContractLine, rest: str) -> Iterator[ScriptReply]:
    declared = re.split(r" {2,}", rest, maxsplit=1)[0]
    for alternative in declared.split("|"):
        tag, *fields = alternative.split() or [""]
        name, many = _name(line, tag)
        if many:
            line.fail("a star belongs to a field's type")
        reply = ScriptReply(name, tuple(_field(line, field) for field in fields))
        _check_names(line, [field.name for field in reply.fields])
        yield reply


def _field(line: ContractLine, text: str) -> ReplyField:
    name, colon, kind = text.partition(":")
    if not colon:
        line.fail(f"'{text}' has no type: write '{text}:int', and separate prose by two spaces")
    return ReplyField(_name(line, name)[0], kind.endswith("*"), _type(line, kind.removesuffix("*")))


def _name(line: ContractLine, text: str) -> tuple[str, bool]:
    name = text.removesuffix("*")
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        line.fail(f"'{name}' cannot be a name: lower-case letters, digits, '_', and not reserved in Lua or Redis")
    return name, name != text


def _type(line: ContractLine, text: str) -> str:
    if text not in TYPES:
        line.fail(f"'{text}' is not a type: {', '.join(TYPES)}")
    return text


def _check_lists(line: ContractLine, keys: list[ScriptKey], args: list[ScriptArg]) -> None:
    if any(key.many for key in keys[:-1]) or any(arg.many for arg in args[:-1]):
        line.fail("only the last key and the last argument can be a list; send more lists in one packed argument")


def _check_names(line: ContractLine, names: list[str]) -> None:
    duplicates = [name for at, name in enumerate(names) if name in names[:at]]
    if duplicates:
        line.fail(f"'{duplicates[0]}' is declared twice")


def _locals(header: ScriptContract) -> str:
    lines = [_local(key.name, "KEYS", at, key.many, "bytes") for at, key in enumerate(header.keys, start=1)]
    lines += [_local(arg.name, "ARGV", at, arg.many, arg.type) for at, arg in enumerate(header.args, start=1)]
    return " ".join(lines)


def _local(name: str, array: str, at: int, many: bool, kind: str) -> str:
    if not many:
        return f"local {name}={_value(f'{array}[{at}]', kind)}"
    # A loop, because unpack() fails above about 8,000 values.
    return f"local {name}={{}} for _i={at},#{array} do {name}[_i-{at - 1}]={_value(f'{array}[_i]', kind)} end"


def _value(expression: str, kind: str) -> str:
    match kind:
        case "int" | "float":
            return f"tonumber({expression})"
        case "bool":
            return f"({expression}=='1')"
        case "packed":
            return f"cmsgpack.unpack({expression})"
    return expression
