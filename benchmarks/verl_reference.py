"""verl 0.9.1's own functions, for comparison only: installed beside this environment, imported without its servers.

verl's formulas need torch, numpy and tensordict; its import chain also wants ray and others, which no formula uses and
which are replaced by empty modules.
"""

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar
from unittest.mock import MagicMock

VERSION = "0.9.1"
PACKAGES = [f"verl=={VERSION}", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3"]
UNUSED = ["ray", "transformers", "orjson", "codetiming", "hydra", "datasets", "pandas", "peft", "torchdata"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / f"verl-{VERSION}"


class _Empty(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "99.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        accepts_options = {"__init_subclass__": classmethod(lambda cls, **options: None)}
        value = type(name, (), accepts_options) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


def prepare() -> None:
    """Makes ``import verl`` work in this process; installs it into a cache folder at the first call."""
    if not (CACHE / "verl").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(CACHE), *PACKAGES]
        subprocess.run(pip, check=True, timeout=600)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VERL_FORCE_DEVICE": "cpu"}
    sys.meta_path.insert(0, _Unused())
    sys.path.insert(0, str(CACHE))
