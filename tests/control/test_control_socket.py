"""The control socket by itself: whom it serves, what it makes of bad input, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.control import Answer, ControlSocket, Order, ask
from kvferry.control.messages import MAX_LINE_BYTES
from kvferry.errors import ControlError

_SECS = 60.0


class Listener:
    """A control socket whose orders are answered at once, by a thread."""

    def __init__(self, path: Path) -> None:
        self.came = threading.Event()
        self.seen: list[Order] = []
        self.socket = ControlSocket(path, wake=self.came.set)
        self._ends = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends:
            assert self.came.wait(_SECS)
            self.came.clear()
            while (pending := self.socket.take()) is not None:
                self.seen.append(pending.order)
                pending.answer(Answer(ok=True, result=pending.order.options))

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self.came.set()
        self._thread.join(_SECS)
        self.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a socket."""
    return tmp_path / "s"


@contextlib.contextmanager
def client(path: Path) -> Iterator[socket.socket]:
    """One that speaks bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECS)
        connection.connect(str(path))
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            got += piece
    return bytes(got)


def test_an_order_and_its_answer(path: Path) -> None:
    """It arrives as it was given, and so does the answer; the socket is its owner's alone."""
    with Listener(path) as listener:
        order = Order("say", {"what": "über"}, 5.0)
        assert ask(path, order) == Answer(ok=True, result={"what": "über"})
        assert listener.seen == [order]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    assert not [one for one in threading.enumerate() if one.name == "kvferry-control"]


def test_who_hangs_keeps_nobody_waiting(path: Path) -> None:
    """Clients that say nothing, or half a line, beside those that say all."""
    with Listener(path), contextlib.ExitStack() as hanging:
        for number in range(20):
            one = hanging.enter_context(client(path))
            if number % 2:
                one.sendall(b'{"command": "say", ')
        assert ask(path, Order("say", {}, 5.0)).ok


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "no JSON"),
        (b"status\n", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b"[" * 60_000 + b"\n", "no JSON"),
        (b'{"command": "x"}\n', "has command, options and timeout"),
        (b'{"command": 1, "options": {}, "timeout": 1}\n', "command is text"),
        (b'{"command": "x", "options": [], "timeout": 1}\n', "options are an object"),
        (b'{"command": "x", "options": {}, "timeout": true}\n', "timeout is True"),
        (b'{"command": "x", "options": {}, "timeout": 0}\n', "above 0"),
        (b'{"command": "x", "options": {}, "timeout": NaN}\n', "above 0"),
        (b'{"command": "x", "options": {}, "timeout": 1e9}\n', "86400"),
        (b"x" * (MAX_LINE_BYTES + 10) + b"\n", "bytes"),
        (b"\xff\xfe\n", "no JSON"),
    ],
)
def test_lines_that_are_no_orders(path: Path, line: bytes, words: str) -> None:
    """They are answered by what is wrong, and the next order is served."""
    with Listener(path) as listener:
        with client(path) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(line)
            told = read_all(connection)
        answer = Answer.parse(told)
        assert not answer.ok
        assert words in answer.error
        assert not listener.seen
        assert ask(path, Order("say", {}, 5.0)).ok


def test_any_bytes(path: Path) -> None:
    """Whatever comes, the thread goes on."""
    rng = random.Random(3)
    whole = Order("say", {"a": [1, None, "x"]}, 1.0).line()
    with Listener(path):
        for _ in range(200):
            sent = bytearray(whole)
            for _ in range(rng.randrange(1, 6)):
                sent[rng.randrange(len(sent))] = rng.randrange(256)
            with client(path) as connection:
                connection.sendall(sent[: rng.randrange(len(sent) + 1)])
                if rng.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    Answer.parse(read_all(connection))
        assert ask(path, Order("say", {}, 5.0)).ok


def waiting(path: Path, pool: ThreadPoolExecutor, listener: ControlSocket) -> Future[Answer]:
    """An order that has arrived, and that nobody takes."""
    before = len(listener._waiting)
    asked = pool.submit(ask, path, Order("say", {}, 30.0))
    came = threading.Event()
    listener._wake = came.set
    while len(listener._waiting) == before:
        assert came.wait(_SECS)
    return asked


