"""docs/howto/http.md, typed as it is printed."""

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
SAID = (
    *('"state":"SUCCEEDED"', "hello\n", '"items":[{"job":', '"labels":{"shot":"2"}', '"sentence":', '"queue":"film/'),
    *('"frames":3', '"max_jobs":100', '"text":"rota_'),
)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl not found: install it, as by `apt-get install curl`")
async def test_the_page_works_as_it_is_printed(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.worker()
        setting, *typed = "".join(BLOCKS).splitlines()
        assert setting.startswith("export ROTA_API_URL=")
        here = {"ROTA_API_URL": farm.replica.listen_url, "ROTA_API_KEY": await api.key(Role.ADMIN)}
        told = await said("\n".join(["set -eu", *typed]), here)
    for part in (*SAID, REFUSED[0].strip()):
        assert part in told, told


async def said(script, environment):
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()
