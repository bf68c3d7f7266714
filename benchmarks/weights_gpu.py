"""Weights between GPUs, against bare copies of the same bytes and against vLLM's own transfer.

``python -m benchmarks.weights_gpu same``: two processes on one GPU, CUDA IPC. ``… pair``: trainer on GPU 0, receiver on
GPU 1, NCCL, NIXL and CUDA IPC. ``… vllm --url URL --model FOLDER``: into a running vLLM that serves FOLDER as ``m``
(``--worker-extension-cls headrace.engines.rollout.vllm_worker.HeadraceWorker --weight-transfer-config
'{"backend":"ipc"}'``, VLLM_SERVER_DEV_MODE=1), from pause to resume. Prints one line of JSON for each measurement, a
table last, and exits with status 1 when a bound is missed or a digest differs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from headrace.blocks.weights import Served, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.hashes import hash_of

COPY_SHARE = 0.8
"""Bound: of the bare copy's bandwidth."""
VLLM_RATIO = 5.0
"""Bound: from pause to resume, against vLLM's own transfer."""
SIZES = {
    "0.5B": {"hidden": 896, "layers": 24, "kv": 128, "inter": 4864, "vocab": 151936},
    "2.5B": {"hidden": 2560, "layers": 26, "kv": 512, "inter": 9728, "vocab": 49152},
    "1.57B": {"hidden": 1536, "layers": 32, "kv": 256, "inter": 8960, "vocab": 49152},
    "8B": {"hidden": 4096, "layers": 36, "kv": 1024, "inter": 12288, "vocab": 151936},
}
Metas = list[tuple[str, str, list[int]]]


def metas_of(size: str) -> Metas:
    """A decoder's tensors in bfloat16."""
    c = SIZES[size]
    h, kv, inter = c["hidden"], c["kv"], c["inter"]
    layer = {"q": [h, h], "k": [kv, h], "v": [kv, h], "o": [h, h], "gate": [inter, h], "up": [inter, h]}
    layer |= {"down": [h, inter], "norm1": [h], "norm2": [h]}
    shapes = {"embed": [c["vocab"], h]}
    shapes |= {f"layers.{i}.{name}": shape for i in range(c["layers"]) for name, shape in layer.items()}
    return [(name, "bfloat16", shape) for name, shape in (shapes | {"norm": [h]}).items()]


def random_model(metas: Metas, device: str) -> dict[str, Tensor]:
    make = torch.Generator(device).manual_seed(7)
    return {name: torch.randn(shape, generator=make, device=device, dtype=torch.bfloat16) for name, _, shape in metas}


def nbytes_of(metas: Metas) -> int:
    return sum(2 * torch.Size(shape).numel() for _, _, shape in metas)


def copy_seconds(nbytes: int, source: str, target: str) -> float:
    """Best of ten bare copies of that many bytes."""
    a = torch.empty(nbytes, dtype=torch.uint8, device=source)
    b = torch.empty(nbytes, dtype=torch.uint8, device=target)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        began = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        best = min(best, time.perf_counter() - began)
    return best


def receiver(pipe: Connection, device: str, metas: Metas) -> None:
    """A process that pulls what it is told, into parameters of its own; answers with Served and a checksum."""
    torch.cuda.set_device(device)
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, _, shape in metas}
    expect = {name: (dtype, shape) for name, dtype, shape in metas}

    def load(name: str, tensor: Tensor) -> None:
        parameters[name].copy_(tensor)

    pipe.send("ready")
    while (source := pipe.recv()) is not None:
        try:
            served = pull(source, load, expect=expect, device=device)
        except WeightError as error:
            pipe.send(error)
            continue
        torch.cuda.synchronize()
        pipe.send((served, time.perf_counter()))
        pipe.send(float(sum(p.double().sum() for p in parameters.values())))


