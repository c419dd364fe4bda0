"""The worker's pure parts: runs of tokens, room, captured output, inputs, the environment of a frame."""

import os
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import BlobCorrupted, BlobMissing, InvalidInput
from rota.model.jobs.work import FRAME_ENV, Work
from rota.model.settings import Settings
from rota.model.settings.resolve import resolve
from rota.worker import host_metrics, token_ranges
from rota.worker.capacity import WorkerCapacity
from rota.worker.data.blob_store import FileStore
from rota.worker.data.log_capture import LogCapture
from rota.worker.outcomes import UnencodableResult, decode_input, encode_result, redact_and_truncate
from rota.worker.registration_info import RegistrationInfo
from rota.worker.runners.command_runner import _expand_frame_placeholder
from rota.worker.runners.environment import command_environment, frame_variables
from rota.worker.runners.ipc import (
    TaskProcessLogLine,
    TaskProcessMessageReader,
    TaskProcessReady,
    TaskProcessResult,
    pack_task_message,
)
from rota.worker.runners.os_process import describe_exit
from rota.worker.token_ranges import TokenDeduplicator, intersect_range, merge_ranges

some_runs = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


def tokens(found):
    return [token for first, n in found for token in range(first, first + n)]


@given(some_runs)
def test_joined_runs_hold_the_same_tokens_once_each_and_are_as_few_as_can_be(given_runs):
    found = merge_ranges(given_runs)
    assert tokens(found) == sorted(set(tokens(given_runs)))
    assert all(first + n < after for (first, n), (after, _) in pairwise(found))


@given(some_runs)
def test_what_was_seen_is_never_fresh_again(given_runs):
    seen, known = TokenDeduplicator(), set()
    for first, n in given_runs:
        fresh = tokens(seen.take_new(first, n))
        assert fresh == [token for token in range(first, first + n) if token not in known]
        known.update(fresh)


def test_the_oldest_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(token_ranges, "RANGES_MAX", 2)
    seen = TokenDeduplicator()
    for first in (10, 20, 30):
        assert seen.take_new(first, 1)
    assert seen.take_new(30, 1) == seen.take_new(20, 1) == []
    assert seen.take_new(10, 1) == [(10, 1)]


def test_tokens_of_a_run_between_two_ends():
    assert list(intersect_range((5, 10), 7, 9)) == [7, 8]
    assert list(intersect_range((5, 2), 9, 12)) == []


def test_room_is_what_the_scarcest_thing_allows():
    room = WorkerCapacity(RegistrationInfo(name="w", pool="p", slots=10, cores=400, gpus=3, memory_mb=1000))
    assert room.fitting_count(Work(cores=100), 100) == 4
    assert room.fitting_count(Work(cores=1), 100) == 10
    assert room.fitting_count(Work(cores=1, gpus=2), 100) == 1
    assert room.fitting_count(Work(cores=1, memory_mb=400), 100) == 2
    room.reserve(Work(cores=100), 4)
    assert room.fitting_count(Work(cores=1), 1) == 0
    room.release(Work(cores=100), 3)
    assert room.fitting_count(Work(cores=100), 9) == 3
    devices = room.reserve_devices(2)
    room.release_devices(devices)
    assert sorted(room.reserve_devices(3)) == [0, 1, 2]


