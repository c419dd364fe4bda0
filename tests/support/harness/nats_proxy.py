"""A proxy in front of NATS that answers calls of its clients with errors, in place of the server.

    between.answer(pull=CONSUMER_DELETED, create=api_error(503, 10023, "insufficient resources"))

The server does not get a call that is answered here. Calls are named as in `kind_of`.
"""

import contextlib
import re
from collections import Counter

import msgspec

from tests.support.proxy import CHUNK_BYTES, Closed, Proxy

WITH_PAYLOAD = (b"PUB", b"HPUB", b"MSG", b"HMSG")
CREATE = re.compile(r"\$JS\.API\.(STREAM|CONSUMER)\.(DURABLE\.)?(CREATE|UPDATE)\.")


def silence(_subject, _sid):
    """No answer at all: the caller waits until its timeout."""
    return b""


def status(code, description=""):
    """A status without data, as NATS sends it to pulls, and to everybody when nobody listens."""

    def answer(subject, sid):
        header = f"NATS/1.0 {code} {description}".rstrip().encode() + b"\r\n\r\n"
        return f"HMSG {subject} {sid} {len(header)} {len(header)}\r\n".encode() + header + b"\r\n"

    return answer


def api_error(code, err_code, description):
    """An error of the JetStream API, as in NATS's server/errors.json."""
    data = msgspec.json.encode({"error": {"code": code, "err_code": err_code, "description": description}})
    return lambda subject, sid: f"MSG {subject} {sid} {len(data)}\r\n".encode() + data + b"\r\n"


def server_error(text):
    """An error about the connection, such as a missing permission."""
    return lambda _subject, _sid: f"-ERR '{text}'\r\n".encode()


NO_RESPONDERS = status(503)
CONSUMER_DELETED = status(409, "Consumer Deleted")


class NatsProxy(Proxy):
    def __init__(self, target_host, target_port):
        super().__init__(target_host, target_port)
        self._answers = {}
        self.answered = Counter()
        """Calls answered here so far, by kind."""

    def answer(self, **answers):
        """Answer these kinds of calls from now on, and no others."""
        self._answers = answers

    def heal(self):
        super().heal()
        self._answers = {}

    async def _pump(self, reader, writer, *, back=None):
        # Whole messages in both directions: an answer must not be written into the middle of another message.
        subscriptions, held = {}, b""
        while chunk := await reader.read(CHUNK_BYTES):
            messages, held = _split(held + chunk)
            if back is not None:
                messages = [each for each in messages if not self._take(each, subscriptions, back)]
            writer.write(b"".join(messages))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        raise Closed

    def _take(self, message, subscriptions, client):
        """Whether a message of a client was answered here."""
        words = message.split(b"\r\n", 1)[0].decode().split(" ")
        match words:
            case ["SUB", pattern, *_, sid]:
                subscriptions[sid] = pattern
            case ["PUB" | "HPUB" as verb, subject, *rest]:
                sizes = 1 if verb == "PUB" else 2
                reply = rest[0] if len(rest) > sizes else ""
                kind = kind_of(verb, subject, reply)
                if (answer := self._answers.get(kind)) is not None:
                    sid = next((sid for sid, pattern in subscriptions.items() if _receives(pattern, reply)), "")
                    client.write(answer(reply, sid))
                    self.answered[kind] += 1
                    return True
        return False


def kind_of(verb, subject, reply):
    """The kind of call; None for a message that nobody answers."""
    if subject.startswith("$JS.API.CONSUMER.MSG.NEXT."):
        return "pull"
    if subject.startswith("$JS.ACK."):
        return "ack"
    if CREATE.match(subject):
        return "create"
    if subject.startswith("$JS.API."):
        return "request"
    if reply:
        return "publish" if verb == "HPUB" else "register"
    return None


def _receives(pattern, subject):
    """Whether an inbox with wildcards at its end gets what is sent to `subject`."""
    words, parts = pattern.split("."), subject.split(".")
    return len(words) == len(parts) and all(word in ("*", part) for word, part in zip(words, parts, strict=True))


def _split(data):
    """The complete messages of the NATS protocol in `data`, and the incomplete rest."""
    messages, start = [], 0
    while (end := data.find(b"\r\n", start)) >= 0:
        words = data[start:end].split(b" ")
        stop = end + 2 + (int(words[-1]) + 2 if words[0] in WITH_PAYLOAD else 0)
        if stop > len(data):
            break
        messages.append(data[start:stop])
        start = stop
    return messages, data[start:]
