"""Makes a data directory of a local stack with a migrated schema: `python -m tests.support.harness.made_data DIR`.

A copy of it saves an initdb and the migrations, together more than a second of CPU. The servers are stopped at the end.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from rota.infra.postgres import migrate
from rota.local import LocalStack
from tests.support.harness.servers import options_for_tests


def copy_made(made, target):
    """Copy a made data directory to `target`, which may exist; `cp` needs less CPU than shutil.copytree."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-Rp", f"{made}/.", str(target)], check=True)


async def make(directory):
    stack = LocalStack(options_for_tests(directory))
    await stack.start()
    try:
        await migrate(stack.url("postgres"))
    finally:
        await stack.stop()
    (directory / "state.json").unlink()  # each copy chooses its own ports


if __name__ == "__main__":
    asyncio.run(make(Path(sys.argv[1])))
