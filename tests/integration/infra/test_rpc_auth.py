"""The shared secret of gRPC, on a real server and channel over loopback."""

import asyncio
import subprocess
import sys

import grpc
import pytest
import structlog

from rota.infra.rpc.auth import SharedSecretInterceptor, bearer_interceptors
from rota.model.errors import InvalidSetting

NEW, OLD, UNKNOWN = "n3w-" * 8, "0ld-" * 8, "str4nge-" * 4
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
    """Factory for servers with these interceptor arguments; returns a factory of channels with or without a secret."""
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
    """Send "a,b" with a call of this kind; returns the reply as a list of parts."""
    path = method or f"/test.Echo/{kind}"
    async with asyncio.timeout(5):
        match kind:
            case "UnaryUnary":
                return [await channel.unary_unary(path)(b"a,b", **more)]
            case "UnaryStream":
                return [part async for part in channel.unary_stream(path)(b"a,b", **more)]
            case "StreamUnary":
                return [await channel.stream_unary(path)(request_parts(), **more)]
            case "StreamStream":
                return [part async for part in channel.stream_stream(path)(request_parts(), **more)]


async def request_parts():
    yield b"a"
    yield b"b"


async def refused(*args, **more):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(*args, **more)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize("kind", KINDS)
async def test_call_with_the_secret_is_accepted(serve, kind):
    connect = await serve([NEW])
    expected = {"UnaryUnary": [b"a,b"], "StreamUnary": [b"a,b"]}.get(kind, [b"a", b"b"])
    assert await call(connect(NEW), kind) == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_call_without_a_secret_is_refused_with_a_message(serve, kind):
    connect = await serve([NEW])
    code, details = await refused(connect(), kind)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert details.startswith("This call carries no secret: send `authorization: Bearer <secret>`")


@pytest.mark.parametrize("kind", KINDS)
async def test_call_with_another_secret_is_refused_without_leaking_secrets(serve, kind):
    connect = await serve([NEW])
    with structlog.testing.capture_logs() as logs:
        code, details = await refused(connect(UNKNOWN), kind)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "not accepted" in details
    assert logs
    for secret in (NEW, UNKNOWN):
        assert secret not in f"{details} {logs}"


async def test_refused_stream_ends_although_its_caller_sent_nothing(serve):
    connect = await serve([NEW])
    silent = connect().stream_stream("/test.Echo/StreamStream")()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with asyncio.timeout(5):
            await silent.read()
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_caller_without_a_secret_cannot_discover_methods(serve):
    connect = await serve([NEW])
    assert (await refused(connect(), "UnaryUnary", "/test.Echo/None"))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await refused(connect(NEW), "UnaryUnary", "/test.Echo/None"))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_secret_rotation_accepts_both_secrets_and_afterwards_one(serve):
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
        [("authorization", f"Bearer {NEW}"), ("authorization", f"Bearer {UNKNOWN}")],
        [("x-authorization", f"Bearer {NEW}")],
    ],
)
async def test_only_one_exact_bearer_header_is_accepted(serve, headers):
    connect = await serve([NEW])
    assert (await refused(connect(), "UnaryUnary", metadata=headers))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_caller_metadata_is_forwarded_and_cannot_replace_the_secret(serve):
    connect = await serve([NEW])
    metadata = [("traceparent", "00-1"), ("authorization", "Bearer wrong")]
    assert await call(connect(NEW), "UnaryUnary", metadata=metadata) == [b"a,b"]


async def test_only_open_methods_need_no_secret(serve):
    connect = await serve([NEW], open_methods=[HEALTH])
    assert await call(connect(), "UnaryUnary", HEALTH) == [b"a,b"]
    assert (await refused(connect(), "UnaryUnary"))[0] is grpc.StatusCode.UNAUTHENTICATED
    closed = await serve([NEW])
    assert (await refused(closed(), "UnaryUnary", HEALTH))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("secrets", [[], [""], ["short"], [NEW, "short"], ["has spaces in it, so it has"], ["ü" * 20]])
def test_server_does_not_start_without_a_strong_secret(secrets):
    with pytest.raises(InvalidSetting) as error:
        SharedSecretInterceptor(secrets)
    assert "short" not in error.value.sentence


def test_secrets_are_hidden_in_repr():
    for thing in (SharedSecretInterceptor([NEW]), *bearer_interceptors(NEW)):
        shown = f"{thing!r} {vars(thing)!r}"
        assert NEW not in shown


def test_grpc_is_not_imported_by_code_that_does_not_use_it():
    script = "import sys, rota.infra, rota.infra.rpc; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
