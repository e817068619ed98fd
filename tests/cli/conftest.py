"""What tests of the command line share."""

from __future__ import annotations

import json

import pytest
from keptfacts import kept_facts  # noqa: F401
from userfolder import FACTORIES

import splitkit as sk
from splitkit import cli
from splitkit.testing import models
from splitkit.testing.models import Example


@pytest.fixture
def call(capsys):
    """Run a command; the exit code, what it printed, what it complained."""

    def run(*words):
        capsys.readouterr()
        code = cli.main([str(w) for w in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def data(call):
    """Run a command with --json: the exit code and the one object."""

    def run(*words):
        code, out, _ = call(*words, "--json")
        return code, json.loads(out)

    return run


class Once:
    """Known models that are made once for all commands, and captured once; each is as new whenever it is asked for."""

    def __init__(self):
        self._build, self._capture = models.build, {"capture": sk.capture, "capture_joint": sk.capture_joint}
        self._made, self._graphs = {}, {}

    def build(self, name, seed=0, **sizes):
        key = (name, seed, *sorted(sizes.items()))
        kept = self._made.get(key)
        if kept is None or written(kept[0].model) != kept[1]:
            example = self._build(name, seed=seed, **sizes)
            self._made[key] = kept = (example, written(example.model), modes(example.model))
        example, _, training = kept
        for module, mode in training.items():
            module.training = mode
        example.model.zero_grad()
        return Example(example.model, example.args, dict(example.kwargs))

    def capture(self, verb, model, *args, **kwargs):
        inputs = [*args, *kwargs.values()]  # both are kept in the values, so that an id is of one object
        key = (verb, id(model), model.training, written(model), *map(id, inputs), *kwargs)
        if not any(model is example.model for example, _, _ in self._made.values()):
            return self._capture[verb](model, *args, **kwargs)
        if key not in self._graphs:
            self._graphs[key] = (self._capture[verb](model, *args, **kwargs), model, inputs)
        return self._graphs[key][0]


def written(model):
    """How often each parameter and buffer was written."""
    return tuple(t._version for t in (*model.parameters(), *model.buffers()))


def modes(model):
    return {module: module.training for module in model.modules()}


@pytest.fixture(scope="session")
def once():
    return Once()


@pytest.fixture(autouse=True)
def _captured_once(once, monkeypatch):
    """No command changes the model or the graph that it asks for."""
    monkeypatch.setattr(models, "build", once.build)
    for verb in ("capture", "capture_joint"):
        monkeypatch.setattr(sk, verb, lambda *args, _verb=verb, **kwargs: once.capture(_verb, *args, **kwargs))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with ``my.py``, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FACTORIES)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.fixture
def no_work(monkeypatch):
    """Fails the test where a model is made or captured."""
    from splitkit.testing import models

    for module, name in ((models, "build"), (models, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("the model was made"))
