"""Where Headrace keeps things on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """``$HEADRACE_HOME``, or ``~/.headrace``: models, stores, logs and the local Prefect server's database."""
    return Path(os.environ.get("HEADRACE_HOME") or Path.home() / ".headrace").expanduser().absolute()


def store_url(given: str) -> str:
    """The URL of a recipe's store; empty means the home's, ``block:NAME`` an ExperienceStore block."""
    if given.startswith("block:"):
        from headrace.blocks.stores import store_of_block

        return store_of_block(given.removeprefix("block:"))
    return given or str(home() / "store")


def campaign_folder(root: str, id: str) -> Path:
    """Where a campaign keeps what must lie on a disk: below a local store's URL, or in the home for any other store."""
    return (Path(root) if "://" not in root else home() / "campaigns") / id


def model_folder(path: str) -> Path:
    """The folder of a recipe's model: a path as it is, else a name below the home's models folder."""
    given = Path(path).expanduser()
    return given.absolute() if given.is_dir() or "/" in path else home() / "models" / path
