"""Worker modules without I/O: received tokens, capacity, log capture, inputs, the environment of a frame."""

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import BlobCorrupted, BlobMissing, InvalidInput
from rota.model.jobs.work import FRAME_ENV, Work
from rota.model.settings import Settings
from rota.model.settings.resolve import resolve
from rota.model.token_ranges import iterate_tokens
from rota.worker import host_metrics, token_deduplicator
from rota.worker.capacity import WorkerCapacity
from rota.worker.data.blob_store import FileStore
from rota.worker.data.log_capture import LogCapture
from rota.worker.outcomes import UnencodableResult, decode_input, encode_result, redact_and_truncate
from rota.worker.processes.ipc import MessageReader, ProcessReady, pack_message
from rota.worker.processes.os_process import describe_exit
from rota.worker.registration_info import RegistrationInfo
from rota.worker.runners.command_runner import _expand_frame_placeholder
from rota.worker.runners.environment import command_environment, frame_variables
from rota.worker.runners.process_messages import (
    TASK_MESSAGE_BYTES_MAX,
    TASK_MESSAGE_DECODER,
    TaskProcessLogLine,
    TaskProcessResult,
)
from rota.worker.token_deduplicator import TokenDeduplicator

range_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


@given(range_lists)
def test_token_taken_once_is_never_new_again(ranges):
    seen, known = TokenDeduplicator(), set()
    for first, n in ranges:
        fresh = list(iterate_tokens(seen.take_new(first, n)))
        assert fresh == [token for token in range(first, first + n) if token not in known]
        known.update(fresh)


def test_oldest_token_ranges_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(token_deduplicator, "RANGES_MAX", 2)
    seen = TokenDeduplicator()
    for first in (10, 20, 30):
        assert seen.take_new(first, 1)
    assert seen.take_new(30, 1) == seen.take_new(20, 1) == []
    assert seen.take_new(10, 1) == [(10, 1)]


def test_capacity_is_limited_by_the_scarcest_resource():
    capacity = WorkerCapacity(RegistrationInfo(name="w", pool="p", slots=10, cores=400, gpus=3, memory_mb=1000))
    assert capacity.fitting_count(Work(cores=100), 100) == 4
    assert capacity.fitting_count(Work(cores=1), 100) == 10
    assert capacity.fitting_count(Work(cores=1, gpus=2), 100) == 1
    assert capacity.fitting_count(Work(cores=1, memory_mb=400), 100) == 2
    capacity.reserve(Work(cores=100), 4)
    assert capacity.fitting_count(Work(cores=1), 1) == 0
    capacity.release(Work(cores=100), 3)
    assert capacity.fitting_count(Work(cores=100), 9) == 3
    devices = capacity.reserve_devices(2)
    capacity.release_devices(devices)
    assert sorted(capacity.reserve_devices(3)) == [0, 1, 2]


def test_worker_with_unknown_memory_does_not_limit_it():
    assert (
        WorkerCapacity(RegistrationInfo(name="w", pool="p", slots=1, cores=100)).fitting_count(Work(memory_mb=10**6), 1)
        == 1
    )


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 60), st.booleans())
def test_log_capture_keeps_head_and_tail_and_counts_dropped_bytes(written, size_max, often):
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


def test_log_capture_of_endless_output_uses_bounded_memory():
    capture = LogCapture(1000)
    for _ in range(1000):
        capture.write(b"x" * 100)
    assert sum(map(len, capture._tail)) < 700


def messages_in(reader, data):
    """Feed `data` and pop all complete messages."""
    reader.feed(data)
    found = []
    while (message := reader.pop()) is not None:
        found.append(message)
    return found


def task_reader():
    return MessageReader(TASK_MESSAGE_DECODER, TASK_MESSAGE_BYTES_MAX)


