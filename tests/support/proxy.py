"""A TCP proxy in front of a server: delays, cuts, half-open connections, lost replies, and errors in place of Redis."""

import asyncio
import contextlib
from enum import Enum

CHUNK_BYTES = 65536
CLOSE_S = 5.0


class Mode(Enum):
    PASS = "pass"
    CUT = "cut"
    HALF_OPEN = "half_open"
    DROP_REPLIES = "drop_replies"
    REFUSE = "refuse"


PASSED_COMMANDS = (b"CLIENT", b"SELECT", b"AUTH", b"INFO", b"PING")
"""Commands that `refuse` lets through: they open connections and check them."""


class Proxy:
    """Forwards `host:port` to the target. A mode change applies to open and new connections."""

    def __init__(self, target_host, target_port):
        self._target = (target_host, target_port)
        self._mode = Mode.PASS
        self._server = None
        self._links = {}
        self._refusal = b""
        self.refused = 0
        """Commands that were refused so far."""
        self.cuts = 0
        """Connections that were refused so far."""
        self.delay_s = 0.0
        self.host = "127.0.0.1"
        self.port = 0

    async def start(self):
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self):
        self._server.close()
        self.cut()
        # Not cancelled, because asyncio logs a cancelled connection handler as an error.
        if self._links:
            _, stuck = await asyncio.wait(list(self._links), timeout=CLOSE_S)
            assert not stuck, f"connections through the proxy did not end: {stuck}"

    @property
    def open_count(self):
        """Number of open connections."""
        return len(self._links)

    def url(self, url):
        """`url` with the address of the target replaced by that of the proxy."""
        host, port = self._target
        assert f"{host}:{port}" in url
        return url.replace(f"{host}:{port}", f"{self.host}:{self.port}")

    def cut(self):
        """Break every connection and refuse new ones, like an unreachable host."""
        self._mode = Mode.CUT
        self.reset()

    def redirect(self, host, port):
        """Connect new clients to another server; open connections stay."""
        self._target = (host, port)

    def half_open(self):
        """Drop all data in both directions while connections stay open."""
        self._mode = Mode.HALF_OPEN

    def drop_replies(self):
        """Deliver requests and drop their replies."""
        self._mode = Mode.DROP_REPLIES

    def refuse(self, error):
        """Answer the commands of Redis clients with this error, such as `LOADING not yet`, instead of passing them."""
        self._refusal = f"-{error}\r\n".encode()
        self._mode = Mode.REFUSE
        self.reset()  # new connections begin with a whole command

    def heal(self):
        self._mode = Mode.PASS
        self.delay_s = 0.0

    def reset(self):
        """Break every open connection once; the mode applies to new ones."""
        for ends in self._links.values():
            for end in ends:
                end.transport.abort()

    async def _accept(self, reader, writer):
        if self._mode is Mode.CUT:
            self.cuts += 1
            writer.transport.abort()
            return
        ends = self._links[asyncio.current_task()] = [writer]
        try:
            there, onward = await asyncio.open_connection(*self._target)
            ends.append(onward)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, onward, back=writer))
                group.create_task(self._pump(there, writer))
        except* (OSError, Closed):
            pass
        finally:
            for end in ends:
                end.transport.abort()
            del self._links[asyncio.current_task()]

    async def _pump(self, reader, writer, *, back=None):
        """`back` is the client of a pump of requests, None for replies."""
        held = b""
        while chunk := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._mode is Mode.HALF_OPEN or (back is None and self._mode is Mode.DROP_REPLIES):
                continue
            if back is not None and self._mode is Mode.REFUSE:
                held, chunk = self._refuse(held + chunk, back)
            writer.write(chunk)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        raise Closed

    def _refuse(self, data, client):
        """Refuse the complete commands in `data`; returns the incomplete rest, and what to pass on."""
        passed = b""
        while (end := _command_end(data)) is not None:
            command, data = data[:end], data[end:]
            if command.split(b"\r\n", 3)[2].upper() in PASSED_COMMANDS:
                passed += command
            else:
                client.write(self._refusal)
                self.refused += 1
        return data, passed


def _command_end(data):
    """Where the first command (an array of bulk strings) ends, or None."""
    head, found, _ = data.partition(b"\r\n")
    end = len(head) + 2
    for _ in range(int(head[1:])) if found else ():
        head, found, _ = data[end:].partition(b"\r\n")
        if not found:
            return None
        end += len(head) + 2 + int(head[1:]) + 2
    return end if found and end <= len(data) else None


class Closed(Exception):
    """One side closed the connection, so the other is closed too."""
