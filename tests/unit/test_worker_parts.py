"""The worker's pure parts: runs of tokens, room, captured output, inputs, the environment of a frame."""

import os
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import BlobDamaged, BlobMissing, InvalidInput
from rota.model.settings import Settings
from rota.model.settings.resolve import resolve
from rota.model.work import FRAME_ENV, Work
from rota.worker import machine, runs
from rota.worker.capture import Capture
from rota.worker.commands import _filled
from rota.worker.endings import Unencodable, encoded, read_input, told
from rota.worker.environment import about_frame, for_command
from rota.worker.offer import Offer
from rota.worker.room import Room
from rota.worker.runs import Seen, joined, within
from rota.worker.spawned import how_it_ended
from rota.worker.store import FileStore
from rota.worker.wire import Ended, Logged, Ready, Unpacker, packed

some_runs = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


def tokens(found):
    return [token for first, n in found for token in range(first, first + n)]


@given(some_runs)
def test_joined_runs_hold_the_same_tokens_once_each_and_are_as_few_as_can_be(given_runs):
    found = joined(given_runs)
    assert tokens(found) == sorted(set(tokens(given_runs)))
    assert all(first + n < after for (first, n), (after, _) in pairwise(found))


@given(some_runs)
def test_what_was_seen_is_never_fresh_again(given_runs):
    seen, known = Seen(), set()
    for first, n in given_runs:
        fresh = tokens(seen.fresh(first, n))
        assert fresh == [token for token in range(first, first + n) if token not in known]
        known.update(fresh)


def test_the_oldest_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(runs, "REMEMBERED", 2)
    seen = Seen()
    for first in (10, 20, 30):
        assert seen.fresh(first, 1)
    assert seen.fresh(30, 1) == seen.fresh(20, 1) == []
    assert seen.fresh(10, 1) == [(10, 1)]


def test_tokens_of_a_run_between_two_ends():
    assert list(within((5, 10), 7, 9)) == [7, 8]
    assert list(within((5, 2), 9, 12)) == []


def test_room_is_what_the_scarcest_thing_allows():
    room = Room(Offer(name="w", pool="p", slots=10, cores=400, gpus=3, memory_mb=1000))
    assert room.fitting(Work(cores=100), 100) == 4
    assert room.fitting(Work(cores=1), 100) == 10
    assert room.fitting(Work(cores=1, gpus=2), 100) == 1
    assert room.fitting(Work(cores=1, memory_mb=400), 100) == 2
    room.take(Work(cores=100), 4)
    assert room.fitting(Work(cores=1), 1) == 0
    room.give(Work(cores=100), 3)
    assert room.fitting(Work(cores=100), 9) == 3
    devices = room.take_devices(2)
    room.give_devices(devices)
    assert sorted(room.take_devices(3)) == [0, 1, 2]


