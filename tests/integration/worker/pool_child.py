"""A child process of the pool tests: a request names what to do."""

import os
import signal
import time
from typing import Final

import msgspec

from rota.worker.processes.ipc import ProcessReady, pack_message
from rota.worker.processes.main import run_child


class PoolRequest(msgspec.Struct, frozen=True, array_like=True):
    action: str
    data: bytes = b""


class PoolReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    data: bytes = b""


MESSAGE_DECODER: Final = msgspec.msgpack.Decoder(ProcessReady | PoolReply)
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024


class Handler:
    def __init__(self, connection):
        self._connection = connection

    def __call__(self, request):
        match request.action:
            case "echo":
                return PoolReply(request.data)
            case "sleep":
                time.sleep(float(request.data))
                return PoolReply(request.data)
            case "pid":
                return PoolReply(str(os.getpid()).encode())
            case "die in the middle of a reply":
                whole = pack_message(PoolReply(request.data))
                self._connection.sendall(whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            case "ignore SIGTERM":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self._connection.sendall(pack_message(PoolReply(b"ignoring")))
            case "fork":
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
        while True:
            signal.pause()


def main():
    connection = []
    run_child(
        msgspec.msgpack.Decoder(PoolRequest),
        lambda _app, _channel, _folder: Handler(connection[0]),
        lambda given, _descriptors: connection.append(given),
    )


if __name__ == "__main__":
    main()
