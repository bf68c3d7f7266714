"""Creates the local work pools, a block, the automations and the deployments of prefect.yaml."""

import subprocess
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from headrace.blocks.home import home
from headrace.blocks.stores import ExperienceStore
from headrace.deployments.automations import install


def create_pools(names: list[str]) -> None:
    """Process work pools; those that exist stay as they are."""
    with get_client(sync_client=True) as api:
        for name in names:
            try:
                api.create_work_pool(WorkPoolCreate(name=name, type="process"))
            except ObjectAlreadyExists:
                continue


def main() -> None:
    create_pools(sys.argv[1:])
    install()
    ExperienceStore(url=str(home() / "store")).save("local", overwrite=True)
    folder = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml"]
    raise SystemExit(subprocess.run(command, cwd=folder, check=False, timeout=170).returncode)


if __name__ == "__main__":
    main()
