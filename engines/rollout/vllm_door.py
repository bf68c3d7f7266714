"""The OpenAI-compatible door of a vLLM engine, for agents and judges: the same engine, its own HTTP server, one key.

Runs in vLLM's environment. vLLM's own key guards only ``/v1``; here every route but ``/health`` asks for it. The
development endpoints are not there: they exist only under ``VLLM_SERVER_DEV_MODE``, which the host removes.
"""

import hmac
import os
from typing import Any

import uvicorn

from headrace.engines.rollout.child import connect


class Keyed:
    """An ASGI application that wants ``Authorization: Bearer KEY``."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "wrong or missing API key"}'})

    def _knows(self, scope: dict[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


async def serve_door(llm: Any, flags: list[str], options: dict[str, Any]) -> None:
    """Serves until cancelled. options: ``door_fd`` (a listening socket); the key is in HEADRACE_DOOR_KEY."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # vLLM 0.26
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    config = uvicorn.Config(Keyed(app, os.environ["HEADRACE_DOOR_KEY"]), log_level="warning", access_log=False)
    await uvicorn.Server(config).serve(sockets=[connect(options["door_fd"])])
