"""Authentication to the API, and when the API is served at all."""

import msgspec
import pytest

from rota.model.access import Role
from rota.model.errors import SetupFailed
from rota.runtime import Replica
from rota.server import services
from tests.support.api import Api, problem
from tests.support.replica_and_worker import Farm


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        yield farm


@pytest.fixture
async def api(farm):
    async with Api(farm) as api:
        yield api


@pytest.mark.parametrize("path", ["/jobs", "/nothing", "/openapi.json", "/jobs/x/cancel", "/keys"])
async def test_unauthenticated_requests_reveal_no_routes(api, path):
    anonymous = await api.raw_client()
    answers = [await anonymous.request(method, path) for method in ("GET", "POST", "DELETE", "OPTIONS")]
    assert {problem(answer, 401, "unauthenticated") for answer in answers}.__len__() == 1
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer nonsense"},
        {"Authorization": "Basic YTpi"},
        {"X-API-Key": "rota_0000000000_" + "0" * 39},
        {"Authorization": "Bearer \u00ff".encode("latin-1")},
    ],
)
async def test_invalid_credentials_are_refused(api, headers):
    anonymous = await api.raw_client(**headers)
    problem(await anonymous.get("/jobs"), 401, "unauthenticated")


async def test_revoked_key_is_refused_at_once_by_the_revoking_server(api):
    admin = await api.client(Role.ADMIN)
    text = await api.key(Role.VIEWER)
    other = await api.raw_client(Authorization=f"Bearer {text}")
    assert (await other.get("/me")).json()["name"] == "k2"
    assert (await admin.delete(f"/keys/{text.split('_')[1]}")).json()["state"] == "revoked"
    problem(await other.get("/me"), 401, "unauthenticated")


async def test_non_loopback_listen_address_requires_an_api_key(farm, api):
    wide = msgspec.structs.replace(farm.settings, listen=msgspec.structs.replace(farm.settings.listen, host="0.0.0.0"))
    async with Replica.open(wide, farm.urls) as replica:
        replica.supervisor.add(*services(replica))
        with pytest.raises(SetupFailed, match="rota keys create"):
            async with replica.supervisor.running():
                pass
    await api.key(Role.VIEWER)
    async with Replica.open(wide, farm.urls) as replica:
        replica.supervisor.add(*services(replica))
        async with replica.supervisor.running():
            assert replica.listener.port
