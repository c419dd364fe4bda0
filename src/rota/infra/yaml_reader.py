"""YAML with the line of every word, for files in which a slip must be refused and not ignored.

    reader = Reader("policy.yaml")
    for key, value in reader.pairs(tree(text, "policy.yaml"), "the file"):
        ...
        raise reader.wrong(value, "what is wrong here, and what to write instead")

Of YAML there are mappings, lists and scalars; aliases and tags are refused, so nothing in a file can grow or run, and
depth and size are bounded before anything is kept. What is wrong is told as `file:line: sentence.`, the first of it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

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

T = TypeVar("T")


class YamlNode(msgspec.Struct, frozen=True):
    """One thing of the file: a scalar, a list or a mapping."""

    line: int


class ScalarNode(YamlNode, frozen=True):
    text: str
    quoted: bool = False


class ListNode(YamlNode, frozen=True):
    items: tuple[YamlNode, ...]


class MappingNode(YamlNode, frozen=True):
    pairs: tuple[tuple[ScalarNode, YamlNode], ...]


def read_text(path: Path) -> str:
    """What the file holds; InvalidInput when it cannot be read, is too large, or is no text."""
    return decode_text(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """No more than tells whether it is too large."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no file")  # noqa: TRY301  told like the others
        with path.open("rb") as stream:
            return stream.read(FILE_BYTES_MAX + 1)
    except OSError as wrong:
        raise InvalidInput(
            f"The file {path} cannot be read ({wrong.strerror}): correct its name or its rights."
        ) from wrong


def check_text_size(text: str, source: str) -> str:
    _check_size(text.encode(errors="replace"), source)
    return text


def _check_size(content: bytes, source: str) -> None:
    if len(content) > FILE_BYTES_MAX:
        line = content[:FILE_BYTES_MAX].count(b"\n") + 1
        raise error_at_line(source, line, f"the file is larger than {FILE_BYTES_MAX // 1024} KiB; is it the right one?")


def decode_text(content: bytes, source: str) -> str:
    _check_size(content, source)
    try:
        return content.decode()
    except UnicodeDecodeError as wrong:
        line = content[: wrong.start].count(b"\n") + 1
        raise error_at_line(source, line, "this is no UTF-8; save the file as UTF-8.") from None


def parse_yaml(text: str, source: str) -> YamlNode | None:
    """The document in the text; None when there is nothing in it."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _TreeBuilder(yaml.parse(text, Loader=loader), source).document()
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        raise error_at_line(source, mark.line + 1 if mark else 1, f"this is no YAML: {wrong.problem}.") from None
    except yaml.YAMLError:
        raise error_at_line(source, 1, "this is no YAML: it holds characters that are not allowed.") from None


def error_at_line(source: str, line: int, sentence: str) -> InvalidInput:
    return InvalidInput(f"{source}:{line}: {sentence}", file=source, line=line)


class _TreeBuilder:
    """Makes a tree of the parser's events, and stops at the first that has no place in it."""

    def __init__(self, events: Iterator[Event], source: str) -> None:
        self._events = events
        self._source = source

    def document(self) -> YamlNode | None:
        from yaml.events import DocumentStartEvent, StreamEndEvent

        next(self._events)
        if isinstance(next(self._events), StreamEndEvent):
            return None
        found = self._node(next(self._events), 0)
        next(self._events)
        if isinstance(after := next(self._events), DocumentStartEvent):
            raise self._error(after, "a second document begins here; keep one of them")
        return found

    def _node(self, event: Event, depth: int) -> YamlNode:
        from yaml.events import MappingStartEvent, ScalarEvent, SequenceStartEvent

        if depth > DEPTH_MAX:
            raise self._error(event, f"this is nested deeper than {DEPTH_MAX}")
        if getattr(event, "anchor", None) is not None:
            raise self._error(event, "anchors and aliases mean nothing here; write it out")
        if getattr(event, "tag", None) is not None:
            raise self._error(event, "a tag means nothing here; put a value that begins with ! in quotes")
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
                raise self._error(event, "a name must stand here")
            yield key, self._node(next(self._events), depth + 1)

    def _until_end(self) -> Iterator[Event]:
        from yaml.events import MappingEndEvent, SequenceEndEvent

        for event in self._events:
            if isinstance(event, MappingEndEvent | SequenceEndEvent):
                return
            yield event

    def _error(self, event: Event, sentence: str) -> InvalidInput:
        return error_at_line(self._source, _event_line(event), f"{sentence}.")


