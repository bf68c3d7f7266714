"""The recipe: the whole configuration of a campaign, as a YAML file, a pydantic model and a Prefect run form."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.base import Strict
from headrace.blocks.data import DataSpec
from headrace.blocks.inheritance import with_base
from headrace.blocks.parity import CLIPPING, Parity
from headrace.blocks.reward import RewardSpec
from headrace.blocks.weights import Quantization


class Lora(Strict):
    """Low-rank adapters: the model is frozen; only what is added to its linear layers is trained, sent and kept."""

    rank: int = Field(ge=1, le=512)
    """Inner size of the two matrices that are added to each layer."""
    alpha: int = Field(32, ge=1)
    """Their product is multiplied by alpha / rank."""
    target_modules: list[str] | None = Field(None, min_length=1)
    """Linear layers that get one, by the last part of their names (q_proj). Left out: all but the output head."""


class ModelSpec(Strict):
    """The model that is trained."""

    path: str = "smollm2-135m-instruct"
    """A Hugging Face folder: a path, or a name below the models folder of the Headrace home."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of trainer and rollout; the trainer's master weights are float32."""
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of the language-model head on both sides; float32 removes most of the mismatch of bfloat16 rounding."""
    lora: Lora | None = None
    """Left out, all weights are trained."""


class Role(Strict):
    """Where the engines of one role run. Two roles that name one pool are colocated."""

    pool: str
    """Prefect work pool; it needs a deployment engine-host/POOL and a worker."""
    engines: int = Field(1, ge=1, le=64)
    """Engines of this role; each is one host flow run."""
    gpus: int = Field(0, ge=0)
    """GPUs of each engine; 0 = CPU."""
    ranks: int = Field(1, ge=1)
    """Processes of each engine: data-parallel ranks of the actor. On GPUs as many as gpus."""
    threads: int = Field(0, ge=0, le=256)
    """CPU threads of each process; 0 = the machine's cores divided by the ranks, at most 16."""

    @model_validator(mode="after")
    def _ranks_follow_gpus(self) -> "Role":
        if self.gpus and self.ranks not in (1, self.gpus):
            raise ValueError(f"ranks is {self.ranks} but each engine has {self.gpus} GPUs: leave ranks out")
        return self

    @property
    def world_size(self) -> int:
        return self.gpus or self.ranks


class Roles(Strict):
    actor: Role = Role(pool="actor")
    """The model engine that is trained."""
    rollout: Role = Role(pool="rollout")
    """The engines that sample."""
    reference: Role | None = None
    """An engine of its own for the reference model; left out, the actor keeps a frozen copy where one is needed."""


class TransformersRollout(Strict):
    """Headrace's own back end for CPUs and small GPUs: light to install, deterministic."""

    kind: Literal["transformers"] = "transformers"
    max_batch: int = Field(64, ge=1)
    """Sequences decoded at the same time; finished ones are replaced from the queue."""


class VLLMRollout(Strict):
    """vLLM, in the environment that HEADRACE_VLLM_PYTHON of its work pool names."""

    kind: Literal["vllm"] = "vllm"
    max_model_len: int = Field(4096, ge=16)
    """Longest prompt plus response, tokens."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded at the same time."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """Memory of the KV cache. Left out: on a GPU the rest of its share, on a CPU vLLM decides."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that vLLM may take."""
    enforce_eager: bool = True
    """No compilation: starts fast. Set false for long campaigns on GPUs."""
    step_graphs: bool = False
    """With enforce_eager: false, CUDA graphs of whole steps without compilation: fast, and starts much sooner."""
    enable_prefix_caching: bool = False
    """Reuse of keys and values between requests under the same weights; those of another version are never used."""
    openai_port: int | None = Field(None, ge=0, le=65535)
    """Opens vLLM's OpenAI-compatible server on loopback for agents and judges, with the campaign's token as API key;
    0 = any free port (the engine's health says which). Left out, there is no such door."""
    enable_chunked_prefill: bool | None = None
    """Long prompts are computed in pieces, beside decoding. Left out: on GPUs; vLLM cannot on CPUs."""
    async_scheduling: bool | None = None
    """The next step is scheduled while one runs. Left out: on GPUs; vLLM cannot on CPUs."""
    quantization: Quantization | None = None
    """fp8: weights travel in 8 bits with a scale for each block of 128×128, and linear layers compute in 8 bits, with
    vLLM's own scales for activations. Only on GPUs that have it. Left out: model.dtype."""
    batch_invariant: bool = False
    """Kernels whose result does not depend on what else is in the batch: slower; only on GPUs."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """What the engine reports: raw ignores the temperature and is wrong for training unless the temperature is 1."""

    @model_validator(mode="after")
    def _useful(self) -> "VLLMRollout":
        if self.step_graphs and self.enforce_eager:
            raise ValueError("step_graphs has no effect with enforce_eager: true; set that to false")
        return self


class SGLangRollout(Strict):
    """SGLang on GPUs, in the environment that HEADRACE_SGLANG_PYTHON of its work pool names."""

    kind: Literal["sglang"] = "sglang"
    max_model_len: int = Field(4096, ge=16)
    """Longest prompt plus response, tokens."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded at the same time."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory for weights and cache."""
    attention_backend: str = "triton"
    """SGLang's attention kernels: triton, fa3, flashinfer."""
    sampling_backend: Literal["pytorch", "flashinfer"] = "pytorch"
    """SGLang's sampling kernels."""
    enable_prefix_caching: bool = False
    """Reuse of keys and values between requests under the same weights; those of another version are never used."""
    deterministic: bool = False
    """SGLang's batch-invariant kernels: slower; seeds are honoured only with them."""


