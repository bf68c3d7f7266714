"""A lease: which engine process holds a role of a campaign, and how to reach it."""

from pydantic import BaseModel, ConfigDict


class Lease(BaseModel):
    """Written to the store by the engine's host once the engine is healthy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    """actor, rollout, reference."""
    index: int = 0
    """Which of the role's engines."""
    epoch: int
    """Grows by one with every engine that takes the role; a call that carries another epoch is refused."""
    url: str
    """Base URL of the engine's job server."""
    pid: int
    node: str
    """Host name of the machine that the engine runs on."""
    flow_run_id: str
    """The host's flow run; its log holds the engine's."""
    recipe: str = "recipe.json"
    """Path below the campaign's store of the recipe that the engine was started with."""
