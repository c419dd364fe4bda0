"""YAML with line numbers: the only reader of files that people write, in which mistakes are rejected and not ignored.

    reader = YamlReader("policy.yaml")
    for key, value in reader.pairs(parse_yaml(text, "policy.yaml"), "the file"):
        ...
        raise reader.error(value, "what is wrong here, and what to write instead")

The supported subset is mappings, lists and scalars; aliases and tags are rejected, so a file cannot expand or run code,
and depth and size are bounded before anything is stored. Errors have the form `file:line: sentence.`; the first is
raised. Parser errors never quote values, because one of them may be a secret. `YamlFormat` has the limits and wordings
that differ between kinds of files.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from rota.infra.extras import needs_extra
from rota.model.errors import InvalidInput
from rota.model.units import parse_duration

if TYPE_CHECKING:
    from yaml.events import Event

FILE_BYTES_MAX: Final = 1024 * 1024
DEPTH_MAX: Final = 16
STRING_MAX: Final = 1000
LIST_MAX: Final = 10_000
_NULLS: Final = frozenset({"", "~", "null"})
_FLAGS: Final = {"true": True, "yes": True, "false": False, "no": False}
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})", re.ASCII)
_REAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}", re.ASCII)
_ANY_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})", re.ASCII)
_ANY_REAL: Final = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?=[eE]))|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE: Final = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
# Octal, hexadecimal and binary numbers, leading zeros, 1_000, and 12:30, which YAML 1.1 reads as 750.
_AMBIGUOUS_NUMBER: Final = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*(?::[0-5]?[0-9])*(?:\.[0-9_]*)?)", re.ASCII
)
_AMBIGUOUS_WORDS: Final = frozenset({"yes", "no", "on", "off"})
_ERROR_PATH: Final = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.+)`")

T = TypeVar("T")


class YamlFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between kinds of files."""

    error: type[InvalidInput] = InvalidInput
    bytes_max: int = FILE_BYTES_MAX
    depth_max: int = DEPTH_MAX
    streams: bool = False
    """Whether the path may be a pipe or a device, such as /dev/stdin; reading it may block."""
    not_yaml: str = "this is not YAML"
    """Begins the sentence about a syntax error."""
    too_deep: str = "this is nested deeper than {depth_max}"

    def error_at(self, source: str, line: int, sentence: str) -> InvalidInput:
        return self.error(f"{source}:{line}: {sentence}", file=source, line=line)


DEFAULT_FORMAT: Final = YamlFormat()


class YamlNode(msgspec.Struct, frozen=True):
    """One node of the file: a scalar, a list or a mapping."""

    line: int


class ScalarNode(YamlNode, frozen=True):
    text: str
    quoted: bool = False


class ListNode(YamlNode, frozen=True):
    items: tuple[YamlNode, ...]


class MappingNode(YamlNode, frozen=True):
    pairs: tuple[tuple[ScalarNode, YamlNode], ...]


def read_text(path: Path, form: YamlFormat = DEFAULT_FORMAT) -> str:
    """The text of the file; InvalidInput when it cannot be read, is too large, or is not UTF-8."""
    return decode_text(read_bytes(path, form), str(path), form)


def read_bytes(path: Path, form: YamlFormat = DEFAULT_FORMAT) -> bytes:
    """As `read_prefix`; InvalidInput when the file cannot be read."""
    try:
        return read_prefix(path, form)
    except OSError as error:
        raise form.error(
            f"The file {path} cannot be read ({error.strerror}): correct its name or its permissions."
        ) from error


def read_prefix(path: Path, form: YamlFormat) -> bytes:
    """The content; at most one byte more than the limit, so that callers detect larger files. Raises OSError."""
    if not form.streams and path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    with path.open("rb") as stream:
        return stream.read(form.bytes_max + 1)


def check_text_size(text: str, source: str) -> str:
    check_size(text.encode(errors="replace"), source)
    return text


def check_size(content: bytes, source: str, form: YamlFormat = DEFAULT_FORMAT) -> None:
    if len(content) > form.bytes_max:
        line = content[: form.bytes_max].count(b"\n") + 1
        raise form.error_at(source, line, f"the file is larger than {form.bytes_max // 1024} KiB: is it the right one?")


def decode_text(content: bytes, source: str, form: YamlFormat = DEFAULT_FORMAT) -> str:
    check_size(content, source, form)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise form.error_at(source, line, "this is not UTF-8: save the file as UTF-8.") from None


def parse_yaml(text: str, source: str, form: YamlFormat = DEFAULT_FORMAT) -> YamlNode | None:
    """The document in the text; None when it is empty."""
    with needs_extra("cli", f"Reading {source}"):
        import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _TreeBuilder(yaml.parse(text, Loader=loader), source, form).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise form.error_at(source, line, f"{form.not_yaml}: {_without_values(error.problem)}.") from None
    except yaml.YAMLError:
        found = yaml.reader.Reader.NON_PRINTABLE.search(text)
        line = text.count("\n", 0, found.start()) + 1 if found else 1
        sentence = f"{form.not_yaml}: it contains characters that are not allowed."
        raise form.error_at(source, line, sentence) from None


