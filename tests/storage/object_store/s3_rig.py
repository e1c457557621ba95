"""S3 servers on loopback, started and stopped by the tests, and a proxy that does them harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.storage.server_rig import Process, free_port, until

from kvferry.storage.object_store import ObjectStoreBackend

BUCKET = "kvferry"
_S3RVER = "s3rver@3.7.1"


class Server(Process):
    """A process that speaks S3 at `endpoint`, and a bucket in it."""

    def __init__(self, command: Callable[[int], list[str]], **environment: str) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._command = command
        self._environment = {**os.environ, **environment}
        super().__init__()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command(self.port),
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def made() -> bool:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            put = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")  # noqa: S310
            try:
                urllib.request.urlopen(put, timeout=5).close()  # noqa: S310
            except urllib.error.HTTPError as told:
                return told.code in (403, 409)  # the bucket is there
            except OSError:
                return False
            return True

        until(made, "the server does not listen")
        return process


def moto() -> Server:
    """moto's server, which keeps objects in memory."""
    return Server(
        lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    )


def s3rver(folder: Path) -> Server:
    """s3rver, which keeps objects in `folder`; skips the test where npm has it not."""
    program = _s3rver_program()
    return Server(
        lambda port: [
            str(program), "--address", "127.0.0.1", "--port", str(port), "--directory", str(folder),
            "--configure-bucket", BUCKET, "--silent",
        ]
    )  # fmt: skip


def _s3rver_program() -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here, which s3rver comes by")
    home = Path.home() / ".cache" / "kvferry-tests"
    program = home / "node_modules" / ".bin" / "s3rver"
    if not program.exists():
        home.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "install", "--prefix", str(home), "--no-audit", "--no-fund", _S3RVER],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if done.returncode or not program.exists():
            pytest.skip(f"npm cannot install {_S3RVER}: {done.stderr.strip()[-300:]}")
    return program


def opened(endpoint: str, prefix: str = "p", **options: Any) -> ObjectStoreBackend:
    """A backend of the bucket behind `endpoint`."""
    settings = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "S3RVER",
        "secret_access_key": "S3RVER",
        "deadline_secs": 20.0,
        **options,
    }
    return ObjectStoreBackend(f"s3://{BUCKET}/{prefix}", **settings)
