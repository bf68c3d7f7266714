"""An algorithm from another package is one file and an entry point; this package imports with torch alone."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

import headrace.algorithms.losses
from headrace.algorithms.advantages import Estimate, Estimator, Samples, advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.losses import registry
from headrace.algorithms.objective import policy_objective
from headrace.algorithms.tokens import LossTerms, Tokens
from headrace.blocks.algorithms import Algorithm


def sapo_by_autograd(settings: dict, x: Tokens) -> LossTerms:
    """SAPO, as someone who knows no derivative would write it."""
    tau = 1 + (settings["tau"] - 1) * (x.advantages <= 0).to(x.new.dtype)
    return LossTerms(-x.advantages * torch.sigmoid(tau * (x.ratio - 1)) * 4 / tau, slope=None)


def centred(settings: dict, x: Samples) -> Estimate:
    return Estimate(x.rewards - settings["baseline"], per_sample=True)


centred_estimator = Estimator(centred, compares_group=False)


@pytest.fixture
def installed(monkeypatch):
    """The two above, as if a package had declared them."""
    sys.modules["headrace_test_plugin"] = sys.modules[__name__]
    points = EntryPoints(
        [
            EntryPoint("soft", "headrace_test_plugin:sapo_by_autograd", "headrace.losses"),
            EntryPoint("centred", "headrace_test_plugin:centred_estimator", "headrace.advantages"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    yield
    del sys.modules["headrace_test_plugin"]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_loss_written_with_autograd(installed, golden, aggregation):
    def run(loss):
        config = Algorithm.model_validate({"loss": loss, "aggregation": {"kind": aggregation}})
        new = golden.flat("new").requires_grad_()
        objective = policy_objective(
            config,
            new=new,
            old=golden.flat("old"),
            advantages=golden.flat("adv"),
            batch=golden.batch,
            denominators=Denominators.of(golden.batch),
        )
        objective.loss.backward()
        return objective.loss, new.grad

    theirs = run({"kind": "plugin", "name": "soft", "settings": {"tau": 1.05}})
    for a, b in zip(theirs, run({"kind": "sapo"}), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_an_estimator(installed):
    config = Algorithm.model_validate(
        {"advantage": {"kind": "plugin", "name": "centred", "settings": {"baseline": 0.25}}}
    )
    batch = Jagged.from_lengths([1, 2])
    result = advantages(config, rewards=torch.tensor([1.0, 0.0]), groups=torch.tensor([0, 1]), batch=batch)
    assert result.values.tolist() == [0.75, -0.25, -0.25]


def test_one_file_in_the_package_is_an_algorithm(tmp_path):
    """A copy of the repository with one more file, and a process of its own."""
    root = Path(headrace.algorithms.losses.__file__).resolve().parents[2]
    for room in ("algorithms", "blocks"):
        shutil.copytree(root / room, tmp_path / "headrace" / room)
    (tmp_path / "headrace" / "__init__.py").write_text('__version__ = "0"\n')
    (tmp_path / "headrace" / "algorithms" / "losses" / "mine.py").write_text(
        "from headrace.algorithms.losses.registry import policy_loss\n"
        "from headrace.algorithms.tokens import LossTerms\n"
        "@policy_loss('mine', plugin=True)\n"
        "def mine(settings, x):\n"
        "    return LossTerms(-settings['scale'] * x.advantages * x.ratio, slope=None)\n"
    )
    code = """
from headrace.algorithms.losses import resolve
from headrace.blocks.algorithms import Algorithm
function, settings = resolve(Algorithm(loss={"kind": "plugin", "name": "mine", "settings": {"scale": 2}}).loss)
print(function.__module__, settings)
"""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "headrace.algorithms.losses.mine {'scale': 2}\n"


def test_an_unknown_name_says_what_is_installed(installed):
    config = Algorithm.model_validate({"loss": {"kind": "plugin", "name": "sofd"}})
    with pytest.raises(AlgorithmError, match=r"no installed package has the entry point 'sofd' .*\(installed: soft\)"):
        registry.resolve(config.loss)


def test_imports_with_torch_alone():
    """Neither pydantic nor Prefect, and quick: in under two seconds of processor time beyond torch's own."""
    code = """
import sys, time, torch
start = time.process_time()
import headrace.algorithms.advantages, headrace.algorithms.objective, headrace.algorithms.value
import headrace.algorithms.logprobs, headrace.algorithms.preference, headrace.algorithms.kl
print(time.process_time() - start)
assert not {'pydantic', 'prefect', 'pyarrow', 'headrace.engines', 'headrace.blocks'} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 2
