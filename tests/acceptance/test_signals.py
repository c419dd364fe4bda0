"""Shutdown of a real process on signals: output, exit status and duration."""

import signal

import pytest

PROCESS = "tests.acceptance.signalled"
both_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@both_signals
async def test_first_signal_drains_and_exits_with_0(spawn, number):
    process = await spawn(PROCESS, "drains")
    assert await process.line() == "ready"
    process.send(number)
    assert await process.line() == "draining"
    assert await process.wait(timeout_s=5) == 0
    assert "Traceback" not in await process.errors()


@both_signals
async def test_second_signal_cancels_and_exits_with_128_plus_signal(spawn, number):
    process = await spawn(PROCESS, "slow", "uvloop")
    assert await process.line() == "ready"
    process.send(signal.SIGTERM)
    assert await process.line() == "draining"
    process.send(number)
    assert await process.line() == "cancelled"
    assert await process.wait(timeout_s=5) == 128 + number


async def test_signal_during_startup_exits_with_0(spawn):
    process = await spawn(PROCESS, "starting")
    assert await process.line() == "starting"
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=5) == 0


async def test_service_ignoring_cancellation_does_not_block_exit(spawn):
    process = await spawn(PROCESS, "stuck")
    assert await process.line() == "ready"
    process.send(signal.SIGTERM)
    assert await process.line() == "draining"
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=5) == 128 + signal.SIGTERM
    assert "services_ignore_cancellation" in await process.errors()


async def test_permanently_failed_service_exits_with_1_and_redacts_secrets(spawn):
    process = await spawn(PROCESS, "failing")
    assert await process.wait(timeout_s=5) == 1
    errors = await process.errors()
    assert "service_failed" in errors
    assert "c4nary" not in errors


async def test_signal_to_an_exited_process_is_ignored(spawn):
    process = await spawn("this")
    await process.wait()
    process.kill()
    process.resume()