def test_orders_that_nobody_takes(path: Path) -> None:
    """They are told when their time is over; of too many, when they come; of a close, then."""
    listener = ControlSocket(path, wake=lambda: None)
    answer = ask(path, Order("say", {}, 0.05))
    assert not answer.ok
    assert "when it polls its cache" in answer.error
    late = listener.take()
    assert late is not None
    assert late.seconds_left == 0
    with ThreadPoolExecutor(20) as pool:
        asked = [waiting(path, pool, listener) for _ in range(16)]
        refused = ask(path, Order("say", {}, 5.0))
        assert "16 orders wait already" in refused.error
        listener.close()
        assert {one.result(_SECS).error for one in asked} == {"the cache was closed"}
    listener.close()
    assert not path.exists()


def test_an_answer_that_is_too_long(path: Path) -> None:
    """It is told instead of sent."""
    came = threading.Event()
    with ControlSocket(path, wake=came.set) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, path, Order("say", {}, 30.0))
        assert came.wait(_SECS)
        pending = listener.take()
        assert pending is not None
        pending.answer(Answer(ok=True, result={"x": "y" * MAX_LINE_BYTES}))
        assert "at most 65,536 are sent" in asked.result(_SECS).error


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    """Each is refused by its reason; nothing is removed."""
    file = tmp_path / "file"
    file.write_text("mine")
    with ControlSocket(tmp_path / "taken", wake=lambda: None):
        for given, words in (
            (file, "something else lies there"),
            (tmp_path / "no" / "folder", "No such file"),
            (tmp_path / "taken", "listens at"),
            (tmp_path / ("x" * 120), "at most 107"),
            (Path("/proc/s"), "no control socket can be made"),
        ):
            with pytest.raises(ControlError, match=words):
                ControlSocket(given, wake=lambda: None)
        assert not ask(tmp_path / "taken", Order("say", {}, 0.01)).ok  # it still listens
    assert file.read_text() == "mine"
    with pytest.raises(ControlError, match="nothing is at"):
        ask(tmp_path / "taken", Order("say", {}, 1.0))
    with pytest.raises(ControlError, match="give the path"):
        ask("", Order("say", {}, 1.0))


def test_many_begin_at_once(path: Path) -> None:
    """Of those that want one path, one gets it."""
    gate = threading.Barrier(8)
    made: list[ControlSocket] = []

    def begin() -> bool:
        gate.wait(_SECS)
        try:
            made.append(ControlSocket(path, wake=lambda: None))
        except ControlError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: begin(), range(8))) == 1
    made[0].close()


_PROCESS = """
import sys
from kvferry.control import ControlSocket
with ControlSocket(sys.argv[1], wake=lambda: None):
    print("listens", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that listens."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stdout
        assert one.stdout.readline() == "listens\n"
        try:
            yield one
        finally:
            one.kill()


def test_a_killed_process(path: Path) -> None:
    """What it leaves is told to clients, and taken over by the next process; a live one is not."""
    with process(path) as one:
        with pytest.raises(ControlError, match="listens at"):
            ControlSocket(path, wake=lambda: None)
        one.send_signal(signal.SIGKILL)
        one.wait(_SECS)
    assert path.exists()
    with pytest.raises(ControlError, match="nobody listens"):
        ask(path, Order("say", {}, 1.0))
    with Listener(path):
        assert ask(path, Order("say", {}, 5.0)).ok
    assert not path.exists()


def test_a_path_that_is_anothers_by_now(path: Path) -> None:
    """Who closes removes its own socket only."""
    first = ControlSocket(path, wake=lambda: None)
    path.unlink()
    with Listener(path):
        first.close()
        assert ask(path, Order("say", {}, 5.0)).ok


def test_a_fork_closes_nothing_of_its_parent(path: Path) -> None:
    """The socket is the process's that made it."""
    with Listener(path) as listener:
        child = os.fork()
        if not child:
            listener.socket.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(path, Order("say", {}, 5.0)).ok


def _as_nobody(call: Callable[[], object]) -> str:
    """What `call` raises or returns in a process of the user nobody."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setgid(65534)
        os.setuid(65534)
        try:
            told = repr(call())
        except ControlError as bad:
            told = str(bad)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_give_no_orders() -> None:
    """They cannot connect; and where the permissions were opened, they are refused all the same."""
    folder = Path(f"/tmp/kvferry-{os.getpid()}")  # noqa: S108  where others may look
    folder.mkdir(mode=0o755)
    path = folder / "s"
    try:
        with Listener(path) as listener:
            order = Order("say", {}, 5.0)
            assert "another user's" in _as_nobody(lambda: ask(path, order))
            path.chmod(0o666)
            assert "user 65534 may give no orders" in _as_nobody(lambda: ask(path, order))
            assert not listener.seen
    finally:
        folder.rmdir()
