"""A Prefect server that is busy is asked again."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from headrace.deployments import api
from headrace.deployments.api import ask

answers: list[tuple[int, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, content = answers.pop(0)
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not into the tests' output."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_503_means_again(url: str) -> None:
    answers[:] = [(503, b"{}"), (503, b"{}"), (200, b'{"state": 1}'), (204, b"")]
    assert ask(url, "POST", "here", {}) == {"state": 1} and ask(url, "POST", "here", {}) is None


def test_but_not_for_ever_and_no_other_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PATIENCE_S", 0.5)
    answers[:] = [(503, b"{}")] * 50
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        ask(url, "POST", "here", {})
    answers[:] = [(422, b"{}"), (200, b"{}")]
    with pytest.raises(httpx.HTTPStatusError, match="422"):
        ask(url, "POST", "here", {})
