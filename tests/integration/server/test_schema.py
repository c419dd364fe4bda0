"""Whatever fits the description of the API, and whatever does not, gets an answer that fits it."""

import asyncio
import os
import sys

import pytest

from rota.model.access import Role
from rota.server import services
from rota.server.http import openapi
from rota.server.http.app import CONTROLLERS
from tests.support.api import Api
from tests.support.harness.effort import effort
from tests.support.replica_and_worker import Farm

EXAMPLES = effort("1", "25")
"""Of each route."""
PHASES = "fuzzing,stateful"
# A thing is asked for by its name here, and schemathesis would try its id, unless told to go by links alone.
CONFIG = """
[phases.stateful]
max-steps = 4
[phases.stateful.inference]
algorithms = []
"""
LEFT_OUT = ("positive_data_acceptance",)
"""A name that nothing has fits its schema, too."""


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.worker()
        yield api


async def probed(folder, api, *options):
    """Fails with what schemathesis has to say, unless it is content."""
    (folder / "openapi.json").write_bytes(openapi.encoded_document(CONTROLLERS))
    (folder / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml")),
        *("run", str(folder / "openapi.json"), "--url", api.farm.replica.listen_url, "--phases", PHASES),
        *("--max-examples", EXAMPLES, "--checks", "all", "--exclude-checks", ",".join(LEFT_OUT)),
        *("--generation-database", "none", "--continue-on-failure", "--no-color", "--warnings", "off", *options),
        cwd=folder,
        env=os.environ
        | {
            "SCHEMATHESIS_HOOKS": "tests.support.schemathesis_kinds",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()


@pytest.mark.slow("requests of every shape to every route")
@pytest.mark.timeout(600)
async def test_whatever_an_administrator_sends_is_answered_as_described(api, tmp_path):
    key = await api.key(Role.ADMIN)
    # It would revoke the very key that it comes with.
    await probed(tmp_path, api, "-H", f"Authorization: Bearer {key}", "--exclude-operation-id", "revoke_key")


@pytest.mark.slow("requests of every shape to every route")
@pytest.mark.timeout(600)
async def test_whatever_a_viewer_or_a_stranger_sends_is_answered_as_described(api, tmp_path):
    key = await api.key(Role.VIEWER)
    few = ("--phases", "fuzzing", "--max-examples", "1")
    await probed(tmp_path, api, "-H", f"Authorization: Bearer {key}", *few)
    await probed(tmp_path, api, "--exclude-checks", "ignored_auth", *few)
