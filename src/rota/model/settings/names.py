"""Setting names: equivalence of kebab, snake and camel case, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

from rota.model.settings.leaves import leaves, sections

# The one variable that is not a setting: the path of the settings file.
CONFIG_ENV: Final = "ROTA_CONFIG"
_SEE_REFERENCE: Final = ": see docs/reference/settings.md for all settings."


def normalize_name(name: str) -> str:
    """A form common to `snapshot-lock-ttl`, `snapshot_lock_ttl` and `snapshotLockTTL`."""
    return name.replace("-", "").replace("_", "").lower()


@cache
def known_paths() -> Mapping[str, str]:
    """Paths of settings and sections by normalized name."""
    return {normalize_name(path): path for path in (*sections(), *leaves())}


def suggestion(path: str) -> str:
    """`: did you mean ...?` for an unknown path, or a pointer to the reference if none is similar."""
    parent, _, name = path.rpartition(".")
    beside = {known.rpartition(".")[2]: known for known in known_paths().values() if _is_below(known, parent)}
    near = _same_name(name) or beside.get(_nearest(name, beside) or "") or _nearest(path, known_paths().values())
    return f": did you mean {near}?" if near else _SEE_REFERENCE


def env_suggestion(name: str) -> str:
    near = _nearest(name, [*(env for leaf in leaves().values() for env in leaf.env_names), CONFIG_ENV])
    return f": did you mean {near}?" if near else _SEE_REFERENCE


def _is_below(path: str, parent: str) -> bool:
    return normalize_name(path.rpartition(".")[0]) == normalize_name(parent)


def _same_name(name: str) -> str | None:
    """A setting of that name in another section, the least nested one."""
    found = [path for path in leaves() if normalize_name(path.rpartition(".")[2]) == normalize_name(name)]
    return min(found, key=lambda path: path.count("."), default=None)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    by_form = {normalize_name(path): path for path in known}
    near = get_close_matches(normalize_name(name), by_form, n=1, cutoff=0.75)
    return by_form[near[0]] if near else None
