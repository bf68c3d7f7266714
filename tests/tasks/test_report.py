"""Pictures are a convenience: without a server to take them the campaign goes on, and says so."""

import asyncio
import logging
import socket
from typing import Any

from prefect.artifacts import acreate_markdown_artifact
from prefect.logging import get_logger
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from headrace.tasks import report


def test_a_server_that_is_away_costs_only_the_picture(monkeypatch, caplog):
    monkeypatch.setattr(report, "get_run_logger", lambda: get_logger("test"))
    get_logger("test").addHandler(caplog.handler)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    away: dict[Any, Any] = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(away), caplog.at_level(logging.WARNING):
        asyncio.run(report.in_ui(acreate_markdown_artifact("text", key="some-key")))
    assert "took no artifact" in caplog.text
