"""What the tests share: the embedded model, loaded once, and the command that the wheel installs."""

import pathlib
import shutil
import sys
import time

import pytest

import moebius


@pytest.fixture(scope="session")
def model():
    with moebius.Model(threads=2, context=1024, parallel=4, backend="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def command():
    found = shutil.which("moebius", path=str(pathlib.Path(sys.executable).parent))
    assert found, "the wheel has not installed the command"
    return found


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After each test the engine has nothing to do."""
    yield
    if "model" in request.fixturenames:
        idle(request.getfixturevalue("model"))


def idle(model, seconds=5.0):
    """Waits until no sequence runs or waits."""
    end = time.monotonic() + seconds
    while model._engine.busy()[0]:
        assert time.monotonic() < end, f"{model._engine.busy()} still run"
        time.sleep(0.01)
