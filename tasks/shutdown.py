"""Ends a campaign's engines from outside of its process, by their leases."""

from typing import Any

from headrace.blocks.home import store_url
from headrace.blocks.lease import Lease
from headrace.blocks.recipe import Recipe
from headrace.engines.experience.store import Store
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import EngineError


async def release_engines(parameters: dict[str, Any], suffix: str = "") -> None:
    """``parameters``: those of the campaign's flow run; ``suffix``: of the id that it takes where none is given.

    Engines that are gone already are passed over.
    """
    recipe = Recipe.model_validate(parameters["recipe"])
    id = parameters.get("campaign") or recipe.name + suffix
    store = Store(f"{store_url(recipe.store).rstrip('/')}/{id}")
    attempt = len(store.paths("attempts"))
    token = store.get("token").decode()
    for path in store.paths("leases"):
        lease = Lease.model_validate_json(store.get(path))
        async with EngineClient(lease, token=token, attempt=attempt) as client:
            try:
                await client.shutdown()
            except EngineError as error:
                print(f"{lease.role}-{lease.index} is gone already: {error}")
