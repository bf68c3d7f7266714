"""The campaign that the tasks of this process work for: its recipe, its store, its engines, its place in the data."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from headrace.blocks.home import campaign_folder, model_folder, store_url
from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Recipe
from headrace.engines.experience.files import Files
from headrace.engines.experience.ledger import Ledger
from headrace.engines.experience.store import Store, stage_key
from headrace.engines.folder import model_id
from headrace.engines.report import History
from headrace.engines.reward.pool import RewardPool
from headrace.engines.reward.stage import Begun
from headrace.tasks.engines import Engines
from headrace.tasks.progress import Progress
from headrace.tasks.retention import states
from headrace.tasks.router import Router

_current: ContextVar["Campaign"] = ContextVar("campaign")

EXTENDABLE = {"iterations"}
"""Settings that a later attempt of a campaign may change: how far it goes, not what it is."""


class RecipeChanged(ValueError):
    """The campaign exists with another recipe."""


def current() -> "Campaign":
    """The campaign of the running flow."""
    return _current.get()


class Campaign:
    """One attempt of a campaign. Everything that it knows comes from the store; restarting derives it again."""

    def __init__(self, id: str, recipe: Recipe) -> None:
        self.id, self.recipe = id, recipe
        root = store_url(recipe.store)
        self.url = f"{root.rstrip('/')}/{id}"
        self.store = Store(self.url)
        self.folder = campaign_folder(root, id)
        """Local folder for what must lie on a disk: trainer state, sockets, logs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.states = states(Files(str(self.folder)))
        """Trainer state after so many iterations."""
        self._same_recipe()
        self.attempt = self._take_attempt()
        self.token = self._once("token", secrets.token_hex(24).encode()).decode()
        self.model_id = self._once("model_id", model_id(model_folder(recipe.model.path)).encode()).decode()
        self.ledger = Ledger(self.store)
        self.rewards = RewardPool(recipe.reward)
        self.engines = Engines(self)
        self.router = Router(self.engines, recipe)
        self.progress = Progress(self.folder / "progress.json")
        self.version = 0
        """The weight version that rollout engines must serve now."""
        self.weights_key = self.model_id
        """Content key of what made those weights: the model, or a train manifest."""
        self.weights_folder = "weights"
        """Below the store, for transport store."""
        self.probed: tuple[int, str] | None = None
        """The campaign's own version and weights key while the parity gate has engines serve other weights."""
        self.cursor = 0
        """Place in the data order where the next prompts are drawn."""
        self.sync_numbers = itertools.count()
        self.scoring: dict[str, Begun] = {}
        """Scores that were begun while their shard was sampled, by the shard's key."""
        self.spans: list[tuple[float, float]] = []
        """When scoring ran; the engines keep their own."""
        self.attempts: dict[str, int] = {}
        """Task-run attempts of the running iteration, by stage."""
        self.history = History(self.store)
        self.reported_at = 0.0
        """When the last report of this attempt began, or its first iteration: the iteration's clock."""
        self._deferred: list[Coroutine[Any, Any, None]] = []
        self._background: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> "Campaign":
        self._token = _current.set(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _current.reset(self._token)
        for work in self._deferred:
            work.close()
        for task in self._background:
            task.cancel()
        self.rewards.close()
        self.router.close()
        await self.engines.close()

    def key(self, stage: str, code: str, config: Any, inputs: list[str]) -> str:
        """Content key of a stage's work for this campaign under the weights in use."""
        return stage_key(stage, code, config, inputs, self.weights_key)

    def move_to(self, version: int, weights_key: str) -> None:
        """From now on generation uses this version."""
        self.version, self.weights_key = version, weights_key
        self.router.forgive()

    def trained(self) -> list[Manifest]:
        """Train manifests from iteration 0 on, without a gap."""
        found: list[Manifest] = []
        while made := [m for m in self.store.manifests(len(found), "train") if m.inputs]:
            found.append(made[-1])
        return found

    @property
    def needs_old_logprob(self) -> bool:
        """With one optimizer step in an iteration, old is what the step's own forward pass gives."""
        algorithm = self.recipe.algorithm
        in_advantage = (algorithm.kl is not None and algorithm.kl.kind == "reward") or (
            algorithm.correction is not None and bool(algorithm.correction.reject)
        )
        return self.recipe.train.minibatches > 1 or in_advantage

    def evaluation_is_due(self, version: int) -> bool:
        """Before the first iteration, after the last, and as often as the recipe says."""
        spec = self.recipe.evaluate
        first_or_last = version in (0, self.recipe.iterations)
        return bool(spec.problems) and (first_or_last or bool(spec.every and version % spec.every == 0))

    def evaluations(self) -> dict[int, Manifest]:
        """Scores of the held-out problems so far, by weight version."""
        due = filter(self.evaluation_is_due, range(self.version + 1))
        found = ((version, self.store.manifests(version, "evaluate-score")) for version in due)
        return {version: made[-1] for version, made in found if made}

    def start_clock(self) -> None:
        """The first iteration of an attempt begins now; later ones begin with the report of the one before."""
        self.reported_at = self.reported_at or time.time()

    def defer(self, work: Coroutine[Any, Any, None]) -> None:
        """Keeps ``work`` until the engines are busy next: the flow does not wait for it."""
        self._deferred.append(work)

    def start_deferred(self) -> None:
        """Runs what was deferred beside whatever the flow waits for now; raises what earlier such work raised."""
        for ended in [work for work in self._background if work.done()]:
            self._background.remove(ended)
            ended.result()
        self._background += [asyncio.ensure_future(work) for work in self._deferred]
        self._deferred.clear()

    async def settle(self) -> None:
        """Waits for everything that was deferred."""
        self.start_deferred()
        background, self._background = self._background, []
        await asyncio.gather(*background)

    def busy_spans(self) -> list[tuple[float, float]]:
        return [*self.spans, *self.engines.spans()]

    def _once(self, name: str, content: bytes) -> bytes:
        if not self.store.exists(name):
            self.store.put(name, content)
        return self.store.get(name)

    def _take_attempt(self) -> int:
        """A number above that of every earlier attempt, which it fences off."""
        number = 1
        while self.store.exists(f"attempts/{number:04d}.json"):
            number += 1
        self.store.put(f"attempts/{number:04d}.json", b'{"began": %d}' % time.time())
        return number

    def _same_recipe(self) -> None:
        if self.store.exists("recipe.json"):
            before = Recipe.model_validate_json(self.store.get("recipe.json"))
            changed = [
                name
                for name in Recipe.model_fields
                if name not in EXTENDABLE and getattr(before, name) != getattr(self.recipe, name)
            ]
            if changed:
                raise RecipeChanged(
                    f"campaign {self.id!r} at {self.url} was started with another recipe "
                    f"(differs in: {', '.join(changed)}). Continue it with its own recipe, or give another campaign id"
                )
        self.store.put("recipe.json", self.recipe.model_dump_json(indent=2).encode())
