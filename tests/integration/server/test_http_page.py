"""docs/howto/http.md: its commands, run as printed."""

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from rota.model.access import Role
from rota.server import services
from tests.support.api import Api
from tests.support.replica_and_worker import Farm

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "http.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
REFUSED = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
EXPECTED = (
    *('"state":"SUCCEEDED"', "hello\n", '"items":[{"job":', '"labels":{"shot":"2"}', '"sentence":', '"queue":"film/'),
    *('"items":[{"result":{"job":', '"frames":3', '"max_jobs":100', '"text":"rota_'),
)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl not found: install it, as by `apt-get install curl`")
async def test_http_page_commands_work_as_printed(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.worker()
        setting, *typed = "".join(BLOCKS).splitlines()
        assert setting.startswith("export ROTA_API_URL=")
        variables = {"ROTA_API_URL": farm.replica.listen_url, "ROTA_API_KEY": await api.key(Role.ADMIN)}
        output = await run_script("\n".join(["set -eu", *typed]), variables)
    for part in (*EXPECTED, REFUSED[0].strip()):
        assert part in output, output


async def run_script(script, environment):
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
