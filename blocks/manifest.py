"""Manifests: the small JSON that names committed data. The only thing that tasks pass to each other."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """One immutable file of a store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Path below the store's root, with forward slashes."""
    rows: int
    """Rows of the Arrow table; 0 where the file is no table."""
    nbytes: int
    """Size of the file in bytes."""
    digest: str
    """xxh3-128 of the file's bytes, as hex."""


class Manifest(BaseModel):
    """What one stage committed for one shard of one iteration.

    A manifest exists if and only if all that it names is complete: data is written first, the manifest last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    """generate, score, ref-logprob, old-logprob, advantage, train, …"""
    step: int
    """The iteration (``train_step``) that it belongs to."""
    shard: int = 0
    """The shard of the iteration; 0 for stages that are not mapped."""
    key: str
    """Content key: hash of the stage's code version, configuration slice, input keys and weight version."""
    part: Part | None = None
    """The Arrow file of the columns that the stage made, keyed by ``uid``; None where it made none."""
    inputs: list[str] = Field(default_factory=list)
    """Keys of the manifests that the stage read."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Small figures for people and for the report: seconds, tokens, reward."""
    info: dict[str, Any] = Field(default_factory=dict)
    """Anything small that the next stage needs: weight version, digest, engine fingerprint."""
