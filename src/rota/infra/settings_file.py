"""Reads the settings: a file and the environment.

The file is the one named by --config or else ROTA_CONFIG, otherwise ./rota.yaml if it exists. It is read once,
completely, and not watched. It may use mappings of plain values: lists, aliases and tags are rejected with their line,
so a file cannot expand or run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rota.infra.yaml_reader import (
    ListNode,
    MappingNode,
    ScalarNode,
    YamlFormat,
    YamlNode,
    decode_text,
    is_null,
    parse_yaml,
    read_prefix,
)
from rota.model.errors import InvalidSetting
from rota.model.settings import LoadedSettings, SettingsFileEntry, UnsupportedValue, resolve
from rota.model.settings.names import CONFIG_ENV

__all__ = ["LoadedSettings", "load", "parse"]

FILE_NAME: Final = "rota.yaml"
FILE_BYTES_MAX: Final = 256 * 1024
_FORMAT: Final = YamlFormat(error=InvalidSetting, bytes_max=FILE_BYTES_MAX, too_deep="this is nested too deeply")


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
    node = parse_yaml(text, file, _FORMAT)
    if node is None or is_null(node):
        return ()
    if not isinstance(node, MappingNode):
        sentence = "a settings file contains sections such as `redis:` with settings below them."
        raise _FORMAT.error_at(file, node.line, sentence)
    return _entries(node)


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
        content = read_prefix(path, _FORMAT)
    except OSError as error:
        raise InvalidSetting(
            f"The settings file {path} cannot be read ({error.strerror}): correct --config, {CONFIG_ENV} or the file."
        ) from error
    return decode_text(content, str(path), _FORMAT)


def _entries(node: MappingNode) -> tuple[SettingsFileEntry, ...]:
    """With duplicate keys: `resolve` reports them, also when they are spelled differently."""
    return tuple(SettingsFileEntry(key.text, key.line, _value(value)) for key, value in node.pairs)


def _value(node: YamlNode) -> str | tuple[SettingsFileEntry, ...] | UnsupportedValue | None:
    if isinstance(node, MappingNode):
        return _entries(node)
    if isinstance(node, ScalarNode):
        return None if is_null(node) else node.text
    assert isinstance(node, ListNode), f"{node} is not a YAML node"
    return UnsupportedValue("a list")
