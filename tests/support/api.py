"""Clients of the HTTP API of a replica over real sockets, with keys of any role.

async with Api(farm) as api:
    admin = await api.client(Role.ADMIN)
    answer = await admin.get("/jobs")
"""

from contextlib import AsyncExitStack

import httpx

from rota.model.access import GrantSpec, Role
from rota.server.access import ApiKeyStore
from rota.server.access.keys import NEW_SERVICE

PREFIX = "/api/v1"


class Api:
    def __init__(self, farm):
        self.farm = farm
        self.keys = ApiKeyStore(farm.database)
        self._made = 0
        self._open = AsyncExitStack()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *failure):
        await self._open.aclose()

    @property
    def url(self):
        return self.farm.replica.listen_url + PREFIX

    async def key(self, *grants, name="", **owner):
        """Create a key and return its text; a grant is a role in every show, or (role, show)."""
        self._made += 1
        specs = [GrantSpec(*grant) if isinstance(grant, tuple) else GrantSpec(grant) for grant in grants]
        return (await self.keys.create(name or f"k{self._made}", specs, actor="test", **owner)).plain.text

    async def client(self, *grants, name="", owner=NEW_SERVICE, **headers):
        key = await self.key(*(grants or (Role.ADMIN,)), name=name, owner=owner)
        return await self.raw_client(Authorization=f"Bearer {key}", **headers)

    async def raw_client(self, **headers):
        client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20.0, verify=False)  # no TLS here
        return await self._open.enter_async_context(client)


def problem(answer, status, code):
    """Check a problem response and return its detail text."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    data = answer.json()
    assert (answer.status_code, data["status"], data["code"]) == (status, status, code), answer.text
    assert data["detail"].endswith((".", "?")), answer.text
    assert not any(part in data["detail"] for part in ("\n", "Traceback")), answer.text
    return data["detail"]


def a_job(task="noop", show="film", **more):
    layer = {"task": task} | more.pop("layer", {})
    return {"show": show, "layers": [layer], **more}
