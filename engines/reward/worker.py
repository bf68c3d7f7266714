"""The process that runs reward functions: one sample at a time, until its owner kills it.

``python -m headrace.engines.reward.worker FD``: FD is a socket. The owner sends the parts, the worker answers ``ready``
(or an error); then for each sample it answers ``started`` and a score. Light on imports: it is started again whenever
a sample had to be killed.
"""

import math
import numbers
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from headrace.engines.reward.channel import Channel
from headrace.engines.reward.errors import RewardError
from headrace.engines.reward.functions import Reward, find

FLOAT32_MAX = 3.4028234e38
LONGEST_ERROR = 500


class BadReward(ValueError):
    """A reward function returned what is no reward."""


def finite(value: Any, where: str) -> float:
    """The value as a float; bool and numpy numbers count. Raises BadReward for anything that is no finite float32."""
    if not isinstance(value, numbers.Real):
        raise BadReward(f"{where} is of type {type(value).__name__}; a reward is a number, or a dict of named numbers")
    number = float(value)
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
        raise BadReward(f"{where} is {number}; a reward is finite")
    return number


def score(functions: dict[str, tuple[Reward, float]], sample: dict[str, Any]) -> dict[str, Any]:
    """``{reward, parts}``, or ``{error}`` that names the part at fault.

    The value of a part is what its function returned, or the sum of what it returned by name; the reward is the
    weighted sum of the parts' values.
    """
    reward = 0.0
    parts: dict[str, float] = {}
    for name, (function, weight) in functions.items():
        try:
            value = function(sample["text"], sample["ground_truth"], messages=sample["messages"])
            if isinstance(value, dict):
                named = {f"{name}/{key}": finite(item, f"{key!r} of what it returned") for key, item in value.items()}
                parts |= named
                total = sum(named.values())
            else:
                total = parts[name] = finite(value, "what it returned")
            reward += weight * total
        except BadReward as error:
            return {"error": f"{name}: {error}"[:LONGEST_ERROR]}
        except Exception as error:  # whatever a user's function raises is the sample's failure, not the worker's
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(place.filename).name}:{place.lineno}"
            return {"error": f"{name}: {type(error).__name__}: {error} ({at})"[:LONGEST_ERROR]}
    try:
        return {"reward": finite(reward, "the weighted sum"), "parts": parts}
    except BadReward as error:
        return {"error": str(error)}


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    channel = Channel(connection)
    parts = channel.receive(None)
    try:
        functions = {name: (find(part["function"], part["options"]), part["weight"]) for name, part in parts.items()}
    except RewardError as error:
        channel.send({"error": str(error)}, None)
        return
    channel.send({"ready": os.getpid()}, None)
    while True:
        try:
            sample = channel.receive(None)
        except EOFError:
            return
        channel.send("started", None)
        channel.send(score(functions, sample), None)


if __name__ == "__main__":
    main()
