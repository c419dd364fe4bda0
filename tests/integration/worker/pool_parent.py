"""A worker of the pool tests: prints the pids of an idle, a busy and a starting child process, then waits to be killed.

python -m tests.integration.worker.pool_parent FOLDER
"""

import asyncio
import sys
from pathlib import Path

from rota.worker.processes.group_guard import ProcessGroupGuard
from tests.integration.worker.pool_child import PoolRequest
from tests.integration.worker.pool_support import PoolProcess, create_pool, program
from tests.support.waiting import until


async def main(folder):
    pool = create_pool()
    idle, busy = await pool.acquire(), await pool.acquire()
    await pool.release(idle)
    await busy.send(PoolRequest("ignore SIGTERM"))
    await busy.messages.get()
    pid_file = folder / "pid"
    (folder / "app.py").write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write('.')\ntime.sleep(60)")
    starting = PoolProcess(program("app.py", folder), ProcessGroupGuard())
    await until(pid_file.exists, within_s=20)
    print(*(child.process.pid for child in (idle, busy, starting)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
