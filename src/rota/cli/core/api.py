"""The HTTP API for commands that act as the principal of a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rota.client.endpoint import find_endpoint
from rota.client.http import HttpClient
from rota.model.settings import Settings


@asynccontextmanager
async def api_client(settings: Settings) -> AsyncIterator[HttpClient]:
    """The API of the settings `api.url` and `api.key`, or of the `rota up` of this directory."""
    client = HttpClient(partial(find_endpoint, settings))
    try:
        yield client
    finally:
        await client.close()
