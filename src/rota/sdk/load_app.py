"""Loads an app from `module:app` or `folder/file.py:app`; the name may be omitted if there is only one app.

Modules are searched in `folder` first. A file is imported under its stem, so that files in one directory can import
each other.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rota.infra.telemetry.redaction import redact_text
from rota.model.errors import InvalidInput
from rota.sdk.app import Rota

_MODULE_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def load(spec: str, folder: Path) -> Rota:
    """Raises InvalidInput if `spec` is malformed or its code cannot be imported."""
    where, _, name = spec.partition(":")
    module = _import_app_module(spec, where, folder)
    found = getattr(module, name, None) if name else _only_app(spec, module)
    if not isinstance(found, Rota):
        raise InvalidInput(f"{where} has no app {name!r}: use the name of a variable that holds a `Rota()`.")
    return found


def _import_app_module(spec: str, where: str, folder: Path) -> ModuleType:
    if where.endswith(".py"):
        path = (folder / where).resolve()
        if not path.is_file():
            raise InvalidInput(f"There is no file {path}: use module:app, or the path of a Python file.")
        folder, where = path.parent, path.stem
    if not _MODULE_NAME.fullmatch(where):
        raise InvalidInput(f"{spec!r} is not a valid app: use module:app, or the path of a Python file.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return import_module(where)
    except ImportError as error:
        raise InvalidInput(f"Cannot import {spec!r}: {redact_text(str(error))}.") from error
    except Exception as error:
        reason = redact_text(f"{type(error).__name__}: {error}")
        raise InvalidInput(
            f"Importing {spec!r} failed ({reason}): run `python -c 'import {where}'` to see why."
        ) from error


def _only_app(spec: str, module: ModuleType) -> Rota:
    found = {name: value for name, value in vars(module).items() if isinstance(value, Rota)}
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(f"{spec}:{name}" for name in found)
    raise InvalidInput(
        f"{spec} has several apps: use one of {names}."
        if found
        else f"{spec} has no `Rota()`: assign one to a variable."
    )