def test_a_worker_that_does_not_know_its_memory_counts_none():
    assert Room(Offer(name="w", pool="p", slots=1, cores=100)).fitting(Work(memory_mb=10**6), 1) == 1


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 60), st.booleans())
def test_captured_output_is_the_head_and_the_tail_and_the_count_between(written, size_max, often):
    capture, chunks = Capture(size_max), []
    for data in written:
        capture.write(data)
        chunks += capture.take() if often else []
    capture.close()
    chunks += capture.take()
    whole = b"".join(written)
    kept = b"".join(data for _, data, _, _ in chunks)
    head = size_max - size_max // 2
    expected = whole if len(whole) <= size_max else whole[:head] + whole[len(whole) - size_max // 2 :]
    assert kept == expected
    assert sum(dropped for _, _, dropped, _ in chunks) == len(whole) - len(kept)
    assert [last for _, _, _, last in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(whole[at : at + len(data)] == data for at, data, _, _ in chunks)


def test_endless_output_takes_bounded_memory():
    capture = Capture(1000)
    for _ in range(1000):
        capture.write(b"x" * 100)
    assert sum(map(len, capture._tail)) < 700


@given(st.lists(st.text(max_size=30), max_size=10), st.integers(1, 7))
def test_messages_survive_any_cut_of_their_bytes(lines, step):
    unpacker, found = Unpacker(), []
    data = b"".join(packed(Logged(1, line)) for line in lines) + packed(Ready())
    for start in range(0, len(data), step):
        found += unpacker.feed(data[start : start + step])
    assert found == [*(Logged(1, line) for line in lines), Ready()]


def test_nonsense_on_the_wire_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        list(Unpacker().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(msgspec.DecodeError):
        list(Unpacker().feed(packed(Work())))
    assert list(Unpacker().feed(packed(Ended(1, "FAILED"))[:-1])) == []


def test_inputs_are_shared_only_when_nobody_can_change_them():
    assert read_input(None).shareable
    assert read_input(msgspec.msgpack.encode({"args": [1, "a", None, b"x", 1.5, True]})).shareable
    assert not read_input(msgspec.msgpack.encode({"args": [[]]})).shareable
    assert not read_input(msgspec.msgpack.encode({"kwargs": {"a": {}}})).shareable


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", lambda: 1])
def test_what_msgpack_cannot_write_is_unencodable(value):
    with pytest.raises(Unencodable):
        encoded(value)


def test_a_value_that_holds_itself_is_unencodable():
    circle = []
    circle.append(circle)
    with pytest.raises(Unencodable):
        encoded(circle)


def test_what_is_told_has_no_secret_and_can_travel():
    assert told("postgres://u:pw@h/db failed with s3cret-1", {"MY_SECRET": "s3cret-1"}) == (
        "postgres://u:***@h/db failed with ***"
    )
    assert told("a\ud800b") == "a?b"
    assert len(told("x" * 100_000)) <= 10_000


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
    assert _filled(word, 7) == filled


def test_a_command_inherits_no_credentials(monkeypatch):
    monkeypatch.setenv("ROTA_NATS_URL", "nats://c4nary@host")
    about = about_frame(msgspec.UNSET, "l", 3, 1, (0, 2))
    env = for_command({"COLOUR": "blue"}, about, "/tmp/x")
    assert "ROTA_NATS_URL" not in env
    assert (env["COLOUR"], env["ROTA_FRAME"], env["ROTA_GPUS"], env["CUDA_VISIBLE_DEVICES"]) == (
        "blue",
        "3",
        "0,2",
        "0,2",
    )
    assert env["TMPDIR"] == "/tmp/x"


def test_what_a_frame_finds_about_itself_is_not_taken_for_a_setting():
    about = about_frame("j", "l", 3, 1, ())
    assert {name for name in about if name.startswith("ROTA_")} <= set(FRAME_ENV)
    assert resolve((), about).settings == Settings()


def test_how_a_process_ended_in_words():
    assert how_it_ended(3) == ("exit_status", "It ended with exit status 3.")
    assert how_it_ended(-9) == ("signal", "It was ended by SIGKILL.")
    assert how_it_ended(-60) == ("signal", "It was ended by signal 60.")


def test_the_store_keeps_the_same_content_once_and_notices_what_was_changed(tmp_path):
    store = FileStore(tmp_path / "deep" / "store")
    pointer = store.put(b"abc")
    assert store.put(b"abc") == pointer
    assert store.get(pointer) == b"abc"
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.write_bytes(b"abd")
    with pytest.raises(BlobDamaged, match="not what was written"):
        store.get(pointer)
    with pytest.raises(InvalidInput, match="no pointer"):
        store.get("file:../../etc/passwd")
    with pytest.raises(InvalidInput, match="reads nothing else"):
        store.get(f"pg:{'0' * 64}:3")
    with pytest.raises(BlobMissing):
        store.get(f"file:{'0' * 64}:3")


def test_the_machine_is_read_from_the_kernel(monkeypatch):
    assert machine.cores() == 100 * len(os.sched_getaffinity(0))
    assert machine.memory_mb() > 0
    meter = machine.Meter()
    sum(range(200_000))
    load = meter.look()
    assert 0 <= load.cpu <= 100
    assert 0 < load.memory < 100
    monkeypatch.setattr(machine, "_text", lambda _path: "")
    assert machine.memory_mb() == 0
    assert machine.Meter().look().cpu == 0.0


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

    monkeypatch.setattr(machine, "import_module", lambda _name: Nvml())
    gpus = machine.Gpus()
    assert (gpus.count, gpus.utilization()) == (2, 50.0)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert (machine.Gpus().count, machine.Gpus().utilization()) == (0, 0.0)
