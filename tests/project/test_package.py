"""Wheel and sdist hold what they should, and the wheel works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPES_ONLY = "splitkit/view/page/scripts/types.d.ts"
"""For the TypeScript compiler, which checks the page's scripts."""

NET = """
import torch
from torch import nn

def make():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.zeros(2, 8)
"""
"""A model that needs no transformers, whose import takes most of the time of a command."""

pytestmark = pytest.mark.campaign  # builds and installs take 30 s


def run(*command, cwd):
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files():
    """The files of the checkout, or of an unpacked sdist, without what tools leave behind."""
    for folder, folders, files in os.walk(ROOT):
        hidden = (name for name in folders if name.startswith(".") and name != ".ci")
        made = (name for name in folders if name in ("__pycache__", "build", "dist") or name.endswith(".egg-info"))
        folders[:] = sorted({*folders} - {*hidden, *made})
        for name in files:
            if name not in ("plan.json", ".git", "PKG-INFO"):
                yield (Path(folder) / name).relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A copy of the sources, and the names of its files."""
    names = [*source_files()]
    copy = tmp_path_factory.mktemp("source")
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return copy, set(names)


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The wheel, which is built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tracked[0], cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_each_file_of_the_package_and_nothing_else(built, tracked):
    names = set(zipfile.ZipFile(built[0]).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == {name for name in tracked[1] if name.startswith("splitkit/")} - {TYPES_ONLY}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_what_its_tests_need(built, tracked):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked[1] - names == set()


def test_the_wheel_works_outside_the_checkout(built, tmp_path):
    """In an environment of its own, which finds torch in this one's."""
    venv.create(tmp_path / "env", with_pip=False)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "env")})
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", built[0], cwd=tmp_path)
    command = tmp_path / "env" / "bin" / "splitkit"
    where = run(python, "-c", "import splitkit; print(splitkit.__file__)", cwd=tmp_path)
    assert where.startswith(packages), "the wheel, not the checkout"
    assert run(command, "completion", "fish", cwd=tmp_path).startswith("# AUTOMATICALLY")
    (tmp_path / "net.py").write_text(NET)
    words = ("net.py:make", "--devices", "2xh100", "--view", "p.html", "--json")
    planned = run(command, "plan", *words, cwd=tmp_path)
    assert len(json.loads(planned)["ranks"]) == 2 and "<script" in (tmp_path / "p.html").read_text()


def test_an_editable_install_is_a_path_that_type_checkers_follow(tracked, tmp_path):
    """An import hook, which setuptools installs for other layouts of folders, hides the type hints from mypy."""
    code = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    name = run(sys.executable, "-c", code, tmp_path, cwd=tracked[0]).splitlines()[-1]
    names = zipfile.ZipFile(tmp_path / name).namelist()
    assert [n for n in names if ".dist-info/" not in n and not n.endswith(".pth")] == []
