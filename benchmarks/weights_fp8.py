"""Weights into vLLM in bfloat16 and in blockwise FP8, in one run: ``python -m benchmarks.weights_fp8 --model FOLDER``.

A trainer's model in this process, and two vLLM behind our host on the same GPU, one for each form of the weights. In
turns, every time with other weights: bytes, and the pause of the engine. After each update the log-probabilities of
what is sampled are compared with transformers: for FP8 with the weights that were sent, dequantised, and activations
rounded as vLLM rounds them; and, as a control, with those of the version before. The parameters that vLLM serves after
the first are compared, bit for bit, with what was sent, and with what vLLM makes of the folder when it quantises it.
HEADRACE_VLLM_PYTHON names vLLM's interpreter; the model is a random one (``benchmarks.random_model``), because its
weights are changed.
"""

import argparse
import asyncio
import copy
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

import headrace
from benchmarks.weights_figures import show
from benchmarks.weights_vllm import MEMORY, PROMPT
from headrace.blocks.fp8 import BLOCK, quantised
from headrace.blocks.recipe import VLLMRollout
from headrace.blocks.weights import Quantization, Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint import publish, release
from headrace.engines.checkpoint.fp8 import LARGEST, from_blocks, to_blocks
from headrace.engines.process import Child
from headrace.engines.rollout.base import Completion, Request, Sampling
from headrace.engines.rollout.errors import RolloutError
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm import VLLMEngine

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRANSPORT: Transport = "cuda-ipc" if CUDA else "shm"
PROGRAM = Path(__file__).with_name("fp8_vllm.py")
NEAR = 1.5
"""Bound on the mean difference of log-probabilities: times that between transformers in bfloat16 and in float32, which
round the same weights, and in FP8 the same activations, after other sums. Random layers make much of that."""
CONTROL = 2.0
"""Bound: how much nearer the weights that were sent must be than those of the version before."""
TIES = 1e-3
"""Bound: values that vLLM's compiled conversion rounds otherwise on a GPU, where its division is approximate."""
SAMPLES, TOKENS = 8, 32


