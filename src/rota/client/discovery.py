"""Finds the API endpoint and database: from settings, or the `rota up` instance of this directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rota.model.errors import InvalidSetting

if TYPE_CHECKING:
    from rota.client.endpoint import ApiEndpoint


def endpoint_resolver(url: str, key: str) -> Callable[[], ApiEndpoint]:
    """Resolves `url`, or the local API. Called again when the API is unreachable: a restart may change its port."""

    def find() -> ApiEndpoint:
        from rota.client.endpoint import ApiEndpoint, find_endpoint
        from rota.infra.settings_file import load

        settings = load().settings
        if not url:
            found = find_endpoint(settings)
            return ApiEndpoint(found.url, key or found.key)
        if not (key or settings.api.key):
            raise InvalidSetting("A URL needs a key: pass Rota(url, key=...), or set ROTA_API_KEY.")
        return ApiEndpoint(url.rstrip("/"), key or settings.api.key or "")

    return find


def database_url() -> str:
    """URL of Rota's PostgreSQL, with password, to submit jobs in the caller's own transaction."""
    from rota.client.endpoint import running_server_url
    from rota.infra.settings_file import load

    settings = load().settings
    url = settings.postgres.url or running_server_url(settings, "postgres")
    if not url:
        raise InvalidSetting("No PostgreSQL is configured: set postgres.url, or start one with `rota up`.")
    return url