def test_a_worker_that_does_not_know_its_memory_counts_none():
    assert (
        WorkerCapacity(RegistrationInfo(name="w", pool="p", slots=1, cores=100)).fitting_count(Work(memory_mb=10**6), 1)
        == 1
    )


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 60), st.booleans())
def test_captured_output_is_the_head_and_the_tail_and_the_count_between(written, size_max, often):
    capture, chunks = LogCapture(size_max), []
    for data in written:
        capture.write(data)
        chunks += capture.take_chunks() if often else []
    capture.close()
    chunks += capture.take_chunks()
    whole = b"".join(written)
    kept = b"".join(data for _, data, _, _ in chunks)
    head = size_max - size_max // 2
    expected = whole if len(whole) <= size_max else whole[:head] + whole[len(whole) - size_max // 2 :]
    assert kept == expected
    assert sum(dropped for _, _, dropped, _ in chunks) == len(whole) - len(kept)
    assert [last for _, _, _, last in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(whole[at : at + len(data)] == data for at, data, _, _ in chunks)


def test_endless_output_takes_bounded_memory():
    capture = LogCapture(1000)
    for _ in range(1000):
        capture.write(b"x" * 100)
    assert sum(map(len, capture._tail)) < 700


@given(st.lists(st.text(max_size=30), max_size=10), st.integers(1, 7))
def test_messages_survive_any_cut_of_their_bytes(lines, step):
    unpacker, found = TaskProcessMessageReader(), []
    data = b"".join(pack_task_message(TaskProcessLogLine(1, line)) for line in lines) + pack_task_message(
        TaskProcessReady()
    )
    for start in range(0, len(data), step):
        found += unpacker.feed(data[start : start + step])
    assert found == [*(TaskProcessLogLine(1, line) for line in lines), TaskProcessReady()]


def test_nonsense_on_the_wire_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        list(TaskProcessMessageReader().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(msgspec.DecodeError):
        list(TaskProcessMessageReader().feed(pack_task_message(Work())))
    assert list(TaskProcessMessageReader().feed(pack_task_message(TaskProcessResult(1, "FAILED"))[:-1])) == []


def test_inputs_are_shared_only_when_nobody_can_change_them():
    assert decode_input(None).is_shareable
    assert decode_input(msgspec.msgpack.encode({"args": [1, "a", None, b"x", 1.5, True]})).is_shareable
    assert not decode_input(msgspec.msgpack.encode({"args": [[]]})).is_shareable
    assert not decode_input(msgspec.msgpack.encode({"kwargs": {"a": {}}})).is_shareable


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", lambda: 1])
def test_what_msgpack_cannot_write_is_unencodable(value):
    with pytest.raises(UnencodableResult):
        encode_result(value)


def test_a_value_that_holds_itself_is_unencodable():
    circle = []
    circle.append(circle)
    with pytest.raises(UnencodableResult):
        encode_result(circle)


def test_what_is_told_has_no_secret_and_can_travel():
    assert redact_and_truncate("postgres://u:pw@h/db failed with s3cret-1", {"MY_SECRET": "s3cret-1"}) == (
        "postgres://u:***@h/db failed with ***"
    )
    assert redact_and_truncate("a\ud800b") == "a?b"
    assert len(redact_and_truncate("x" * 100_000)) <= 10_000


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{frame}", "7"),
        ("a.{frame:04d}.exr", "a.0007.exr"),
        ("{frame:4d}", "0007"),
        ("{frames}", "{frames}"),
        ("{frame:x}", "{frame:x}"),
        ('{"frame": 1}', '{"frame": 1}'),
        ("{frame}{frame}", "77"),
    ],
)
def test_only_frame_is_filled_into_an_argv(word, filled):
    assert _expand_frame_placeholder(word, 7) == filled


def test_a_command_inherits_no_credentials(monkeypatch):
    monkeypatch.setenv("ROTA_NATS_URL", "nats://c4nary@host")
    about = frame_variables(msgspec.UNSET, "l", 3, 1, (0, 2))
    env = command_environment({"COLOUR": "blue"}, about, "/tmp/x")
    assert "ROTA_NATS_URL" not in env
    assert (env["COLOUR"], env["ROTA_FRAME"], env["ROTA_GPUS"], env["CUDA_VISIBLE_DEVICES"]) == (
        "blue",
        "3",
        "0,2",
        "0,2",
    )
    assert env["TMPDIR"] == "/tmp/x"


def test_what_a_frame_finds_about_itself_is_not_taken_for_a_setting():
    about = frame_variables("j", "l", 3, 1, ())
    assert {name for name in about if name.startswith("ROTA_")} <= set(FRAME_ENV)
    assert resolve((), about).settings == Settings()


def test_how_a_process_ended_in_words():
    assert describe_exit(3) == ("exit_status", "It ended with exit status 3.")
    assert describe_exit(-9) == ("signal", "It was ended by SIGKILL.")
    assert describe_exit(-60) == ("signal", "It was ended by signal 60.")


def test_the_store_keeps_the_same_content_once_and_notices_what_was_changed(tmp_path):
    store = FileStore(tmp_path / "deep" / "store")
    pointer = store.put(b"abc")
    assert store.put(b"abc") == pointer
    assert store.get(pointer) == b"abc"
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.write_bytes(b"abd")
    with pytest.raises(BlobCorrupted, match="not what was written"):
        store.get(pointer)
    with pytest.raises(InvalidInput, match="not a pointer"):
        store.get("file:../../etc/passwd")
    with pytest.raises(InvalidInput, match="workers read only from there"):
        store.get(f"pg:{'0' * 64}:3")
    with pytest.raises(BlobMissing):
        store.get(f"file:{'0' * 64}:3")


def test_the_machine_is_read_from_the_kernel(monkeypatch):
    assert host_metrics.cores() == 100 * len(os.sched_getaffinity(0))
    assert host_metrics.memory_mb() > 0
    meter = host_metrics.HostLoadMeter()
    sum(range(200_000))
    load = meter.sample()
    assert 0 <= load.cpu <= 100
    assert 0 < load.memory < 100
    monkeypatch.setattr(host_metrics, "_read_text", lambda _path: "")
    assert host_metrics.memory_mb() == 0
    assert host_metrics.HostLoadMeter().sample().cpu == 0.0


def test_gpus_are_found_by_nvml_where_it_is_installed(monkeypatch):
    class Nvml:
        def nvmlInit(self):
            return None

        def nvmlDeviceGetCount(self):
            return 2

        def nvmlDeviceGetHandleByIndex(self, place):
            return place

        def nvmlDeviceGetUtilizationRates(self, device):
            return type("Rates", (), {"gpu": 40 + 20 * device})

    monkeypatch.setattr(host_metrics, "import_module", lambda _name: Nvml())
    gpus = host_metrics.Gpus()
    assert (gpus.count, gpus.utilization()) == (2, 50.0)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert (host_metrics.Gpus().count, host_metrics.Gpus().utilization()) == (0, 0.0)
