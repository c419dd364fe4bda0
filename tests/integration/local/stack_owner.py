"""Owns a local stack until stopped or killed: `python -m tests.integration.local.stack_owner DATA [MODE]`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from rota.infra.telemetry import logs
from rota.local import LocalStack, process
from rota.local.identity import RootMode
from tests.support.harness.servers import options_for_tests


async def own(data, mode):
    if mode == "guard":
        process.NEEDS_GUARD = True
        mode = "auto"
    stack = LocalStack(options_for_tests(Path(data), root_mode=RootMode(mode)))
    await stack.start()
    print(json.dumps({name: server.url for name, server in stack.servers.items()}), flush=True)
    print(json.dumps([server.process.pid for server in stack.servers.values()]), flush=True)
    print(os.geteuid(), stack.servers["postgres"].identity.mode, flush=True)
    watching = asyncio.create_task(stack.watch())
    await asyncio.to_thread(sys.stdin.readline)
    watching.cancel()
    await stack.stop()


if __name__ == "__main__":
    logs.configure("console", "info")
    asyncio.run(own(*sys.argv[1:], *(["auto"] if len(sys.argv) < 3 else [])))
