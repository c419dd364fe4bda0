"""URL and key of the API, and URLs of the servers, that the CLI and the SDK on this machine use.

    <data>/api.key            the admin key of this `rota up`, one line, 0600
    <data>/up.json            the addresses it and its servers listen on, while it is up

The settings `api.url` and `api.key` take precedence. The key of a data directory is only sent to the API of that data
directory: with another URL, set a key too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from rota.infra.data_dir import UP_FILE, owner_of, resolve_data_dir, unusable_path_error, write_private
from rota.model.errors import InvalidSetting, Unauthenticated
from rota.model.identity.api_key_format import PlainKey, parse_key
from rota.model.settings import Settings

KEY_FILE: Final = "api.key"


class ApiEndpoint(msgspec.Struct, frozen=True):
    """The URL of the API, and the text of the key."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"Endpoint({self.url}, ***)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("url", self.url)]


class _UpFile(msgspec.Struct):
    """The part of `up.json` that is read here."""

    pid: int
    listen: str
    urls: dict[str, str] = {}
    """Of its PostgreSQL, Redis and NATS, with passwords."""


def find_endpoint(settings: Settings) -> ApiEndpoint:
    """The API to call: from the settings, or of the `rota up` of this data directory."""
    api, folder = settings.api, resolve_data_dir(Path(settings.local.data_dir))
    if api.url is not None:
        if api.key is None:
            raise InvalidSetting("api.url is set and api.key is not: set ROTA_API_KEY to a key of that installation.")
        return ApiEndpoint(api.url.rstrip("/"), api.key)
    up, stored = _read_up_file(folder), read_key(folder)
    if up is None:
        raise InvalidSetting(
            f"No API is configured: set ROTA_API_URL and ROTA_API_KEY, or start Rota in {folder} with `rota up`."
        )
    key = api.key or (stored.text if stored else None)
    if key is None:
        raise InvalidSetting(f"{folder / KEY_FILE} has no valid key: restart `rota up`, which creates one.")
    return ApiEndpoint(up.listen, key)


def read_key(folder: Path) -> PlainKey | None:
    """The key in the data directory; None if it is missing or invalid."""
    try:
        text = (folder / KEY_FILE).read_text("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unusable_path_error(folder / KEY_FILE, error) from error
    with suppress(Unauthenticated):
        return parse_key(text.strip())
    return None


def write_key(folder: Path, key: PlainKey) -> None:
    try:
        write_private(folder / KEY_FILE, f"{key.text}\n")
    except OSError as error:
        raise unusable_path_error(folder / KEY_FILE, error) from error


def running_server_url(settings: Settings, name: str) -> str | None:
    """URL of the server `name` of the `rota up` of this data directory; None when it is not up."""
    up = _read_up_file(resolve_data_dir(Path(settings.local.data_dir)))
    return up.urls.get(name) if up is not None else None


def _read_up_file(folder: Path) -> _UpFile | None:
    """None when no `rota up` owns the directory."""
    try:
        up = msgspec.json.decode((folder / UP_FILE).read_bytes(), type=_UpFile)
    except (OSError, msgspec.DecodeError, UnicodeError):
        return None
    owner = owner_of(folder)
    return up if owner is not None and owner.pid == up.pid else None
