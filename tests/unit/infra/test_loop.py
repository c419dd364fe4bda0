"""The event loop of long-running processes, with and without uvloop."""

import asyncio
import os
import signal
import sys

import pytest
import structlog

from rota.infra import loop


@pytest.fixture(params=["uvloop", "asyncio"], autouse=True)
def library(request, monkeypatch):
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    return request.param


async def _next_iterations():
    for _ in range(3):
        await asyncio.sleep(0)


def test_loop_is_uvloop_if_installed(library):
    async def main():
        return type(asyncio.get_running_loop()).__mro__

    for ignore_exits in (False, True):
        modules = {each.__module__.partition(".")[0] for each in loop.run(main(), ignore_exits=ignore_exits)}
        assert ("uvloop" in modules) == (library == "uvloop")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_in_a_callback_is_logged_and_the_loop_continues(error):
    after = []

    def exits():
        raise error

    async def main():
        running = asyncio.get_running_loop()
        running.call_soon(exits)
        running.call_soon(after.append, "the callback after it")
        await _next_iterations()
        return "result"

    with structlog.testing.capture_logs() as logs:
        assert loop.run(main(), ignore_exits=True) == "result"
    assert after == ["the callback after it"]
    [line] = logs
    assert (line["event"], line["exc_info"]) == ("loop_callback_exit_ignored", error)


@pytest.mark.parametrize("ignore_exits", [False, True])
def test_exit_of_the_main_coroutine_ends_the_loop(ignore_exits):
    async def main():
        await _next_iterations()
        sys.exit(5)

    with pytest.raises(SystemExit) as exited:
        loop.run(main(), ignore_exits=ignore_exits)
    assert exited.value.code == 5


def test_exit_in_a_callback_ends_the_loop_unless_it_is_to_be_ignored():
    async def main():
        asyncio.get_running_loop().call_soon(sys.exit, 5)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit):
        loop.run(main())


def test_second_interrupt_ends_a_main_coroutine_that_ignores_the_first():
    async def main():
        while True:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                continue

    with pytest.raises(KeyboardInterrupt):
        loop.run(main(), ignore_exits=True)
