"""A proxy before an S3 server that does harm to some requests."""

from __future__ import annotations

import contextlib
import enum
import http.client
import http.server
import socket
import threading
from typing import Any

from kvferry.closing import ClosedAtExit

__all__ = ["FaultProxy", "Harm"]


class Harm(enum.Enum):
    """What becomes of a request."""

    FORBIDDEN = 403
    BUSY = 503
    CUT = "the connection ends in the middle of the answer"
    HANG = "no answer comes"
    HANG_IN_BODY = "half of the answer comes, and no more"
    SHORT = "the object is a byte shorter"
    LONG = "the object is a byte longer"


class FaultProxy(ClosedAtExit):
    """Passes requests on to `port` of loopback; those about `key` with `harm`, `times` at most."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._lock = threading.Lock()
        self._harm: Harm | None = None
        self._about = ""
        self._left = 0
        self.num_harmed = 0
        self.released = threading.Event()
        """Ends all that hangs."""

        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def harm(self, harm: Harm | None, *, about: bytes = b"", times: int = 1 << 30) -> None:
        """From now on; `about` is a key, and without one all are meant."""
        with self._lock:
            self._harm, self._about, self._left = harm, about.hex(), times
            self.num_harmed = 0

    def what_for(self, path: str) -> Harm | None:
        """The harm that the next request for `path` takes."""
        with self._lock:
            if self._harm is None or not self._left or self._about not in path:
                return None
            self._left -= 1
            self.num_harmed += 1
            return self._harm

    def ask(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any, bytes]:
        """What the server answers."""
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.request(method, path, body=body, headers=dict(headers))
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def close(self) -> None:
        """All that hangs ends."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        harm = self.owner.what_for(self.path)
        if harm is Harm.HANG:
            self._hang()
        elif harm in (Harm.FORBIDDEN, Harm.BUSY):
            self._answer(int(harm.value), [], b"" if self.command == "HEAD" else b"<Error/>")
        elif harm is Harm.CUT and self.command != "GET":
            self._end()
        else:
            self._pass_on(body, harm)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _pass_on(self, sent: bytes, harm: Harm | None) -> None:
        status, headers, body = self.owner.ask(self.command, self.path, self.headers, sent)
        if self.command == "HEAD" or harm is None or status != 200:
            self._answer(status, headers, body)
        elif harm is Harm.SHORT:
            self._answer(status, headers, body[:-1])
        elif harm is Harm.LONG:
            self._answer(status, headers, body + b"!")
        else:
            self._answer(status, headers, body, sends=len(body) // 2)
            if harm is Harm.HANG_IN_BODY:
                self._hang()
            self._end()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, sends: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value if self.command == "HEAD" else length
            elif name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sends is None else body[:sends])
        self.wfile.flush()

    def _hang(self) -> None:
        self.owner.released.wait(120)
        self.close_connection = True

    def _end(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
