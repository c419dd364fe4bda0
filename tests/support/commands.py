"""Commands typed in this process: `said = await typed(line)`, with its status, its output and its errors."""

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
"""What a farm in this process logs meanwhile, such as that it was too busy: nothing that the command says."""


class Terminal:
    def __init__(self, monkeypatch, capsys):
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.tried = []

    async def __call__(self, line):
        """Of a line the words between blanks; or words as they are."""
        words = line.split() if isinstance(line, str) else line
        self.tried.append(" ".join(words))
        self._monkeypatch.setattr(sys, "argv", ["rota", *words])
        status = await asyncio.get_running_loop().run_in_executor(THREADS, _status)
        said = self._capsys.readouterr()
        assert "Traceback" not in said.err, said.err
        assert "This should not happen" not in said.err, said.err
        return SimpleNamespace(status=status, out=said.out, err=LOGGED.sub("", said.err))

    async def out(self, line):
        """What a line that must be accepted prints."""
        said = await self(line)
        assert (said.status, said.err) == (0, ""), said.err
        return said.out


class Loops(threading.local):
    """One event loop per thread of commands, kept from command to command with its connections to PostgreSQL."""

    runner = None

    def run(self, coroutine, **options):
        """Stands for `asyncio.run`, in these threads alone."""
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
LOOPS = Loops()
_run, asyncio.run = asyncio.run, LOOPS.run


def _status():
    """In a thread, because the command has an event loop of its own."""
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


def close():
    """End the loops of all threads; no command runs any more."""
    THREADS.shutdown()
    while RUNNERS:
        RUNNERS.pop().close()


def rows(text):
    """Its lines without the padding of tables."""
    return [" ".join(line.split()) for line in text.splitlines()]
