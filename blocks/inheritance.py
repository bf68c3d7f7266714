"""Recipe files: YAML with inheritance (``base:``), and where each value came from."""

import contextlib
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parent.parent / "deployments" / "recipes"
CHOICE = ("kind", "preset", "function", "task")
"""A section that makes another choice than its base takes none of the base's other settings for that choice."""


class RecipeError(ValueError):
    """A recipe that cannot be read; the message says which file and what is wrong."""


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``, section by section."""
    if any(key in base and key in over and base[key] != over[key] for key in CHOICE):
        return over
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def find(name: str) -> Path:
    """The file of a recipe: a path, or a name in deployments/recipes."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
    elif (RECIPES / f"{name}.yaml").is_file():
        return RECIPES / f"{name}.yaml"
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
    raise RecipeError(f"no recipe {name!r}: give the path of a YAML file or one of: {known}")


def read(path: Path) -> dict[str, Any]:
    """One file, without its base."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold settings (name: value), not {type(content).__name__}")
    return content


def with_base(given: dict[str, Any], _seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """``given`` merged over its base, that over its own, and so on; ``base`` itself is dropped.

    An empty section says nothing and inherits: a form sends one for what nobody touched.
    """
    base = given.get("base")
    rest = {k: v for k, v in given.items() if k != "base"}
    if not base:
        return rest
    if base in _seen:
        raise RecipeError(f"recipes inherit in a circle: {' → '.join((*_seen, base))}")
    return merge(with_base(read(find(base)), (*_seen, base)), _said(rest))


def _said(tree: dict[str, Any]) -> dict[str, Any]:
    """Without empty sections, at any depth."""
    said = {key: _said(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in said.items() if value != {}}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"train": {"minibatches": 1}}`` → ``{"train.minibatches": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return flat


def origins(given: dict[str, Any], source: str) -> dict[str, str]:
    """For each dotted path that ``given`` or a base of it sets: the file, or ``source``."""
    base = given.get("base")
    found = origins(read(find(base)), str(base)) if base else {}
    return found | dict.fromkeys(flatten({k: v for k, v in given.items() if k != "base"}), source)


def assignments(settings: list[str]) -> dict[str, Any]:
    """``["train.optim.lr=1e-6"]`` → nested settings; values are YAML."""
    tree: dict[str, Any] = {}
    for setting in settings:
        path, sign, value = setting.partition("=")
        if not sign or not path:
            raise RecipeError(f"--set {setting}: write PATH=VALUE, for example --set train.optim.lr=1e-6")
        parsed = yaml.safe_load(value)
        if isinstance(parsed, str):
            # YAML 1.1 reads 1e-6 as text
            with contextlib.suppress(ValueError):
                parsed = float(parsed)
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = parsed
    return tree