@given(st.lists(st.text(max_size=30), max_size=10), st.integers(1, 7))
def test_process_messages_survive_any_split_of_their_bytes(lines, step):
    reader, found = task_reader(), []
    sent = [*(TaskProcessLogLine(1, line) for line in lines), ProcessReady()]
    data = b"".join(map(pack_message, sent))
    for start in range(0, len(data), step):
        found += messages_in(reader, data[start : start + step])
    assert found == sent


def test_malformed_process_message_raises():
    with pytest.raises(msgspec.DecodeError):
        messages_in(task_reader(), b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.DecodeError):
        messages_in(task_reader(), pack_message(Work()))
    assert messages_in(task_reader(), pack_message(TaskProcessResult(1, "FAILED"))[:-1]) == []


def test_input_is_shareable_only_if_immutable():
    assert decode_input(None).is_shareable
    assert decode_input(msgspec.msgpack.encode({"args": [1, "a", None, b"x", 1.5, True]})).is_shareable
    assert not decode_input(msgspec.msgpack.encode({"args": [[]]})).is_shareable
    assert not decode_input(msgspec.msgpack.encode({"kwargs": {"a": {}}})).is_shareable


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", lambda: 1])
def test_result_that_msgpack_cannot_encode_is_unencodable(value):
    with pytest.raises(UnencodableResult):
        encode_result(value)


def test_cyclic_result_is_unencodable():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(UnencodableResult):
        encode_result(cycle)


def test_reported_text_is_redacted_encodable_and_truncated():
    assert redact_and_truncate("postgres://u:pw@h/db failed with s3cret-1", {"MY_SECRET": "s3cret-1"}) == (
        "postgres://u:***@h/db failed with ***"
    )
    assert redact_and_truncate("a\ud800b") == "a?b"
    assert len(redact_and_truncate("x" * 100_000)) <= 10_000


@pytest.mark.parametrize(
    ("argument", "expanded"),
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
def test_argv_expands_only_the_frame_placeholder(argument, expanded):
    assert _expand_frame_placeholder(argument, 7) == expanded


def test_command_environment_has_no_credentials(monkeypatch):
    monkeypatch.setenv("ROTA_NATS_URL", "nats://c4nary@host")
    variables = frame_variables(msgspec.UNSET, "l", 3, 1, (0, 2))
    env = command_environment({"COLOUR": "blue"}, variables, "/tmp/x")
    assert "ROTA_NATS_URL" not in env
    assert (env["COLOUR"], env["ROTA_FRAME"], env["ROTA_GPUS"], env["CUDA_VISIBLE_DEVICES"]) == (
        "blue",
        "3",
        "0,2",
        "0,2",
    )
    assert env["TMPDIR"] == "/tmp/x"


def test_frame_variables_are_not_read_as_settings():
    variables = frame_variables("j", "l", 3, 1, ())
    assert {name for name in variables if name.startswith("ROTA_")} <= set(FRAME_ENV)
    assert resolve((), variables).settings == Settings()


def test_process_exit_is_described():
    assert describe_exit(3) == ("exit_status", "It ended with exit status 3.")
    assert describe_exit(-9) == ("signal", "It was ended by SIGKILL.")
    assert describe_exit(-60) == ("signal", "It was ended by signal 60.")


def test_file_store_deduplicates_content_and_detects_corruption(tmp_path):
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


def test_host_metrics_are_read_from_the_kernel(monkeypatch):
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


def test_gpus_are_counted_by_nvml_if_installed(monkeypatch):
    class Nvml:
        def nvmlInit(self):
            return None

        def nvmlDeviceGetCount(self):
            return 2

        def nvmlDeviceGetHandleByIndex(self, index):
            return index

        def nvmlDeviceGetUtilizationRates(self, device):
            return type("Rates", (), {"gpu": 40 + 20 * device})

    monkeypatch.setattr(host_metrics, "import_module", lambda _name: Nvml())
    gpus = host_metrics.Gpus()
    assert (gpus.count, gpus.utilization()) == (2, 50.0)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert (host_metrics.Gpus().count, host_metrics.Gpus().utilization()) == (0, 0.0)