class TensorRTLLMRollout(Strict):
    """A place for TensorRT-LLM. This version of Headrace has no back end for it and says so when an engine starts."""

    kind: Literal["trtllm"] = "trtllm"


Backend = Annotated[TransformersRollout | VLLMRollout | SGLangRollout | TensorRTLLMRollout, Field(discriminator="kind")]


class Rollout(Strict):
    backend: Backend = TransformersRollout()
    n: int = Field(8, ge=1)
    """Samples of each prompt: the size of a group."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; the trainer's log-probabilities use the same."""
    max_tokens: int = Field(16, ge=1)
    """Longest response, tokens."""
    shards: int = Field(2, ge=1, le=64)
    """Mapped task runs of generate and score in each iteration."""

    @property
    def deterministic(self) -> bool:
        """The same work gives the same tokens, so shards have fixed engines; else any engine goes on with any shard."""
        return isinstance(self.backend, TransformersRollout)


class Optim(Strict):
    """AdamW on float32 master weights."""

    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate over the iterations, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a part of lr; for linear and cosine."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    """Largest global norm of the gradient."""

    @model_validator(mode="after")
    def _useful(self) -> "Optim":
        if self.schedule == "constant" and "min_ratio" in self.model_fields_set and self.min_ratio:
            raise ValueError("min_ratio has no effect under schedule: constant; choose linear or cosine, or remove it")
        return self


class Train(Strict):
    optim: Optim = Optim()
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of each iteration, over disjoint sets of groups. 1 = strictly on-policy."""
    tokens_per_microbatch: int = Field(4096, ge=64)
    """Token budget of one forward and backward pass on one rank; groups are packed under it."""


class Evaluate(Strict):
    problems: int = Field(256, ge=0)
    """Held-out problems, answered greedily; 0 = no evaluation."""
    every: int = Field(0, ge=0)
    """Iterations between evaluations; 0 = only before the first and after the last."""

    @model_validator(mode="after")
    def _useful(self) -> "Evaluate":
        if self.every and not self.problems:
            raise ValueError("every has no effect with problems: 0; give problems or remove every")
        return self


class Checkpoint(Strict):
    """Durable trainer state. A lost trainer loads the last one and repeats the stored batches since, bit for bit."""

    every: int = Field(10, ge=1)
    """Iterations between two checkpoints."""
    keep: int = Field(1, ge=1)
    """Checkpoints kept; older ones are deleted once a newer one is complete. One with a file PINNED in it stays."""


class Weights(Strict):
    """How weights travel from the actor to the rollout engines."""

    transport: Literal["auto", "shm", "cuda-ipc", "tcp", "nixl", "gloo", "nccl", "store"] = "auto"
    """auto = by placement: on one machine shm, between GPUs of actor and vLLM in one pool cuda-ipc; else tcp. store:
    safetensors partitions in the campaign's store."""
    partition_mb: int | None = Field(None, ge=1, le=8192)
    """Half of the memory that each side takes beside its weights, MiB. Left out: 64; between GPUs 1024."""
    delta: bool = False
    """Send only what changed. Costs one copy of the weights in host memory on each side; for shm, tcp, nixl on CPUs;
    the trainer needs the package numba."""
    keep: int = Field(2, ge=2)
    """Versions that transport store keeps: the one in use, the one before it, and older ones. One with a file PINNED in
    it stays."""

    @model_validator(mode="after")
    def _useful(self) -> "Weights":
        if self.transport != "store" and self.keep != Weights.model_fields["keep"].default:
            raise ValueError(
                f"keep has no effect under transport: {self.transport}; remove it, or choose transport: store"
            )
        if self.delta and self.transport in ("store", "cuda-ipc", "nccl"):
            raise ValueError(f"delta has no effect under transport: {self.transport}; remove it, or choose tcp or shm")
        return self


class Deadlines(Strict):
    """Nothing waits longer than this, in seconds."""

    worker: float = Field(30.0, gt=0)
    """For a worker to be online in every work pool."""
    engine_start: float = Field(600.0, gt=0)
    """From asking for a host to a healthy engine."""
    stage: float = Field(1800.0, gt=0)
    """Of one job of an engine."""
    sync: float = Field(600.0, gt=0)
    """Of one weight synchronisation."""
    idle_engine: float = Field(900.0, gt=0)
    """An engine that hears nothing for so long leaves."""


