"""Where Rota is, for programs that were not told: as it is set, or the `rota up` of this directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rota.model.errors import InvalidSetting

if TYPE_CHECKING:
    from rota.local.api_key import ApiEndpoint


def endpoint_resolver(url: str, key: str) -> Callable[[], ApiEndpoint]:
    """The API at `url`, or of this machine; asked again whenever it cannot be reached."""

    def find() -> ApiEndpoint:
        from rota.infra.settings_file import load
        from rota.local.api_key import ApiEndpoint, find_endpoint

        settings = load().settings
        if not url:
            found = find_endpoint(settings)
            return ApiEndpoint(found.url, key or found.key)
        if not (key or settings.api.key):
            raise InvalidSetting("A URL was given and no key: give Rota(url, key=...), or set ROTA_API_KEY.")
        return ApiEndpoint(url.rstrip("/"), key or settings.api.key or "")

    return find


def database_url() -> str:
    """The PostgreSQL of Rota, with its password: for a connection of yours that jobs are submitted on."""
    from rota.cli.local.up import local_url
    from rota.infra.settings_file import load

    settings = load().settings
    url = settings.postgres.url or local_url(settings, "postgres")
    if not url:
        raise InvalidSetting("No PostgreSQL is known: set postgres.url, or start one with `rota up`.")
    return url
