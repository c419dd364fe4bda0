"""Generates docs/reference/settings.md from the settings tree."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc

from rota.model.settings.leaves import Leaf, leaves, sections

_HEAD = """\
# Settings

Every setting with its environment variable, default and allowed values. `tools.docs.settings_reference` generates this
page from the code; a test compares the two.

* **Sources.** The file named by `ROTA_CONFIG`, else `rota.yaml` in the working directory if it exists. The environment
  overrides the file, the file overrides the default. `rota config show` shows the origin of each value. An empty
  variable counts as not set. Relative paths are relative to the working directory.
* **Syntax.** Sections nest: `redis.scheduler.interval_ms` is `interval_ms` below `scheduler` below `redis`, or one key
  with dots. `interval-ms`, `interval_ms` and `intervalMs` are the same name.
* **Durations** have a unit: `500ms`, `2s`, `10min` (or `10m`), `72h`, `30d`. Names that end in `_ms`, `_millis` or
  `_seconds` are whole numbers of that unit.
* **Unknown names are refused**, in the file and for variables that begin with `ROTA_`, with the nearest known name.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for path, section in sections().items():
        below = [leaf for leaf in leaves().values() if leaf.path.rpartition(".")[0] == path]
        if below:
            parts.append("\n".join([f"## {path}", "", getdoc(section) or "", "", *_table(below), ""]))
    return "\n".join(parts)


def _table(below: list[Leaf]) -> Iterator[str]:
    yield "| setting | environment | default | allowed | meaning |"
    yield "|---|---|---|---|---|"
    for leaf in below:
        name, allowed, meaning = leaf.path.rpartition(".")[2], _cell(leaf.kind.brief), _cell(leaf.kind.meaning)
        yield f"| `{name}` | {_names(leaf)} | {_default(leaf)} | {allowed} | {meaning} |"


def _names(leaf: Leaf) -> str:
    return ", ".join(f"`{name}`" for name in leaf.env_names)


def _default(leaf: Leaf) -> str:
    shown = leaf.kind.show(leaf.default)
    return f"`{shown}`" if shown else "(none)" if leaf.default is None else "(empty)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
