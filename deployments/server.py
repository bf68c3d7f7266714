"""The Prefect server of `headrace up`: Prefect's own, which also says how soon a refused write may be tried again.

On SQLite a write that meets another is refused with 503, and Prefect's client then sleeps two seconds unless the answer
says ``Retry-After``. Between two iterations that is longer than everything else Prefect does.
"""

import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings

RETRY_AFTER_S = 0.05

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Send], Awaitable[None]]
NICENESS = 5
"""What the server does while engines compute is seldom waited for."""


class RetrySoon:
    """ASGI middleware: adds ``Retry-After`` to answers 503 that have none."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                headers = list(message.get("headers", []))
                if not any(name.lower() == b"retry-after" for name, _ in headers):
                    headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, tell if scope["type"] == "http" else send)


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    # Behind the engines of this machine: all threads of a matrix product wait for the one whose core the server takes.
    os.nice(NICENESS)
    app = create_app(final=True)
    app.add_middleware(RetrySoon)
    api = get_current_settings().server.api
    uvicorn.run(
        app,
        host=host,
        port=port,
        timeout_keep_alive=api.keepalive_timeout,
        ws_ping_interval=api.websocket_ping_interval,
        ws_ping_timeout=api.websocket_ping_timeout,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