class Served(VLLMEngine):
    """vLLM behind our host, with a program that shows its parameters. backend: its FP8 kernels; '' = vLLM chooses."""

    parameters: Path
    kernels = ""

    async def open(self) -> None:
        env = {**self.launch.env, "HEADRACE_PARAMETERS": str(self.parameters), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        more = ["--linear-backend", self.kernels] if self.kernels else []
        self.launch = replace(self.launch, program=(str(PROGRAM),), env=env, flags=[*self.launch.flags, *more])
        await super().open()


class Side:
    """One of the two engines, its address and the form of its weights."""

    def __init__(self, engine: VLLMEngine, quantization: Quantization | None) -> None:
        self.engine, self.version = engine, -1
        self._quantization: Quantization | None = quantization
        self._address = str(Path(tempfile.mkdtemp()) / "w.sock")
        self.pauses: list[float] = []

    async def update(self, tensors: dict[str, Tensor]) -> WeightManifest:
        """Sends the weights and prints what it took. Raises RuntimeError when other bytes are served."""
        self.version += 1
        source = WeightSource(version=self.version, transport=TRANSPORT, address=self._address)
        sending = asyncio.create_task(asyncio.to_thread(self._publish, tensors, source))
        served, manifest = await asyncio.gather(self.engine.load_weights(source, deadline_s=120), sending)
        if served.digest != manifest.digest:
            raise RuntimeError(f"vLLM has digest {served.digest}, published was {manifest.digest}")
        self.pauses.append(1e3 * served.pause_seconds)
        what = {"round": self.version, "nbytes": served.nbytes, "partitions": len(manifest.plan.partitions)}
        times = {"pause_ms": round(self.pauses[-1], 1), "pull_ms": round(1e3 * served.seconds, 1)}
        show(self._quantization or "bfloat16", **what, **times)
        return manifest

    def _publish(self, tensors: dict[str, Tensor], source: WeightSource) -> WeightManifest:
        return publish(
            iter(tensors.items()),
            [(name, "bfloat16", list(tensor.shape)) for name, tensor in tensors.items()],
            version=source.version,
            train_step=source.version,
            transport=TRANSPORT,
            address=source.address,
            device=DEVICE,
            partition_bytes=(1024 if CUDA else 16) << 20,
            quantization=self._quantization,
            deadline_s=120,
        )

    async def sample(self) -> list[Completion]:
        request = Request(0, PROMPT, list(range(1, SAMPLES + 1)), Sampling(1.0, TOKENS, ()))
        [group] = [group async for group in self.engine.generate([request])]
        return group.completions

    async def close(self) -> None:
        release(self._address)
        await self.engine.close()


def round_activations(x: Tensor) -> Tensor:
    """[…, k] → float32, as vLLM's FP8 layers see it: each 128 numbers of a token in float8_e4m3fn, with their scale."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@contextmanager
def as_sent(model: nn.Module, activations: bool) -> Iterator[None]:
    """Linear layers compute with their weights as they travel in FP8, dequantised; activations: rounded as well."""
    hooks = [
        module.register_forward_hook(lambda layer, given, made: forward(layer, given[0], activations))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and quantised(f"{name}.weight", module.weight.shape)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forward(layer: Any, x: Tensor, activations: bool) -> Tensor:
    seen = round_activations(x) if activations else x.float()
    bias = None if layer.bias is None else layer.bias.float()
    return linear(seen, from_blocks(*to_blocks(layer.weight)), bias).to(x.dtype)


@torch.inference_mode()
def logprobs(model: nn.Module, completions: list[Completion]) -> Tensor:
    """[samples, tokens] of what was sampled after PROMPT."""
    tokens = torch.tensor([made.token_ids for made in completions], device=DEVICE)
    prompts = torch.tensor([PROMPT], device=DEVICE).expand(len(tokens), -1)
    logits = model(torch.cat([prompts, tokens], 1)).logits[:, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]


def compare(trainer: nn.Module, before: nn.Module, completions: list[Completion], fp8: bool) -> bool:
    """Prints the mean difference between vLLM's log-probabilities and transformers'. Whether the bounds are met."""
    said = torch.tensor([made.logprobs for made in completions], device=DEVICE)

    def apart(model: nn.Module) -> float:
        return round(float((said - logprobs(model, completions)).abs().mean()), 4)

    def between(one: nn.Module, other: nn.Module) -> float:
        return round(float((logprobs(one, completions) - logprobs(other, completions)).abs().mean()), 4)

    found: dict[str, float] = {}
    exact = copy.deepcopy(trainer).float()
    if fp8:
        with as_sent(trainer, True), as_sent(before, True), as_sent(exact, True):
            found["as served"], found["version before"] = apart(trainer), apart(before)
            found["rounding alone"] = between(trainer, exact)
        with as_sent(trainer, activations=False):
            found["dequantised weights alone"] = apart(trainer)
        found["weights in bfloat16"] = apart(trainer)
    else:
        found["as served"], found["version before"] = apart(trainer), apart(before)
        found["rounding alone"] = between(trainer, exact)
    met = found["as served"] < NEAR * found["rounding alone"] and CONTROL * found["as served"] < found["version before"]
    show("log-probabilities, fp8" if fp8 else "log-probabilities", **found, met=met)
    return met


def change(model: nn.Module, before: nn.Module) -> None:
    """Other weights, of the same size, and the old ones into ``before``."""
    with torch.no_grad():
        for old, parameter in zip(before.parameters(), model.parameters(), strict=True):
            old.copy_(parameter)
            if parameter.dim() > 1:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    if CUDA:
        torch.cuda.synchronize()


async def start(model: Path, python: str, logs: Path, quantization: Quantization | None) -> Side:
    recipe: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "gpu_memory_utilization": MEMORY}
    if not CUDA:
        recipe["kv_cache_memory_bytes"] = 500_000_000
    backend = VLLMRollout.model_validate({**recipe, "quantization": quantization})
    spec = RolloutSpec(
        model=str(model), dtype="bfloat16", gpus=int(CUDA), threads=4 if CUDA else 1, python=python, backend=backend
    )
    if not quantization:
        return Side(await VLLMEngine.start(spec, logs), None)
    Served.parameters = logs / "served.parameters"
    try:
        return Side(await Served.start(spec, logs), quantization)
    except RolloutError as error:
        print(f"vLLM's own choice of FP8 kernels does not start, now with those of Triton: {error}", flush=True)
    Served.kernels = "triton"
    return Side(await Served.start(spec, logs), quantization)


def joined(model: Path, served: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """What ours makes of the folder's matrices, (values, scales) by the names of vLLM's layers, which fuse some."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    made: dict[str, tuple[Tensor, Tensor]] = {}
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name in [name for name in served if f"{name}_scale_inv" in served]:
        path, layer = name.removesuffix(".weight").rsplit(".", 1)
        parts = [to_blocks(tensors[f"{path}.{part}.weight"].to(DEVICE)) for part in fused.get(layer, (layer,))]
        made[name] = torch.cat([part[0] for part in parts]).cpu(), torch.cat([part[1] for part in parts]).cpu()
    return made


def count_differing(one: dict[str, tuple[Tensor, Tensor]], other: dict[str, Tensor]) -> dict[str, int]:
    """Values and scales that are not the same bits, of all."""
    found: dict[str, int] = dict.fromkeys(("values", "scales", "values_differ", "scales_differ"), 0)
    for name, (values, scales) in one.items():
        found["values"] += values.numel()
        found["scales"] += scales.numel()
        found["values_differ"] += int((values.view(torch.uint8) != other[name].view(torch.uint8)).sum())
        found["scales_differ"] += int((scales != other[f"{name}_scale_inv"]).sum())
    return found


def compare_bits(model: Path, python: str, scratch: Path) -> bool:
    """vLLM's parameters after our first version against what was sent and against its own conversion of the folder."""
    (scratch / "site").mkdir()
    (scratch / "site" / "headrace").symlink_to(Path(headrace.__file__).resolve().parent)
    env = {
        "PYTHONPATH": str(scratch / "site"),
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    out = scratch / "online"
    child = Child([python, str(PROGRAM), "online", str(model), str(out)], log=scratch / "online.log", env=env)
    try:
        if child.wait(400.0) != 0:
            print(f"vLLM's own conversion did not end well:\n{child.tail()}")
            return False
    finally:
        child.stop()
    served: dict[str, Tensor] = torch.load(Served.parameters, mmap=True)
    theirs: dict[str, Tensor] = torch.load(f"{out}.parameters", mmap=True)
    sent = joined(model, served)
    ours = count_differing(sent, served)
    own = count_differing({name: (served[name], served[f"{name}_scale_inv"]) for name in sent}, theirs)
    others = [name for name in served if name not in sent and not name.endswith("_scale_inv")]
    unlike = [name for name in others if not torch.equal(served[name], theirs[name])]
    functions = json.loads(Path(f"{out}.json").read_text())
    show("served by vLLM against what was sent", **ours)
    show("served by vLLM against its own conversion", **own, others=len(others), others_differ=len(unlike))
    show("vLLM's function against ours", **functions)
    exact = not any(
        (ours["values_differ"], ours["scales_differ"], functions["eager_values"], functions["eager_scales"])
    )
    near = own["values_differ"] <= TIES * own["values"] and not own["scales_differ"]
    same_names = served.keys() == theirs.keys() and not [name for name in unlike if "embed" not in name]
    print(f"bits: exact {exact}, vLLM's compiled conversion {near}, the same parameters {same_names}")
    return bool(sent) and exact and near and same_names


async def run(model: Path, rounds: int) -> bool:
    """Whether all bounds are met."""
    from transformers import AutoModelForCausalLM

    python = os.environ["HEADRACE_VLLM_PYTHON"]
    trainer, before = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(DEVICE)  # pyright: ignore
        for _ in range(2)
    )
    trainer.requires_grad_(False)
    before.requires_grad_(False)
    tensors: dict[str, Tensor] = dict(trainer.named_parameters())
    met = True
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        sides: dict[str, Side] = {}
        try:
            forms: dict[str, Quantization | None] = {"fp8": "fp8", "bfloat16": None}
            for name, quantization in forms.items():
                (Path(scratch) / name).mkdir()
                sides[name] = await start(model, python, Path(scratch) / name, quantization)
            for number in range(rounds + 2):  # memory is touched, and loaders are watched, in the first
                for name, side in sides.items():
                    await side.update(tensors)
                    if number:
                        met &= compare(trainer, before, await side.sample(), name == "fp8")
                if not number:  # these are still the folder's weights
                    met &= await asyncio.to_thread(compare_bits, model, python, Path(scratch))
                change(trainer, before)
        finally:
            for side in sides.values():
                await side.close()
        for name, side in sides.items():
            print(f"{name:10} {statistics.median(side.pauses[2:]):8.1f} ms from pause to resume, median of {rounds}")
    print(f"bounds met: {met}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    return 0 if asyncio.run(run(given.model, given.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
