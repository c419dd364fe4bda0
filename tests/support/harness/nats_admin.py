"""A blocking client of JetStream's API, one per test process: a connection per test would cost more than its use."""

import json
import os
import socket
from urllib.parse import urlsplit

TIMEOUT_S = 10.0


class NatsAdmin:
    def __init__(self, url):
        self._url = url
        self._inbox = f"_INBOX.tests.{os.getpid()}".encode()
        self._socket = None
        self._reader = None

    def delete_streams(self, prefix):
        """Delete the streams whose name is `prefix` or begins with `prefix_`."""
        for name in self._streams():
            if name == prefix or name.startswith(f"{prefix}_"):
                self._ask(f"STREAM.DELETE.{name}")

    def close(self):
        if self._socket is not None:
            self._reader.close()
            self._socket.close()
            self._socket = None

    def _streams(self):
        found, total = [], 1
        while len(found) < total:
            reply = self._ask("STREAM.NAMES", {"offset": len(found)})
            found += reply["streams"] or []
            total = reply["total"]
        return found

    def _ask(self, endpoint, request=None):
        try:
            return self._request(endpoint, request)
        except (OSError, EOFError):  # the server closes connections that leave its pings unanswered for minutes
            self.close()
            return self._request(endpoint, request)

    def _request(self, endpoint, request):
        if self._socket is None:
            self._connect()
        payload = json.dumps(request).encode() if request else b""
        self._socket.sendall(
            b"PUB $JS.API.%s %s %d\r\n%s\r\n" % (endpoint.encode(), self._inbox, len(payload), payload)
        )
        while True:
            kind, *words = self._line().split()
            if kind == b"PING":
                self._socket.sendall(b"PONG\r\n")
            elif kind == b"-ERR":
                raise AssertionError(f"NATS refused {endpoint}: {b' '.join(words).decode()}")
            elif kind == b"MSG":
                reply = json.loads(self._reader.read(int(words[-1]) + 2))
                assert "error" not in reply, f"{endpoint}: {reply['error']}"
                return reply

    def _connect(self):
        at = urlsplit(self._url)
        self._socket = socket.create_connection((at.hostname, at.port), TIMEOUT_S)
        self._reader = self._socket.makefile("rb")
        self._line()  # INFO
        options = {"verbose": False, "pedantic": False, "user": at.username, "pass": at.password, "name": "rota tests"}
        self._socket.sendall(b"CONNECT %s\r\nSUB %s 1\r\n" % (json.dumps(options).encode(), self._inbox))

    def _line(self):
        line = self._reader.readline()
        if not line:
            raise EOFError("NATS has closed the connection")
        return line
