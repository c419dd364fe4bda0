"""Runs CLI commands in this process: `result = await cli(line)` has status, out and err."""

import asyncio
import contextvars
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from rota.cli.main import main
from tests.support.harness import connections

LOGGED = re.compile(r"^\d{4}-\d\d-\d\dT\S+ \[[a-z]+ *\] .*\n", re.MULTILINE)
"""Log lines of a replica in the same process; not output of the command."""


class Terminal:
    def __init__(self, monkeypatch, capsys):
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.tried = []

    async def __call__(self, line):
        """Run a command line, split at whitespace, or a list of arguments."""
        args = line.split() if isinstance(line, str) else line
        self.tried.append(" ".join(args))
        self._monkeypatch.setattr(sys, "argv", ["rota", *args])
        status = await asyncio.get_running_loop().run_in_executor(THREADS, _status)
        result = self._capsys.readouterr()
        assert "Traceback" not in result.err, result.err
        assert "This should not happen" not in result.err, result.err
        return SimpleNamespace(status=status, out=result.out, err=LOGGED.sub("", result.err))

    async def out(self, line):
        """The output of a command line that must succeed."""
        result = await self(line)
        assert (result.status, result.err) == (0, ""), result.err
        return result.out


class CommandLoops(threading.local):
    """One event loop per command thread, reused between commands with its PostgreSQL connections."""

    runner = None

    def run(self, coroutine, **options):
        """Replaces `asyncio.run` in the command threads."""
        if not threading.current_thread().name.startswith(THREAD_NAME):
            return _run(coroutine, **options)
        if self.runner is None:
            self.runner = asyncio.Runner()
            RUNNERS.append(self.runner)
            connections.lend_in(self.runner.get_loop())
        loop = self.runner.get_loop()
        try:
            return self.runner.run(coroutine, context=contextvars.copy_context())
        finally:
            loop.run_until_complete(asyncio.sleep(0))
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


THREAD_NAME = "commands"
THREADS = ThreadPoolExecutor(16, thread_name_prefix=THREAD_NAME)
RUNNERS = []
LOOPS = CommandLoops()
_run, asyncio.run = asyncio.run, LOOPS.run


def _status():
    """Runs in a thread, because the command starts its own event loop."""
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


def close():
    """Close the loops of all threads, after the last command."""
    THREADS.shutdown()
    while RUNNERS:
        RUNNERS.pop().close()


def rows(text):
    """Lines without table padding."""
    return [" ".join(line.split()) for line in text.splitlines()]