def _without_values(problem: str | None) -> str:
    """The parser's message without quotations from the file longer than a character or an escape."""
    return re.sub(
        r"(['\"])(.*?)\1", lambda quoted: quoted[0] if len(quoted[2]) <= 2 else "'...'", problem or "unreadable"
    )


def error_at_line(source: str, line: int, sentence: str) -> InvalidInput:
    return DEFAULT_FORMAT.error_at(source, line, sentence)


class _TreeBuilder:
    """Builds a tree from the parser's events; stops at the first unsupported one."""

    def __init__(self, events: Iterator[Event], source: str, form: YamlFormat) -> None:
        self._events = events
        self._source = source
        self._form = form

    def document(self) -> YamlNode | None:
        from yaml.events import DocumentStartEvent, StreamEndEvent

        next(self._events)
        if isinstance(next(self._events), StreamEndEvent):
            return None
        found = self._node(next(self._events), 0)
        next(self._events)
        if isinstance(after := next(self._events), DocumentStartEvent):
            raise self._error(after, "a second document begins here: keep one of them")
        return found

    def _node(self, event: Event, depth: int) -> YamlNode:
        from yaml.events import MappingStartEvent, ScalarEvent, SequenceStartEvent

        if depth > self._form.depth_max:
            raise self._error(event, self._form.too_deep.format(depth_max=self._form.depth_max))
        if getattr(event, "anchor", None) is not None:
            raise self._error(event, "anchors and aliases are not supported: write it out")
        if getattr(event, "tag", None) is not None:
            raise self._error(event, "tags are not supported: put a value that begins with ! in quotes")
        line = _event_line(event)
        if isinstance(event, ScalarEvent):
            return ScalarNode(line, event.value, quoted=bool(event.style))
        if isinstance(event, SequenceStartEvent):
            return ListNode(line, tuple(self._node(each, depth + 1) for each in self._until_end()))
        assert isinstance(event, MappingStartEvent)
        return MappingNode(line, tuple(self._pairs(depth)))

    def _pairs(self, depth: int) -> Iterator[tuple[ScalarNode, YamlNode]]:
        for event in self._until_end():
            key = self._node(event, depth + 1)
            if not isinstance(key, ScalarNode):
                raise self._error(event, "a key must be plain text")
            yield key, self._node(next(self._events), depth + 1)

    def _until_end(self) -> Iterator[Event]:
        from yaml.events import MappingEndEvent, SequenceEndEvent

        for event in self._events:
            if isinstance(event, MappingEndEvent | SequenceEndEvent):
                return
            yield event

    def _error(self, event: Event, sentence: str) -> InvalidInput:
        return self._form.error_at(self._source, _event_line(event), f"{sentence}.")


def _event_line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


