"""How a real process ends: what it prints, what status it leaves, how long it takes."""

import signal

import pytest

PROCESS = "tests.acceptance.signalled"
both_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@both_signals
async def test_the_first_signal_drains_and_the_process_exits_with_0(spawn, number):
    process = await spawn(PROCESS, "drains")
    assert await process.line() == "ready"
    process.send(number)
    assert await process.line() == "draining"
    assert await process.wait(timeout_s=5) == 0
    assert "Traceback" not in await process.errors()


@both_signals
async def test_the_second_signal_cancels_and_the_status_names_it(spawn, number):
    process = await spawn(PROCESS, "slow", "uvloop")
    assert await process.line() == "ready"
    process.send(signal.SIGTERM)
    assert await process.line() == "draining"
    process.send(number)
    assert await process.line() == "cancelled"
    assert await process.wait(timeout_s=5) == 128 + number


async def test_a_signal_during_the_start_ends_it_clean(spawn):
    process = await spawn(PROCESS, "starting")
    assert await process.line() == "starting"
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=5) == 0


async def test_a_body_that_ignores_cancellation_does_not_keep_the_process(spawn):
    process = await spawn(PROCESS, "stuck")
    assert await process.line() == "ready"
    process.send(signal.SIGTERM)
    assert await process.line() == "draining"
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=5) == 128 + signal.SIGTERM
    assert "services_ignore_cancellation" in await process.errors()


async def test_a_service_that_fails_for_good_ends_the_process_with_1_and_its_log_hides_secrets(spawn):
    process = await spawn(PROCESS, "failing")
    assert await process.wait(timeout_s=5) == 1
    errors = await process.errors()
    assert "service_failed" in errors
    assert "c4nary" not in errors


async def test_a_process_that_has_ended_may_be_sent_a_signal(spawn):
    process = await spawn("this")
    await process.wait()
    process.kill()
    process.resume()