def between(transport: str, size: str, source: str, target: str, partition_mb: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round but the first, from the first tensor to the confirmed digest."""
    metas = metas_of(size)
    model = random_model(metas, source)
    torch.cuda.set_device(source)
    local = transport == "cuda-ipc"
    address = str(Path(tempfile.mkdtemp()) / "w.sock") if local else reserve("127.0.0.1")
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(theirs, target, metas), daemon=True)
    process.start()
    seconds: list[float] = []
    try:
        if not pipe.poll(120):
            raise RuntimeError("the receiver did not start")
        pipe.recv()
        for version in range(rounds + 1):
            with torch.no_grad():
                model["embed"].add_(1.0)
            torch.cuda.synchronize()
            pipe.send(WeightSource(version=version, transport=transport, address=address))  # pyright: ignore[reportArgumentType]
            time.sleep(0.05)  # the receiver waits by now
            began = time.perf_counter()
            manifest = publish(
                iter(model.items()),
                metas,
                version=version,
                train_step=version,
                transport=transport,  # pyright: ignore[reportArgumentType]
                address=address,
                device=source,
                partition_bytes=partition_mb << 20,
            )
            answer = pipe.recv()
            if isinstance(answer, WeightError):
                raise answer
            served, ended = answer
            if served.digest != manifest.digest or pipe.recv() != float(sum(p.double().sum() for p in model.values())):
                raise RuntimeError("the receiver has other weights")
            seconds.append(ended - began)
    finally:
        process.kill()
        process.join()
        release(address)
    return {"seconds": seconds[1:], "first": seconds[0], "nbytes": nbytes_of(metas)}


def show(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def compare(transports: list[str], source: str, target: str, sizes: list[str], rounds: int) -> bool:
    """Each transport and partition size against the bare copy. Returns whether every transport's best is in bounds."""
    passed = True
    for size in sizes:
        floor = copy_seconds(nbytes_of(metas_of(size)), source, target)
        show("bare copy", size=size, gpus=f"{source}→{target}", ms=round(1e3 * floor, 2))
        for transport in transports:
            shares: list[float] = []
            for partition_mb in (64, 256, 1024):
                try:
                    run = between(transport, size, source, target, partition_mb, rounds)
                except (WeightError, RuntimeError) as error:
                    show(transport, size=size, partition_mb=partition_mb, failed=str(error)[:400])
                    continue
                best, middle = min(run["seconds"]), statistics.median(run["seconds"])
                shares.append(floor / middle)
                show(
                    transport,
                    size=size,
                    partition_mb=partition_mb,
                    first_ms=round(1e3 * run["first"], 1),
                    best_ms=round(1e3 * best, 2),
                    median_ms=round(1e3 * middle, 2),
                    gb_s=round(run["nbytes"] / middle / 1e9, 1),
                    share_of_copy=round(floor / middle, 3),
                )
            met = bool(shares) and max(shares) >= COPY_SHARE
            print(f"{transport} {size}: {max(shares, default=0):.2f} of the bare copy (bound {COPY_SHARE}), met: {met}")
            passed = passed and met
    return passed


class Server:
    """A running vLLM."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)

    def post(self, path: str, body: Any = None, **query: str) -> Any:
        answer = self._http.post(path, json=body, params=query)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else None

    def logprobs(self, prompt: list[int]) -> dict[int, float]:
        """Token id → log-probability of the likeliest next tokens."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        top = self.post("/v1/completions", body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
        return {int(token.removeprefix("token_id:")): value for token, value in top["top_logprobs"][0].items()}


def timed(times: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    found = work()
    times[name] = round(1e3 * (time.perf_counter() - began), 1)
    return found


def into_vllm(url: str, folder: Path, rounds: int) -> bool:
    """vLLM's own transfer and ours in turns, with logits checked after each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to("cuda")  # pyright: ignore[reportArgumentType, reportCallIssue]
    model.requires_grad_(False)
    server, prompt = Server(url), list(range(100, 164))
    tensors = dict(model.named_parameters())
    metas = [(name, "bfloat16", list(t.shape)) for name, t in tensors.items()]
    nbytes = nbytes_of(metas)
    show("bare copy", nbytes=nbytes, ms=round(1e3 * copy_seconds(nbytes, "cuda", "cuda"), 2))
    torch.cuda.empty_cache()
    address = str(Path(tempfile.mkdtemp()) / "w.sock")
    expect = json.dumps({name: [dtype, shape] for name, dtype, shape in metas})
    version = 0

    def theirs(packed: bool) -> dict[str, float]:
        from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
            IPCTrainerSendWeightsArgs,
            IPCWeightTransferEngine,
        )

        times: dict[str, float] = {}
        arguments = IPCTrainerSendWeightsArgs(send_mode="http", url=url, packed=packed)
        timed(times, "pause", lambda: server.post("/pause", mode="keep"))
        timed(times, "start", lambda: server.post("/start_weight_update"))
        timed(
            times,
            "send",
            lambda: IPCWeightTransferEngine.trainer_send_weights(((n, p.data) for n, p in tensors.items()), arguments),
        )
        timed(times, "finish", lambda: server.post("/finish_weight_update"))
        timed(times, "resume", lambda: server.post("/resume"))
        return times

    def ours(partition_mb: int) -> dict[str, float]:
        nonlocal version
        version += 1
        times: dict[str, float] = {}
        source = WeightSource(version=version, transport="cuda-ipc", address=address).model_dump_json()
        call = {"source": source, "expect": expect, "deadline_s": "60"}
        timed(times, "pause", lambda: server.post("/pause", mode="keep"))
        with ThreadPoolExecutor(1) as pool:
            body = {"method": "headrace_load_weights", "kwargs": call}
            began = time.perf_counter()
            loading = pool.submit(server.post, "/collective_rpc", body)
            manifest = publish(
                iter(tensors.items()),
                metas,
                version=version,
                train_step=version,
                transport="cuda-ipc",
                address=address,
                device="cuda",
                partition_bytes=partition_mb << 20,
            )
            times["published"] = round(1e3 * (time.perf_counter() - began), 1)
            answer = loading.result()["results"][0]
            times["send"] = round(1e3 * (time.perf_counter() - began), 1)
        timed(times, "resume", lambda: server.post("/resume"))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        served = Served.model_validate(answer["served"])
        if served.digest != manifest.digest:
            raise RuntimeError(f"vLLM has digest {served.digest}, published was {manifest.digest}")
        times["pull inside vLLM"] = round(1e3 * served.seconds, 1)
        return times

    server.post("/init_weight_transfer_engine", {"init_info": {}})
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "vLLM ipc": lambda: theirs(False),
        "vLLM ipc, packed": lambda: theirs(True),
        **{f"headrace, {mb} MiB": (lambda mb=mb: ours(mb)) for mb in (64, 256, 512, 1024)},
    }
    totals: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            with torch.no_grad():
                for tensor in tensors.values():
                    if tensor.dim() > 1:
                        tensor.mul_(1 + 0.05 * torch.randn_like(tensor))
            torch.cuda.synchronize()
            times = way()
            total = sum(times[part] for part in ("pause", "start", "send", "finish", "resume") if part in times)
            wrong = _difference(model, server, prompt)
            show(name, round=number, total_ms=round(total, 1), **times, largest_logprob_difference=round(wrong, 3))
            if wrong > 0.25:
                raise RuntimeError(f"{name}: vLLM serves other weights, log-probabilities differ by {wrong:.3f}")
            if number:
                totals[name].append(total)
    middle = {name: statistics.median(values) for name, values in totals.items()}
    for name, value in middle.items():
        print(f"{name:24} {value:8.1f} ms from pause to resume, median of {rounds}")
    own = min(value for name, value in middle.items() if name.startswith("vLLM"))
    mine = min(value for name, value in middle.items() if name.startswith("headrace"))
    print(f"vLLM's best / ours: {own / mine:.2f} (bound {VLLM_RATIO}), met: {own / mine >= VLLM_RATIO}")
    release(address)
    return own / mine >= VLLM_RATIO


def _difference(model: Any, server: Server, prompt: list[int]) -> float:
    """Largest difference between vLLM's log-probabilities and the trainer's, over vLLM's likeliest tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
    expected = logits.log_softmax(-1)
    return max(abs(float(expected[token]) - value) for token, value in server.logprobs(prompt).items())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("same", "pair", "vllm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1.57B,8B")
    parser.add_argument("--transports", default="nccl,nixl,cuda-ipc", help="of part pair")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a running vLLM")
    parser.add_argument("--model", type=Path, help="the folder that it serves")
    given = parser.parse_args(words)
    if given.part == "vllm":
        return not into_vllm(given.url, given.model, given.rounds)
    sizes = given.sizes.split(",")
    if given.part == "same":
        data = torch.randint(256, (100_000_003,), dtype=torch.uint8)
        if hash_of(data, "sums") != hash_of(data.cuda(), "sums"):
            raise RuntimeError("CPU and GPU compute other hashes of the same bytes")
        return not compare(["cuda-ipc"], "cuda:0", "cuda:0", sizes, given.rounds)
    if torch.cuda.device_count() < 2:
        print("part pair needs two GPUs", file=sys.stderr)
        return 1
    return not compare(given.transports.split(","), "cuda:0", "cuda:1", sizes, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
