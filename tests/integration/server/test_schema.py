"""Valid and invalid requests alike get responses that match the API schema."""

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
"""Per route."""
PHASES = "fuzzing,stateful"
# Resources are addressed by name here; by default schemathesis infers links by id.
CONFIG = """
[phases.stateful]
max-steps = 4
[phases.stateful.inference]
algorithms = []
"""
EXCLUDED_CHECKS = ("positive_data_acceptance",)
"""A name that does not exist matches its schema, too."""


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.worker()
        yield api


async def run_schemathesis(folder, api, *options):
    """Run schemathesis; fails with its report when it finds a defect."""
    (folder / "openapi.json").write_bytes(openapi.encoded_document(CONTROLLERS))
    (folder / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml")),
        *("run", str(folder / "openapi.json"), "--url", api.farm.replica.listen_url, "--phases", PHASES),
        *("--max-examples", EXAMPLES, "--checks", "all", "--exclude-checks", ",".join(EXCLUDED_CHECKS)),
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
    report, _ = await process.communicate()
    assert process.returncode == 0, report.decode()


@pytest.mark.slow("requests of every shape to every route")
@pytest.mark.timeout(600)
async def test_any_admin_request_gets_a_documented_response(api, tmp_path):
    key = await api.key(Role.ADMIN)
    # revoke_key would revoke the key in use.
    await run_schemathesis(tmp_path, api, "-H", f"Authorization: Bearer {key}", "--exclude-operation-id", "revoke_key")


@pytest.mark.slow("requests of every shape to every route")
@pytest.mark.timeout(600)
async def test_any_viewer_or_anonymous_request_gets_a_documented_response(api, tmp_path):
    key = await api.key(Role.VIEWER)
    few = ("--phases", "fuzzing", "--max-examples", "1")
    await run_schemathesis(tmp_path, api, "-H", f"Authorization: Bearer {key}", *few)
    await run_schemathesis(tmp_path, api, "--exclude-checks", "ignored_auth", *few)