class YamlReader:
    """Reads typed values from a tree; errors name the line of the wrong value."""

    def __init__(self, source: str) -> None:
        self.source = source

    def error(self, node: YamlNode, sentence: str) -> InvalidInput:
        return error_at_line(self.source, node.line, sentence if sentence[-1] in ".?" else f"{sentence}.")

    def pairs(self, node: YamlNode | None, what: str) -> Iterator[tuple[str, YamlNode]]:
        """Keys and values of a mapping, without duplicates; empty for a missing node."""
        if node is None or is_null(node):
            return
        if not isinstance(node, MappingNode):
            raise self.error(node, f"{what} must be a mapping of names")
        names: set[str] = set()
        for key, value in node.pairs:
            if key.text in names:
                raise self.error(key, f"{key.text[:60]!r} is given twice")
            names.add(key.text)
            yield key.text, value

    def fields(
        self, node: YamlNode | None, what: str, known: Mapping[str, Callable[[YamlNode], Any]]
    ) -> dict[str, Any]:
        """The values of the keys in `known`, converted by their readers; any other key is rejected."""
        found: dict[str, Any] = {}
        for key, value in self.pairs(node, what):
            if key not in known:
                raise self.error(self.key_node(node, key), f"{what} has no {key[:60]!r}{suggestion(key, known)}")
            found[key] = known[key](value)
        return found

    def items(self, node: YamlNode, what: str, most: int = LIST_MAX) -> tuple[YamlNode, ...]:
        if not isinstance(node, ListNode):
            raise self.error(node, f"{what} must be a list")
        if len(node.items) > most:
            raise self.error(node.items[most], f"{what} may have {most} entries at most")
        return node.items

    def string(self, node: YamlNode, most: int = STRING_MAX) -> str:
        """A non-empty text."""
        if not isinstance(node, ScalarNode) or is_null(node) or not node.text.strip():
            raise self.error(node, "a non-empty text is required here")
        if len(node.text) > most or not node.text.replace("\n", " ").isprintable():
            raise self.error(node, f"a text of up to {most} printable characters is required here")
        return node.text.strip()

    def strings(self, node: YamlNode) -> tuple[str, ...]:
        """One text or a list of them."""
        if isinstance(node, ScalarNode):
            return (self.string(node),)
        return tuple(self.string(each) for each in self.items(node, "this value"))

    def integer(self, node: YamlNode, what: str, least: int = 0, most: int = 2**53) -> int:
        text = node.text if isinstance(node, ScalarNode) else ""
        if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
            raise self.error(node, f"{what} is a whole number from {least} to {most}")
        return int(text)

    def duration_s(self, node: YamlNode, what: str, least: float = 0.0, most: float = 366 * 86400.0) -> float:
        """A duration with its unit, in seconds."""
        try:
            seconds = parse_duration(self.string(node))
        except InvalidInput as error:
            raise self.error(node, f"{what}: {error.sentence}") if "file" not in error.facts else error from None
        if not least <= seconds <= most:
            raise self.error(node, f"{what} is a duration from {least:g} s to {most:g} s")
        return seconds

    def boolean(self, node: YamlNode, what: str) -> bool:
        text = node.text.lower() if isinstance(node, ScalarNode) else ""
        if text not in _FLAGS:
            raise self.error(node, f"{what} is true or false")
        return _FLAGS[text]

    def one_of(self, node: YamlNode, what: str, options: Mapping[str, T]) -> T:
        """An option by name, in any case, with - or _."""
        text = self.string(node).lower().replace("-", "_")
        if text not in options:
            raise self.error(node, f"{what} is one of {', '.join(options)}")
        return options[text]

    def to_builtins(self, node: YamlNode, *, strict: bool = False) -> object:
        """The node as JSON-like data.

        `strict` is for data without a schema. It reads every decimal number, and refuses plain text that some YAML
        readers take for a number or boolean and others for text, such as 010 and yes.
        """
        if isinstance(node, MappingNode):
            return {key: self.to_builtins(value, strict=strict) for key, value in self.pairs(node, "this value")}
        if isinstance(node, ListNode):
            return [self.to_builtins(each, strict=strict) for each in node.items]
        assert isinstance(node, ScalarNode)
        if node.quoted:
            return node.text
        if is_null(node):
            return None
        if node.text.lower() in ("true", "false"):
            return node.text.lower() == "true"
        if strict:
            return self._unambiguous(node)
        if _INTEGER.fullmatch(node.text):
            return int(node.text)
        return float(node.text) if _REAL.fullmatch(node.text) else node.text

    def _unambiguous(self, node: ScalarNode) -> int | float | str:
        text = node.text
        if _ANY_INTEGER.fullmatch(text):
            return int(text)
        if _ANY_REAL.fullmatch(text):
            return float(text)
        if text.lower() in _NOT_FINITE:
            return _NOT_FINITE[text.lower()]
        if _AMBIGUOUS_NUMBER.fullmatch(text):
            raise self.error(
                node, f"{text[:60]} is ambiguous: write a plain decimal number, or put it in quotes if it is text"
            )
        if text.lower() in _AMBIGUOUS_WORDS:
            raise self.error(node, f"{text} is ambiguous: write true or false, or put it in quotes if it is text")
        return text

    def locate(self, node: YamlNode, error: msgspec.ValidationError) -> tuple[YamlNode, str]:
        """The node below `node` that an error of msgspec is about, and the error without its path."""
        sentence, _, place = str(error).partition(" - at `$")
        path = [int(number) if number.isdigit() else field for field, number in _ERROR_PATH.findall(place)]
        at = self.node_at(node, path)
        unknown = _UNKNOWN_FIELD.search(sentence)
        if unknown is not None and isinstance(at, MappingNode):
            at = next((key for key, _ in at.pairs if key.text == unknown[1]), at)
        return at, sentence.rstrip(".")

    @staticmethod
    def node_at(node: YamlNode, path: Iterable[str | int]) -> YamlNode:
        """The node at the end of `path`, or the last existing one on the way; locates errors given by path."""
        for step in path:
            if isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
                node = node.items[step]
            elif isinstance(node, MappingNode) and (found := [value for key, value in node.pairs if key.text == step]):
                node = found[0]
            else:
                break
        return node

    @staticmethod
    def key_node(node: YamlNode | None, name: str) -> ScalarNode:
        """The node of an existing key, for error messages."""
        assert isinstance(node, MappingNode)
        return next(key for key, _ in node.pairs if key.text == name)


def is_null(node: YamlNode) -> bool:
    return isinstance(node, ScalarNode) and not node.quoted and node.text.lower() in _NULLS


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or all there are."""
    from difflib import get_close_matches

    names = list(known)
    found = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else f"; there are {', '.join(names)}"
