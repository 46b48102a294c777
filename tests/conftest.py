"""Shared set-up of the tests: markers that say what a test needs, one kernel cache for all workers, few threads."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MARKERS = {
    "none": "needs nothing: no compiler, no GPU, fast (the default)",
    "cpu": "needs a C++ compiler",
    "interpret": "runs Triton kernels in Triton's interpreter",
    "ptx": "compiles Triton kernels to PTX; needs no GPU",
    "gpu": "needs a CUDA GPU",
    "slow": "takes more than a few seconds; left out of `make test`",
    "every(n)": "of the test's parameters `make test` runs the first and each n-th from there on; the others are slow",
}
# Seconds after which a kernel that waits for itself is given up: no call into the driver returns then.
HANGS = 300
STDERR = pytest.StashKey[int]()
# How many of a test's parameters have been collected.
COLLECTED = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run every N-th test only, from the K-th on")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # where a process that ends at once can still say why
        config.stash[STDERR] = os.dup(2)
    config.add_cleanup(lambda: os.close(config.stash[STDERR]))
    _share_cache_folder(config)
    os.environ.setdefault("KGEN_STRICT", "1")  # a kernel that fails is a failure of its test
    _limit_threads()


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _share_cache_folder(config: pytest.Config) -> None:
    """One fresh cache for the whole session: a kernel is built once, and never taken from an earlier version of kgen.

    xdist workers inherit the environment of the process that made the folder. A folder the user named is left alone.
    """
    os.environ.pop("KGEN_TUNING_FILE", None)  # what somebody measured here must not decide
    if "KGEN_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="kgen-tests-")
    os.environ["KGEN_CACHE_DIR"] = f"{folder}/session"
    os.environ["XDG_CACHE_HOME"] = folder  # what a machine needs once is built once, also for tests with folders of their own
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def _limit_threads() -> None:
    """Workers share the cores; two threads stay, so that code made for several threads runs as such."""
    cores = os.cpu_count() or 1
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = str(max(2, cores // workers))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    # Spinning threads of one worker would take the cores of the other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`every(n)`: n has no divisor in common with the number of back ends, types or cards, so that each of them is left."""
    marker = item.get_closest_marker("every")
    if marker is None or item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
        return
    seen = item.config.stash.setdefault(COLLECTED, Counter())
    name = item.nodeid.partition("[")[0]
    if seen[name] % marker.args[0]:
        item.add_marker(pytest.mark.slow)
    seen[name] += 1


@pytest.hookimpl(trylast=True)  # what -m and -k leave is what is dealt out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[first - 1 :: count]
    missing = _missing_requirements()
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not go through torch's hundred thousands of objects again and again."""
    gc.collect()
    gc.freeze()


def _missing_requirements() -> dict[str, str]:
    import torch

    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA GPU"
    if shutil.which(os.environ.get("KGEN_CXX", "g++")) is None:
        missing["cpu"] = "no C++ compiler"
    return missing


@pytest.fixture(autouse=True)
def _end_a_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs on a GPU ends its process, and pytest-xdist says which one it was: no test only seems slow."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(HANGS, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="session")
def _unmeasured_guards() -> Iterator[None]:
    """After each compile torch flushes the CPU's caches and times its guards, for a log: 30 ms that no test needs."""
    import torch._dynamo.guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Compiled code of one test must not be found by the next, which may compile the same function in another way."""
    import torch

    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_counters() -> None:
    """What is counted is the test's own."""
    from kgen.counters import counters

    counters.reset()


@pytest.fixture
def templates_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the estimates say, and whether or not they can be relied on, no library call is as fast as a template."""
    monkeypatch.setattr("kgen.cost.model.vendor_seconds", lambda problem: 1e9)
    monkeypatch.setattr("kgen.templates.contract.Template.uncalibrated", lambda template, problem: None)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for tests that count builds."""
    folder = tmp_path / "kgen-cache"
    monkeypatch.setenv("KGEN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def fresh_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for graphs and kernels. What is built once a machine takes half a minute and is found there."""
    from kgen import cache

    built, folder = cache.cache_dir(), tmp_path / "kgen-cache"
    own = folder / built.name
    own.mkdir(parents=True)
    for kind in ("runtime", "header", "loops"):
        (built / kind).mkdir(exist_ok=True)
        (own / kind).symlink_to(built / kind)
    monkeypatch.setenv("KGEN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import stub_driver

    return stub_driver.build(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub(stub_library: Path) -> Iterator[Any]:
    """A CUDA driver that runs kernels on the CPU, in place of the real one (tests/stub_driver.py)."""
    import stub_driver

    with stub_driver.installed(stub_library) as made:
        yield made


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """Convolutions of float32 numbers on GPUs may not round these, as they may unless that is forbidden."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture
def tf32() -> Iterator[None]:
    """Matmuls of float32 numbers on GPUs may round these: exact ones are not for templates that use TMA."""
    import torch

    known = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = known
