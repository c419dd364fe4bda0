"""Reads the settings: a file and the environment.

The file is the one named by --config or else ROTA_CONFIG, otherwise ./rota.yaml if it exists. It is read once,
completely, and not watched. It may use mappings of plain values: lists, aliases and tags are rejected with their line,
so a file cannot expand or run code. Parser errors never quote values, because one of them may be a secret.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rota.model.errors import InvalidSetting
from rota.model.settings import LoadedSettings, SettingsFileEntry, UnsupportedValue, resolve
from rota.model.settings.names import CONFIG_ENV

if TYPE_CHECKING:
    from yaml.events import Event

__all__ = ["LoadedSettings", "load", "parse"]

FILE_NAME: Final = "rota.yaml"
FILE_BYTES_MAX: Final = 256 * 1024
_DEPTH_MAX: Final = 16
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})


def load(
    config: Path | None = None, *, environ: Mapping[str, str] | None = None, directory: Path | None = None
) -> LoadedSettings:
    """The settings of this process. `environ` and `directory` default to its own."""
    environ = os.environ if environ is None else environ
    path = _find_file(config, environ, directory or Path())
    entries = parse(_read_text(path), str(path)) if path else ()
    return resolve(entries, environ, file=str(path or FILE_NAME))


def parse(text: str, file: str) -> tuple[SettingsFileEntry, ...]:
    """The entries in the text of a settings file, with line numbers."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _SettingsReader(yaml.parse(text, Loader=loader), file).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidSetting(f"{file}:{line}: this is not YAML: {_without_values(error.problem)}.") from None
    except yaml.YAMLError:
        raise InvalidSetting(f"{file}: this is not YAML: it contains characters that are not allowed.") from None


def _find_file(config: Path | None, environ: Mapping[str, str], directory: Path) -> Path | None:
    if configured := config or environ.get(CONFIG_ENV, "").strip():
        return directory / configured
    path = directory / FILE_NAME
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return path  # it may exist: `_read_text` reports why it cannot be read
    return path


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")  # noqa: TRY301  raised like the others
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidSetting(
            f"The settings file {path} cannot be read ({error.strerror}): correct --config, {CONFIG_ENV} or the file."
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidSetting(
            f"The settings file {path} is larger than {FILE_BYTES_MAX // 1024} KiB: is it the right one?"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InvalidSetting(f"{path}:{line}: this is not UTF-8: save the file as UTF-8.") from None


class _SettingsReader:
    """Converts the parser's events to entries; stops at the first error."""

    def __init__(self, events: Iterator[Event], file: str) -> None:
        self.events = events
        self.file = file

    def document(self) -> tuple[SettingsFileEntry, ...]:
        from yaml.events import DocumentStartEvent, StreamEndEvent

        next(self.events)
        if isinstance(next(self.events), StreamEndEvent):
            return ()
        first = next(self.events)
        value = self._value(first, 0)
        next(self.events)
        if isinstance(after := next(self.events), DocumentStartEvent):
            raise self._error(after, "a second document begins here: keep one of them")
        if value is None:
            return ()
        if not isinstance(value, tuple):
            raise self._error(first, "a settings file contains sections such as `redis:` with settings below them")
        return value

    def _value(self, event: Event, depth: int) -> str | tuple[SettingsFileEntry, ...] | UnsupportedValue | None:
        from yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent

        if depth > _DEPTH_MAX:
            raise self._error(event, "this is nested too deeply")
        if isinstance(event, AliasEvent):
            return UnsupportedValue("an alias")
        tagged = getattr(event, "tag", None) is not None
        if isinstance(event, ScalarEvent):
            if tagged:
                return UnsupportedValue("a value with a tag")
            return None if event.implicit[0] and event.value in _NULLS else event.value
        if isinstance(event, SequenceStartEvent):
            self._skip_list(depth)
            return UnsupportedValue("a list")
        assert isinstance(event, MappingStartEvent), f"no value begins with {event}"
        entries = tuple(self._entries(depth))
        return UnsupportedValue("a section with a tag") if tagged else entries

    def _entries(self, depth: int) -> Iterator[SettingsFileEntry]:
        from yaml.events import MappingEndEvent, ScalarEvent

        while not isinstance(key := next(self.events), MappingEndEvent):
            if not isinstance(key, ScalarEvent):
                raise self._error(key, "a key must be plain text")
            yield SettingsFileEntry(key.value, _line(key), self._value(next(self.events), depth + 1))

    def _skip_list(self, depth: int) -> None:
        from yaml.events import SequenceEndEvent

        while not isinstance(event := next(self.events), SequenceEndEvent):
            self._value(event, depth + 1)

    def _error(self, event: Event, sentence: str) -> InvalidSetting:
        return InvalidSetting(f"{self.file}:{_line(event)}: {sentence}.")


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _without_values(problem: str | None) -> str:
    """The parser's message without quotations from the file longer than a character or an escape."""
    return re.sub(
        r"(['\"])(.*?)\1", lambda quoted: quoted[0] if len(quoted[2]) <= 2 else "'...'", problem or "unreadable"
    )
