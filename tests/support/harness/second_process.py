"""A separate Python process: started as a module, controlled by its standard streams and signals."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from tests.support.harness import processes
from tests.support.harness.processes import PIPE

LINE_TIMEOUT_S = 15.0


class SecondProcess:
    def __init__(self, process):
        self._process = process

    @classmethod
    async def start(cls, module, *args, env=None, argv=None, cwd=None, fork=True):
        command = argv or [sys.executable, "-m", module, *map(str, args)]
        given = {**os.environ, **(env or {})}
        return cls(await processes.start(command, env=given, cwd=cwd, fork=fork, stdin=PIPE, stdout=PIPE, stderr=PIPE))

    @property
    def pid(self):
        return self._process.pid

    @property
    def stdin(self):
        return self._process.stdin

    @property
    def status(self):
        return self._process.returncode

    async def line(self, timeout_s=LINE_TIMEOUT_S):
        """The next output line; fails if the process ends or prints nothing in time."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise AssertionError(f"process {self.pid} printed nothing within {timeout_s} s") from None
        if not line:
            raise AssertionError(f"process {self.pid} ended without a line: {await self.errors()}")
        return line.decode().rstrip("\n")

    async def until_logged(self, text, timeout_s=LINE_TIMEOUT_S):
        """The next line on standard error with `text` in it."""
        async with asyncio.timeout(timeout_s):
            async for line in self._process.stderr:
                if text in line.decode():
                    return line.decode()
        raise AssertionError(f"process {self.pid} ended without logging {text!r}")

    async def write_line(self, text):
        self.stdin.write(f"{text}\n".encode())
        await self.stdin.drain()

    async def errors(self):
        """All of standard error; waits for the end of the process."""
        return (await self._process.stderr.read()).decode()

    async def output(self):
        """The remaining output; waits for the end of the process."""
        return (await self._process.stdout.read()).decode()

    async def wait(self, timeout_s=LINE_TIMEOUT_S):
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    def send(self, number):
        """Ignored after the process has exited, because its pid may have been reused."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self):
        self.send(signal.SIGSTOP)

    def resume(self):
        self.send(signal.SIGCONT)

    def kill(self):
        self.send(signal.SIGKILL)

    async def end(self):
        if self._process.returncode is None:
            self.kill()
        await self._process.wait()
        # Reading to the end closes the pipe transports, which would otherwise be reported as leaked.
        await self._process.communicate()