class Recipe(Strict):
    """Everything that a campaign depends on."""

    base: str | None = None
    """Recipe that this one inherits from: a name in deployments/recipes or the path of a YAML file."""
    name: str = Field("campaign", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Short name; the default campaign id."""
    seed: int = Field(0, ge=0)
    """Of data order and sampling. The same recipe on the same machine gives the same weights, bit for bit, on CPUs."""
    iterations: int = Field(40, ge=1)
    """Passes of the RL loop."""
    prompts: int = Field(8, ge=1)
    """Groups in each iteration."""
    store: str = ""
    """Below it lies the campaign's folder: any fsspec URL, or block:NAME; empty = the Headrace home's store."""
    model: ModelSpec = ModelSpec()
    roles: Roles = Roles()
    data: DataSpec
    reward: RewardSpec
    algorithm: Algorithm = Field(default_factory=Algorithm)
    rollout: Rollout = Rollout()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
    parity: Parity = Parity()
    deadlines: Deadlines = Deadlines()

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, given: Any) -> Any:
        return with_base(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        problems = []
        if self.rollout.shards > self.prompts:
            problems.append(
                f"rollout.shards is {self.rollout.shards} but there are {self.prompts} prompts in an iteration"
            )
        if self.train.minibatches > self.prompts:
            problems.append(
                f"train.minibatches is {self.train.minibatches} but there are {self.prompts} groups to share out"
            )
        if self.roles.rollout.engines > self.rollout.shards:
            problems.append(
                f"roles.rollout.engines is {self.roles.rollout.engines} but rollout.shards is {self.rollout.shards}"
            )
        if self.roles.reference is not None and not self.needs_reference:
            problems.append("roles.reference has no effect: the algorithm uses no KL to a reference model")
        gpus = self.roles.actor.gpus and self.roles.rollout.gpus
        if self.weights.transport in ("cuda-ipc", "nccl") and not gpus:
            problems.append(f"weights.transport: {self.weights.transport} needs GPUs for actor and rollout")
        if self.weights.delta and gpus and self.weights.transport in ("auto", "nixl"):
            problems.append("weights.delta has no effect between GPUs: remove it, or choose transport: tcp or shm")
        backend = self.rollout.backend
        if (
            isinstance(backend, VLLMRollout)
            and backend.logprobs_mode == "raw_logprobs"
            and self.rollout.temperature != 1.0
        ):
            problems.append(
                "rollout.backend.logprobs_mode: raw_logprobs is wrong for training at a temperature other than 1"
            )
        if isinstance(backend, VLLMRollout) and not self.roles.rollout.gpus:
            on = [s for s in ("enable_chunked_prefill", "async_scheduling", "batch_invariant") if getattr(backend, s)]
            if on:
                problems.append(f"rollout.backend.{' and '.join(on)}: vLLM has no such thing on CPUs; remove it")
        if self.parity.bounds.clip_fraction is not None and self.algorithm.loss.kind not in CLIPPING:
            problems.append(
                f"parity.bounds.clip_fraction has no effect: loss {self.algorithm.loss.kind} has no clip bounds"
            )
        if isinstance(backend, VLLMRollout) and backend.step_graphs and not self.roles.rollout.gpus:
            problems.append("rollout.backend.step_graphs has no effect without GPUs (roles.rollout.gpus is 0)")
        if isinstance(backend, VLLMRollout) and backend.quantization:
            if not self.roles.rollout.gpus:
                problems.append("rollout.backend.quantization: fp8 needs GPUs: set roles.rollout.gpus, or remove it")
            if self.model.dtype != "bfloat16":
                problems.append("rollout.backend.quantization: fp8 is made from model.dtype: bfloat16 only")
            if self.model.lora:
                problems.append("rollout.backend.quantization: fp8 is for whole models; remove it, or model.lora")
            if self.weights.transport == "store":
                problems.append(
                    "rollout.backend.quantization: fp8 is not for weights.transport: store, which keeps versions as "
                    "folders of the model's dtype; choose auto"
                )
        if isinstance(backend, SGLangRollout | TensorRTLLMRollout) and not self.roles.rollout.gpus:
            problems.append(f"rollout.backend {backend.kind} needs GPUs: set roles.rollout.gpus, or take vllm")
        problems += self._lora_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _lora_problems(self) -> list[str]:
        if self.model.lora is None:
            return []
        problems, backend, transport = [], self.rollout.backend, self.weights.transport
        if not isinstance(backend, VLLMRollout | SGLangRollout):
            problems.append(f"model.lora: back end {backend.kind} serves no adapters; set rollout.backend.kind: vllm")
        if isinstance(backend, VLLMRollout) and backend.openai_port is not None:
            problems.append(
                "model.lora: rollout.backend.openai_port would serve the base without its adapter; remove it"
            )
        if transport in ("cuda-ipc", "nccl"):
            problems.append(
                f"model.lora: adapters travel through host memory; weights.transport: {transport} cannot, choose auto"
            )
        return problems

    @property
    def rounds(self) -> int:
        """Rounds of generation in one iteration: more than one where groups that teach nothing are replaced."""
        return self.algorithm.filter.rounds if self.algorithm.filter else 1

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference
