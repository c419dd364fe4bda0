"""`ShowInterface` over real channels: authentication, replies, audit entries and the wire format."""

import asyncio
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import grpc
import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.accounting.admin import QuotaAdmin
from rota.accounting.service import AccountingService
from rota.infra.rpc.auth import bearer_interceptors
from rota.infra.rpc.calls import RpcMethod, RpcServer, caller_name
from rota.infra.rpc.protobuf import ProtobufMessage, decode, encode, fields
from rota.infra.service import Supervisor
from rota.model.errors import (
    InvalidInput,
    InvalidSetting,
    PortTaken,
    PostgresUnavailable,
    Refused,
    RotaError,
    SetupFailed,
)
from rota.model.settings import Settings, resolve
from rota.model.settings.process import GrpcSettings
from rota.server import grpc_services, shows
from rota.server.shows import GetShowRequest, SetSchedulerManagedRequest, ShowInterface, ShowReply
from tests.contract.ledger_suite import sql
from tests.support.waiting import until

ROTA = str(Path(sys.executable).with_name("rota"))
SECRET, WRONG_SECRET = "s3cret-" * 4, "str4nge-" * 4
SET, GET = "SetSchedulerManaged", "GetShow"
NAME = "/rota.v1.ShowInterface"
AUDIT_ENTRIES = sql("SELECT actor, action, target FROM rota.audit ORDER BY seq")


@asynccontextmanager
async def served(*services, **settings):
    server = RpcServer(GrpcSettings(**{"port": 0, "shared_secret": SECRET, **settings}), services)
    supervisor = Supervisor(drain_budget_s=5)
    supervisor.add(server.service)
    async with supervisor.running():
        yield server, supervisor


@asynccontextmanager
async def channel_to(port, secret=SECRET):
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", interceptors=bearer_interceptors(secret) if secret else None
    ) as channel:
        yield channel


async def call(channel, method, request):
    data = request if isinstance(request, bytes) else encode(request)
    return await channel.unary_unary(method if "/" in method else f"{NAME}/{method}")(data, timeout=10)


async def refused(*args):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(*args)
    return error.value.code(), error.value.details()


@pytest.fixture
async def duck(database):
    return (await QuotaAdmin(database).create_show("duck", actor="ann")).after


@pytest.fixture
async def port(database, redis, duck):
    async with served(ShowInterface(AccountingService(database, redis))) as (server, _):
        yield server.port


@pytest.fixture
async def channel(port):
    async with channel_to(port) as opened:
        yield opened


async def audit_entries(database):
    return [tuple(row) for row in await database.rows(AUDIT_ENTRIES)]


async def test_show_is_found_by_name_and_by_id(channel, duck):
    expected = ShowReply(str(duck.id), "duck", scheduler_managed=False, fence=1)
    for name in ("duck", str(duck.id), str(duck.id).upper()):
        assert decode(await call(channel, GET, GetShowRequest(name)), ShowReply) == expected


async def test_managed_flag_is_set_and_cleared_and_both_are_audited(channel, database, duck):
    began = len(await audit_entries(database))
    managed = decode(await call(channel, SET, SetSchedulerManagedRequest("duck", enabled=True)), ShowReply)
    assert (managed.scheduler_managed, (await QuotaAdmin(database).show("duck")).managed) == (True, True)
    assert managed == decode(await call(channel, GET, GetShowRequest("duck")), ShowReply)
    again = decode(await call(channel, SET, SetSchedulerManagedRequest(str(duck.id), enabled=True)), ShowReply)
    assert again == managed
    unmanaged = decode(await call(channel, SET, SetSchedulerManagedRequest("duck", enabled=False)), ShowReply)
    assert (unmanaged.scheduler_managed, unmanaged.fence > managed.fence) == (False, True)
    entry = ("grpc:127.0.0.1", "show.set_managed", "show:duck")
    assert (await audit_entries(database))[began:] == [entry, entry]


@pytest.mark.parametrize(("secret", "expected"), [(None, "carries no secret"), (WRONG_SECRET, "not accepted")])
async def test_call_without_valid_secret_changes_nothing(port, database, secret, expected):
    async with channel_to(port, secret) as channel:
        code, details = await refused(channel, SET, SetSchedulerManagedRequest("duck", enabled=True))
    assert (code, expected in details) == (grpc.StatusCode.UNAUTHENTICATED, True)
    assert (await QuotaAdmin(database).show("duck")).managed is False


@pytest.mark.parametrize("request_", [GetShowRequest("duk"), SetSchedulerManagedRequest("duk", enabled=True)])
async def test_unknown_show_is_not_found_and_suggests_the_nearest(channel, request_):
    method = GET if isinstance(request_, GetShowRequest) else SET
    expected = grpc.StatusCode.NOT_FOUND, "There is no show 'duk': did you mean duck?"
    assert await refused(channel, method, request_) == expected


async def test_request_without_enabled_flag_changes_nothing(channel, database):
    await call(channel, SET, SetSchedulerManagedRequest("duck", enabled=True))
    code, details = await refused(channel, SET, SetSchedulerManagedRequest("duck"))
    assert (code, "`enabled` is missing: set it to true" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert (await QuotaAdmin(database).show("duck")).managed is True


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x7fduck", b"\x07", b"\x0b", b"\x00", b"\xff" * 20, b"\x0a\x01\xff"])
async def test_malformed_request_bytes_are_refused_with_a_sentence(channel, data):
    code, details = await refused(channel, GET, data)
    assert (code, details.startswith("The request is not a protobuf message (")) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        True,
    )


async def test_oversized_request_is_refused(channel):
    assert (await refused(channel, GET, b"\x12" * 100_000))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_unknown_method_is_disclosed_only_to_authenticated_callers(port, channel):
    assert (await refused(channel, "Drop", b""))[0] is grpc.StatusCode.UNIMPLEMENTED
    async with channel_to(port, None) as anonymous:
        assert (await refused(anonymous, "Drop", b""))[0] is grpc.StatusCode.UNAUTHENTICATED


class StubService:
    """A service that answers with the given function."""

    name = "test.Odd"

    def __init__(self, answer):
        self.answer = answer

    def methods(self):
        return {"Do": RpcMethod(GetShowRequest, self.answer)}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInput("Wrong."), grpc.StatusCode.INVALID_ARGUMENT),
        (Refused("Not now."), grpc.StatusCode.FAILED_PRECONDITION),
        (PostgresUnavailable("Away."), grpc.StatusCode.UNAVAILABLE),
        (RotaError("Odd."), grpc.StatusCode.INTERNAL),
    ],
)
async def test_rota_error_maps_to_grpc_status_and_sentence(error, status):
    async def answer(_request, _caller):
        raise error

    async with served(StubService(answer)) as (server, _), channel_to(server.port) as channel:
        assert await refused(channel, "/test.Odd/Do", b"") == (status, error.sentence)


async def test_internal_error_is_logged_and_hidden_from_the_caller():
    async def answer(_request, _caller):
        raise RuntimeError("postgresql://u:hunter2@db")

    with structlog.testing.capture_logs() as logs:
        async with served(StubService(answer)) as (server, _), channel_to(server.port) as channel:
            code, details = await refused(channel, "/test.Odd/Do", b"")
    assert (code, "hunter2" in details) == (grpc.StatusCode.INTERNAL, False)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["rpc_internal_error"]


def closed(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_call_in_progress_finishes_before_shutdown():
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(_request, _caller):
        begun.set()
        await go_on.wait()
        return GetShowRequest("done")

    async with served(StubService(answer)) as (server, supervisor), channel_to(server.port) as channel:
        calling = asyncio.create_task(call(channel, "/test.Odd/Do", b""))
        await begun.wait()
        supervisor.request_stop()
        server.service.drain()
        await until(lambda: closed(server.port), what="the closed port")
        go_on.set()
        assert decode(await calling, GetShowRequest) == GetShowRequest("done")
    assert supervisor.exit_status == 0


async def test_port_in_use_is_refused():
    async with served() as (first, _):
        with pytest.raises(PortTaken, match=f"Port {first.port} on 127.0.0.1 is taken: .* set grpc.port"):
            async with served(port=first.port):
                pass


async def test_listening_port_cannot_be_shared_with_reuseport():
    async with served() as (server, _):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", server.port))


async def test_foreign_listen_address_is_refused_with_a_sentence():
    with pytest.raises(SetupFailed, match=r"Cannot serve gRPC on 192\.0\.2\.1 port 0: .* Set grpc.host"):
        async with served(host="192.0.2.1"):
            pass


async def test_calls_are_encrypted_with_a_certificate(certificate):
    async def answer(request, _caller):
        return request

    cert, key = certificate
    async with served(StubService(answer), tls_cert=str(cert), tls_key=str(key)) as (server, _):
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.secure_channel(address, trusted, interceptors=bearer_interceptors(SECRET)) as channel:
            assert await call(channel, "/test.Odd/Do", GetShowRequest("x")) == encode(GetShowRequest("x"))
        async with channel_to(server.port) as channel:
            assert (await refused(channel, "/test.Odd/Do", b""))[0] is grpc.StatusCode.UNAVAILABLE


async def test_invalid_certificate_files_are_refused_with_a_sentence(tmp_path):
    with pytest.raises(InvalidSetting, match=r"grpc\.tls_key cannot be read \(No such file"):
        async with served(tls_cert=str(tmp_path / "none"), tls_key=str(tmp_path / "none")):
            pass
    (tmp_path / "odd").write_text("no certificate")
    with pytest.raises(SetupFailed, match="belong together"):
        async with served(tls_cert=str(tmp_path / "odd"), tls_key=str(tmp_path / "odd")):
            pass


def read(**given):
    return resolve(environ={f"ROTA_GRPC_{name.upper()}": value for name, value in given.items()}).settings


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"host": "0.0.0.0", "shared_secret": SECRET}, "would not be encrypted: set grpc.tls_cert and grpc.tls_key"),
        ({"host": "farm.internal", "shared_secret": SECRET}, "would not be encrypted"),
        ({"tls_cert": "a.pem"}, "grpc.tls_cert and grpc.tls_key belong together"),
        ({"tls_key": "a.pem"}, "grpc.tls_cert and grpc.tls_key belong together"),
    ],
)
def test_settings_that_would_expose_the_secret_are_refused(given, sentence):
    with pytest.raises(InvalidSetting, match=re.escape(sentence)):
        read(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"host": "localhost", "shared_secret": SECRET},
        {"host": "127.0.0.2", "shared_secret": SECRET},
        {"host": "::1", "shared_secret": SECRET},
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "shared_secret": SECRET, "tls_cert": "a.pem", "tls_key": "b.pem"},
    ],
)
def test_settings_that_do_not_expose_the_secret_are_accepted(given):
    read(**given)


def test_grpc_is_not_served_without_a_secret():
    assert grpc_services(SimpleNamespace(settings=Settings())) == []


@pytest.mark.parametrize(
    ("peer", "named"),
    [("ipv4:127.0.0.1:50312", "grpc:127.0.0.1"), ("ipv6:%5B::1%5D:50312", "grpc:[::1]")],
)
def test_caller_name_is_its_peer_address(peer, named):
    assert caller_name(peer) == named


async def test_rota_server_serves_show_interface(stack, database, database_url, redis_url, duck, spawn):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await spawn(
        None,
        argv=[ROTA, "server"],
        env={
            "ROTA_POSTGRES_URL": database_url,
            "ROTA_REDIS_URL": redis_url,
            "ROTA_NATS_URL": stack.nats_url,
            "ROTA_LISTEN_PORT": "0",
            "ROTA_GRPC_PORT": str(port),
            "ROTA_GRPC_SHARED_SECRET": SECRET,
        },
    )
    async with channel_to(port) as channel:
        async with asyncio.timeout(30):
            await channel.channel_ready()
        reply = decode(await call(channel, SET, SetSchedulerManagedRequest("duck", enabled=True)), ShowReply)
    assert (reply.scheduler_managed, (await QuotaAdmin(database).show("duck")).fence) == (True, reply.fence)
    process.send(signal.SIGTERM)
    errors = await process.errors()
    assert (await process.wait(), SECRET in errors) == (0, False)


class Every(ProtobufMessage, frozen=True):
    """One field of each kind."""

    text: str = ""
    number: int = 0
    flag: bool = False
    maybe: bool | None = None


class Known(ProtobufMessage, frozen=True):
    """The message of protobuf's own documentation: a number 150 in field 1, "testing" in field 2."""

    number: int = 0
    text: str = ""


