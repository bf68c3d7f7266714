"""Requests to a Prefect server, without its client: importing that takes longer than most commands."""

import time
from typing import Any

import httpx

PATIENCE_S = 30.0
"""How long a server that is busy is asked again, and how long one answer may take."""
_AGAIN_S = 0.2


def ask(api: str, verb: str, path: str, body: Any = None) -> Any:
    """The JSON of the answer, None where it has none.

    A server that could not write to its database just then answers 503, and means: again. Raises httpx.HTTPError.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.request(verb, f"{api}/{path}", json=body, timeout=PATIENCE_S)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end:
            answer.raise_for_status()
            return answer.json() if answer.content else None
        time.sleep(_AGAIN_S)
