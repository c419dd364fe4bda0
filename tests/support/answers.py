"""An HTTP server with scripted responses, for testing clients against faulty servers."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec

CUT = object()
"""Close the connection instead of responding."""


def answer(status=200, body=None, *, kind="application/msgpack", **headers):
    """Encode a response; underscores in header names become hyphens."""
    content = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    lines = [f"HTTP/1.1 {status} Word", f"content-type: {kind}", f"content-length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def problem(status, code, detail="No.", **more):
    facts, headers = more.pop("facts", {}), more
    body = msgspec.json.encode({"status": status, "code": code, "detail": detail, "facts": facts})
    return answer(status, body, kind="application/problem+json", **headers)


class Server:
    def __init__(self):
        self.answers = []
        """Bytes, `CUT`, or an async function that returns one of these; the last one repeats."""
        self.requests = []
        """Received requests, with method, path, headers and body."""
        self.serving = set()

    async def serve(self, reader, writer):
        self.serving.add(asyncio.current_task())
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).strip():
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                self.requests.append(SimpleNamespace(method=method, path=path, headers=headers, body=body))
                response = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                response = await response() if callable(response) else response
                if response is CUT:
                    break
                writer.write(response)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def answering(*answers, ssl=None):
    server = Server()
    server.answers = list(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=ssl)
    server.url = f"http{'s' if ssl else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in server.serving:
            task.cancel()
        await asyncio.gather(*server.serving, return_exceptions=True)
