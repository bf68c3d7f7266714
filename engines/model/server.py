"""The model engine's process: ``[torchrun …] -m headrace.engines.model.server --spec SPEC.json``."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from headrace.engines.model.crew import Crew
from headrace.engines.model.errors import ModelEngineError
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import join
from headrace.engines.model.jobs import Jobs
from headrace.engines.model.spec import ServerSpec
from headrace.engines.rpc.server import Job, JobServer

DISMISS_S = 10.0
"""How long a job that still runs may hold up the end."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON of headrace.engines.model.spec.ServerSpec")
    path: Path = parser.parse_args().spec
    try:
        spec = ServerSpec.model_validate_json(path.read_bytes())
        gang = join(spec.engine.device, spec.engine.threads, spec.engine.collective_timeout_s)
        engine = FSDP2Engine(spec.engine, gang)
    except (OSError, ValidationError, ModelEngineError) as error:
        print(f"the model engine cannot start: {error}", file=sys.stderr)
        return 1
    crew = Crew(gang, Jobs(engine).run, spec.engine.collective_timeout_s)
    if gang.rank == 0:
        serve(spec, engine, crew)
        if not crew.dismiss(DISMISS_S):
            print("left while a job was under way", file=sys.stderr)
            return 1
    else:
        crew.follow()
    engine.settle()
    dist.destroy_process_group()
    return 0


def serve(spec: ServerSpec, engine: FSDP2Engine, crew: Crew) -> None:
    """Serves jobs on rank 0 until it is shut down."""

    def execute(job: Job) -> dict[str, Any]:
        return crew.run(job.method, job.params, job)

    def status() -> dict[str, Any]:
        return {"train_step": engine.train_step, "ranks": engine.gang.size, "last_key": engine.last_key}

    server = JobServer(
        execute,
        role=spec.role,
        epoch=spec.epoch,
        token=spec.token,
        status=status,
        idle_limit_s=spec.idle_limit_s,
        exchanges=["publish"],
    )
    server.run(Path(spec.endpoint), host=spec.host, port=spec.port)


if __name__ == "__main__":
    sys.exit(main())
