"""The shared secret of gRPC, on a real server and channel over loopback."""

import asyncio
import subprocess
import sys

import grpc
import pytest
import structlog

from rota.infra.rpc.auth import SharedSecretInterceptor, bearer_interceptors
from rota.model.errors import InvalidSetting

NEW, OLD, STRANGE = "n3w-" * 8, "0ld-" * 8, "str4nge-" * 4
KINDS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")
HEALTH = "/test.Echo/Health"


async def unary(request, _context):
    return request


async def from_stream(requests, _context):
    return b",".join([request async for request in requests])


async def to_stream(request, _context):
    for part in request.split(b","):
        yield part


async def both_streams(requests, _context):
    async for request in requests:
        yield request


METHODS = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(to_stream),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(from_stream),
    "StreamStream": grpc.stream_stream_rpc_method_handler(both_streams),
    "Health": grpc.unary_unary_rpc_method_handler(unary),
}


@pytest.fixture
async def serve():
    """Factory: a server with these interceptor arguments; gives a factory of channels with a secret, or without."""
    started, channels = [], []

    async def start(*args, **more):
        server = grpc.aio.server(interceptors=[SharedSecretInterceptor(*args, **more)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", METHODS),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.append(server)

        def connect(secret=None):
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", interceptors=bearer_interceptors(secret) if secret else None
            )
            channels.append(channel)
            return channel

        return connect

    yield start
    for channel in channels:
        await channel.close()
    for server in started:
        await server.stop(grace=5)


async def call(channel, kind, method=None, **more):
    """Say "a,b" by a call of this kind; the answer as a list of parts."""
    path = method or f"/test.Echo/{kind}"
    async with asyncio.timeout(5):
        match kind:
            case "UnaryUnary":
                return [await channel.unary_unary(path)(b"a,b", **more)]
            case "UnaryStream":
                return [part async for part in channel.unary_stream(path)(b"a,b", **more)]
            case "StreamUnary":
                return [await channel.stream_unary(path)(said(), **more)]
            case "StreamStream":
                return [part async for part in channel.stream_stream(path)(said(), **more)]


async def said():
    yield b"a"
    yield b"b"


async def refused(*args, **more):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(*args, **more)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_the_secret_is_let_in(serve, kind):
    connect = await serve([NEW])
    expected = {"UnaryUnary": [b"a,b"], "StreamUnary": [b"a,b"]}.get(kind, [b"a", b"b"])
    assert await call(connect(NEW), kind) == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_a_secret_is_refused_with_a_sentence(serve, kind):
    connect = await serve([NEW])
    code, details = await refused(connect(), kind)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert details.startswith("This call carries no secret: send `authorization: Bearer <secret>`")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_another_secret_is_refused_and_no_secret_is_told(serve, kind):
    connect = await serve([NEW])
    with structlog.testing.capture_logs() as logs:
        code, details = await refused(connect(STRANGE), kind)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "not accepted" in details
    assert logs
    for secret in (NEW, STRANGE):
        assert secret not in f"{details} {logs}"


async def test_a_refused_stream_ends_although_its_caller_has_said_nothing(serve):
    connect = await serve([NEW])
    silent = connect().stream_stream("/test.Echo/StreamStream")()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with asyncio.timeout(5):
            await silent.read()
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_has_no_secret_does_not_learn_which_methods_exist(serve):
    connect = await serve([NEW])
    assert (await refused(connect(), "UnaryUnary", "/test.Echo/None"))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await refused(connect(NEW), "UnaryUnary", "/test.Echo/None"))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_while_secrets_rotate_both_are_accepted_and_afterwards_one(serve):
    rotating = await serve([NEW, OLD])
    for secret in (NEW, OLD):
        assert await call(rotating(secret), "UnaryUnary") == [b"a,b"]
    rotated = await serve([NEW])
    assert (await refused(rotated(OLD), "UnaryUnary"))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", NEW)],
        [("authorization", f"Basic {NEW}")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {NEW[:-1]}")],
        [("authorization", f"Bearer {NEW}x")],
        [("authorization", f"Bearer {NEW}"), ("authorization", f"Bearer {STRANGE}")],
        [("x-authorization", f"Bearer {NEW}")],
    ],
)
async def test_only_one_exact_bearer_header_counts(serve, headers):
    connect = await serve([NEW])
    assert (await refused(connect(), "UnaryUnary", metadata=headers))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_the_callers_own_metadata_travels_and_cannot_replace_the_secret(serve):
    connect = await serve([NEW])
    metadata = [("traceparent", "00-1"), ("authorization", "Bearer wrong")]
    assert await call(connect(NEW), "UnaryUnary", metadata=metadata) == [b"a,b"]


async def test_only_methods_named_as_open_need_no_secret(serve):
    connect = await serve([NEW], open_methods=[HEALTH])
    assert await call(connect(), "UnaryUnary", HEALTH) == [b"a,b"]
    assert (await refused(connect(), "UnaryUnary"))[0] is grpc.StatusCode.UNAUTHENTICATED
    closed = await serve([NEW])
    assert (await refused(closed(), "UnaryUnary", HEALTH))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("secrets", [[], [""], ["short"], [NEW, "short"], ["has spaces in it, so it has"], ["ü" * 20]])
def test_a_server_does_not_start_without_a_strong_secret(secrets):
    with pytest.raises(InvalidSetting) as error:
        SharedSecretInterceptor(secrets)
    assert "short" not in error.value.sentence


def test_no_secret_shows_in_a_repr():
    for thing in (SharedSecretInterceptor([NEW]), *bearer_interceptors(NEW)):
        shown = f"{thing!r} {vars(thing)!r}"
        assert NEW not in shown


def test_grpc_is_not_imported_by_those_who_do_not_use_it():
    script = "import sys, rota.infra, rota.infra.rpc; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
