"""The streaming partitioned checkpoint engine. A receiver needs torch, numpy, pydantic, fsspec and xxhash only."""

from headrace.engines.checkpoint.claims import release
from headrace.engines.checkpoint.engine import Ahead, partition_limit, publish, pull
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.plan import PARTITION_BYTES, digest_of, make_plan
from headrace.engines.checkpoint.rendezvous import reserve

__all__ = [
    "PARTITION_BYTES",
    "Ahead",
    "WeightError",
    "digest_of",
    "make_plan",
    "partition_limit",
    "publish",
    "pull",
    "release",
    "reserve",
]
