"""Start a local stack, say so, stop it when standard input closes: what `bench foundations` measures from outside."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rota.local import LocalStack, StackOptions


async def main(data_dir: str) -> None:
    stack = LocalStack(StackOptions(Path(data_dir)))
    await stack.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await stack.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
