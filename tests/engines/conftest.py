"""A real S3 server on loopback for the rooms that keep things in a store."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket of an S3 server process; the environment names the server and the credentials."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        port = next(found[1] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_CONFIG_FILE", os.devnull)
            import s3fs

            s3fs.S3FileSystem().mkdir("headrace-test")
            yield "s3://headrace-test"
    finally:
        server.kill()
        server.wait(10)