def test_encoding_matches_documented_protobuf_examples():
    assert encode(Known(150)) == bytes.fromhex("089601")
    assert encode(Known(0, "testing")) == bytes.fromhex("120774657374696e67")
    assert decode(bytes.fromhex("089601120774657374696e67"), Known) == Known(150, "testing")


messages = st.builds(
    Every,
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.none() | st.booleans(),
)


@settings(deadline=None)
@given(messages)
def test_message_round_trips(message):
    assert decode(encode(message), Every) == message


@settings(deadline=None)
@given(messages, st.sampled_from(["2a0161", "2896ff01", "310102030405060708", "3d01020304"]))
def test_unknown_fields_are_skipped(message, unknown):
    assert decode(bytes.fromhex(unknown) + encode(message) + bytes.fromhex(unknown), Every) == message


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_refused(data):
    with suppress(InvalidInput):
        assert isinstance(decode(data, Every), Every)


class Colour(IntEnum):
    NONE = 0
    RED = 1


class Nested(ProtobufMessage, frozen=True):
    """Nested and repeated fields, a map, and the other scalar types."""

    inner: Every | None = None
    many: tuple[Every, ...] = ()
    words: tuple[str, ...] = ()
    pairs: dict[str, str] = msgspec.field(default_factory=dict)
    real: float = 0.0
    data: bytes = b""
    colour: Colour = Colour.NONE


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
nested_messages = st.builds(
    Nested,
    st.none() | messages,
    st.lists(messages, max_size=3).map(tuple),
    st.lists(texts, max_size=3).map(tuple),
    st.dictionaries(texts, texts, max_size=3),
    st.floats(allow_nan=False),
    st.binary(max_size=9),
    st.sampled_from(Colour),
)


@settings(deadline=None)
@given(nested_messages)
def test_nested_message_round_trips(message):
    assert decode(encode(message), Nested) == message


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_decode_as_nested_message_or_are_refused(data):
    with suppress(InvalidInput):
        assert isinstance(decode(data, Nested), Nested)


def test_nested_encoding_matches_documented_bytes():
    """Field 3 with the message of field 1 = 150; a map is a list of pairs; a double is eight bytes."""
    assert encode(Nested(many=(Every(number=150),))) == bytes.fromhex("1203109601")
    assert encode(Nested(pairs={"a": "b"})) == bytes.fromhex("22060a016112" + "0162")
    assert encode(Nested(real=1.0)) == bytes.fromhex("29000000000000f03f")
    assert encode(Nested(colour=Colour.RED)) == bytes.fromhex("3801")


def test_unknown_enum_value_decodes_as_zero():
    assert decode(bytes.fromhex("3863"), Nested).colour is Colour.NONE


def test_last_duplicate_field_wins_and_wrong_wire_type_is_ignored():
    assert decode(encode(Known(1, "a")) + encode(Known(2, "b")), Known) == Known(2, "b")
    assert decode(bytes.fromhex("0a0161" + "1001"), Known) == Known()


def test_optional_false_field_is_encoded():
    assert encode(Every()) == b""
    assert encode(Every(maybe=False)) == bytes.fromhex("2000")


def test_messages_match_the_proto_file():
    """A client generated from the file must be understood."""
    proto = Path(shows.__file__).with_name("show.proto").read_text()
    kinds = {"string": str, "bool": bool, "uint64": int}
    declared = {
        name: {
            int(number): (field, kinds[kind], bool(optional))
            for optional, kind, field, number in re.findall(r"(optional )?(\w+) (\w+) = (\d+);", body)
        }
        for name, body in re.findall(r"message (\w+) {(.*?)}", proto, re.DOTALL)
    }
    ours = {
        {"ShowReply": "Show"}.get(each.__name__, each.__name__): {
            number: (field.name, field.kind, field.optional) for number, field in fields(each).items()
        }
        for each in (GetShowRequest, SetSchedulerManagedRequest, ShowReply)
    }
    assert declared == ours
    [package], [service] = re.findall(r"package ([\w.]+);", proto), re.findall(r"service (\w+)", proto)
    assert ShowInterface.name == f"{package}.{service}"
    calls = {name: call.request.__name__ for name, call in ShowInterface(None).methods().items()}
    assert dict(re.findall(r"rpc (\w+)\((\w+)\)", proto)) == calls