def _event_line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


class YamlReader:
    """Takes words, numbers and lists out of a tree, each with what it must be; blames the line of what is not."""

    def __init__(self, source: str) -> None:
        self.source = source

    def error(self, node: YamlNode, sentence: str) -> InvalidInput:
        return error_at_line(self.source, node.line, sentence if sentence[-1] in ".?" else f"{sentence}.")

    def pairs(self, node: YamlNode | None, what: str) -> Iterator[tuple[str, YamlNode]]:
        """Names with what they stand for, each once; nothing where nothing stands."""
        if node is None or is_null(node):
            return
        if not isinstance(node, MappingNode):
            raise self.error(node, f"{what} must be a mapping of names")
        seen: set[str] = set()
        for key, value in node.pairs:
            if key.text in seen:
                raise self.error(key, f"{key.text[:60]!r} stands here twice")
            seen.add(key.text)
            yield key.text, value

    def fields(
        self, node: YamlNode | None, what: str, known: Mapping[str, Callable[[YamlNode], Any]]
    ) -> dict[str, Any]:
        """What stands under the names that `known` has, as their readers give it; any other name is refused."""
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
        """A text that is not empty."""
        if not isinstance(node, ScalarNode) or is_null(node) or not node.text.strip():
            raise self.error(node, "a word must stand here")
        if len(node.text) > most or not node.text.replace("\n", " ").isprintable():
            raise self.error(node, f"a text of up to {most} printable characters must stand here")
        return node.text.strip()

    def strings(self, node: YamlNode) -> tuple[str, ...]:
        """One word or a list of them."""
        if isinstance(node, ScalarNode):
            return (self.string(node),)
        return tuple(self.string(each) for each in self.items(node, "what stands here"))

    def integer(self, node: YamlNode, what: str, least: int = 0, most: int = 2**53) -> int:
        text = node.text if isinstance(node, ScalarNode) else ""
        if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
            raise self.error(node, f"{what} is a whole number from {least} to {most}")
        return int(text)

    def duration_s(self, node: YamlNode, what: str, least: float = 0.0, most: float = 366 * 86400.0) -> float:
        """A time with its unit, in seconds."""
        try:
            seconds = parse_duration(self.string(node))
        except InvalidInput as wrong:
            raise self.error(node, f"{what}: {wrong.sentence}") if "file" not in wrong.facts else wrong from None
        if not least <= seconds <= most:
            raise self.error(node, f"{what} is a time from {least:g} s to {most:g} s")
        return seconds

    def boolean(self, node: YamlNode, what: str) -> bool:
        text = node.text.lower() if isinstance(node, ScalarNode) else ""
        if text not in _FLAGS:
            raise self.error(node, f"{what} is true or false")
        return _FLAGS[text]

    def one_of(self, node: YamlNode, what: str, options: Mapping[str, T]) -> T:
        """By its name, in any case, with - or _."""
        text = self.string(node).lower().replace("-", "_")
        if text not in options:
            raise self.error(node, f"{what} is one of {', '.join(options)}")
        return options[text]

    def to_builtins(self, node: YamlNode) -> object:
        """Whatever stands there, as JSON would have it."""
        if isinstance(node, MappingNode):
            return {key: self.to_builtins(value) for key, value in self.pairs(node, "what stands here")}
        if isinstance(node, ListNode):
            return [self.to_builtins(each) for each in node.items]
        assert isinstance(node, ScalarNode)
        if node.quoted:
            return node.text
        if is_null(node):
            return None
        if node.text.lower() in ("true", "false"):
            return node.text.lower() == "true"
        if _INTEGER.fullmatch(node.text):
            return int(node.text)
        return float(node.text) if _REAL.fullmatch(node.text) else node.text

    @staticmethod
    def node_at(node: YamlNode, path: Iterable[str | int]) -> YamlNode:
        """What lies at the end of this way, or where the way ends: for who is told the way to what is wrong."""
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
        """The name itself, to be blamed; it must be there."""
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
