"""Shared by the event stream tests: replicas with their API, and clients that read streams line by line."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import msgspec

from rota.model.access import GrantSpec, Role
from rota.runtime import Replica
from rota.server import services
from rota.server.access import ApiKeyStore
from tests.support.replica_and_worker import Farm


class ApiFarm(Farm):
    """Replicas that serve the API without rate limits."""

    def __init__(self, *given):
        super().__init__(*given)
        api = msgspec.structs.replace(self.settings.api, requests_per_s=0, requests_at_once=0)
        self.settings = msgspec.structs.replace(self.settings, api=api)

    async def server(self):
        replica = await self._open.enter_async_context(Replica.open(self.settings, self.urls))
        replica.engine.members.name = f"{replica.engine.members.name}/{len(self.replicas)}"
        replica.engine.leases.owner = replica.engine.members.name
        self.replicas.append(replica)
        replica.supervisor.add(*services(replica))
        await self._open.enter_async_context(replica.supervisor.running())
        return replica

    async def key(self, name="k", role=Role.VIEWER, show=None, **more):
        made = await ApiKeyStore(self.database).create(name, [GrantSpec(role, show)], actor="test", **more)
        return made.plain.text


class Client:
    """A subscriber to events: each is a dict with `id`, `event` and `data`."""

    def __init__(self, response):
        self.response = response
        self.last = ""
        self.heartbeats = 0
        self._lines = response.aiter_lines()

    async def next(self, within_s=10.0):
        """The next event; None when the stream has ended."""
        async with asyncio.timeout(within_s):
            event = {}
            async for line in self._lines:
                field, _, value = line.partition(":")
                if line.startswith(":"):
                    self.heartbeats += 1
                elif field == "id":
                    self.last = event["id"] = value.strip()
                elif field:
                    event[field] = value.strip()
                elif "data" in event:
                    return {**event, "data": msgspec.json.decode(event["data"])}
                else:
                    event = {}
        return None

    async def some(self, count, within_s=10.0):
        return [await self.next(within_s) for _ in range(count)]

    async def ended(self, within_s=10.0):
        """Whether the stream ends in time; drops the events until then."""
        async with asyncio.timeout(within_s):
            while await self.next(within_s) is not None:
                pass
        return True

    async def opened(self):
        """Wait for the first lines: events from now on are delivered."""
        async with asyncio.timeout(10):
            async for line in self._lines:
                if line.startswith("id:"):
                    self.last = line.partition(":")[2].strip()
                    return


@asynccontextmanager
async def streaming(replica, key, path="/api/v1/events", *, last="", **params):
    headers = {"authorization": f"Bearer {key}", **({"last-event-id": last} if last else {})}
    async with (
        httpx.AsyncClient(base_url=replica.listen_url, timeout=30, verify=False) as client,
        client.stream("GET", path, params=params, headers=headers) as response,
    ):
        yield Client(response)


async def raw(replica, key, path="/api/v1/events", *, follow_up=b""):
    """A raw connection after its response head: the reader and the writer. `follow_up` is sent in the same write."""
    address = urlsplit(replica.listen_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"GET {path} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode() + follow_up)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def streams_of(replica):
    """The open streams of the replica."""
    [service] = [each for each in replica.supervisor.services if each.name == "streams"]
    return service._run.__self__
