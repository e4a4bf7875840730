# SPDX-License-Identifier: Apache-2.0
"""The model runner is found however and whenever vLLM's worker module is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tierkv_vllm import model_watch

WORKER = '''
class Runner:
    pass

class Worker:
    loads = 0

    def load_model(self, *args, **kwargs):
        """Load it."""
        self.loads += 1
        self.model_runner = Runner()
        return args, kwargs

class CPUWorker(Worker):
    def load_model(self):
        return super().load_model("from a subclass")
'''


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that looks like vLLM's worker, not imported yet."""
    (tmp_path / "a_worker_module.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model_watch, "WORKER_MODULE", "a_worker_module")
    monkeypatch.setattr(model_watch, "_runner", None)
    finders = list(sys.meta_path)
    sys.meta_path[:] = [f for f in finders if not isinstance(f, model_watch._Finder)]
    yield "a_worker_module"
    sys.meta_path[:] = finders
    sys.modules.pop("a_worker_module", None)


def load(module: Any, kind: str = "Worker") -> Any:
    worker = getattr(module, kind)()
    answer = worker.load_model(1, two=2) if kind == "Worker" else worker.load_model()
    assert worker.loads == 1
    assert model_watch.model_runner() is worker.model_runner
    return worker, answer


def test_watching_before_the_import(name: str) -> None:
    model_watch.watch()
    assert model_watch.model_runner() is None
    _, answer = load(importlib.import_module(name))
    assert answer == ((1,), {"two": 2})


def test_watching_after_the_import(name: str) -> None:
    module = importlib.import_module(name)
    model_watch.watch()
    load(module)


def test_workers_of_other_platforms_inherit_it(name: str) -> None:
    model_watch.watch()
    _, answer = load(importlib.import_module(name), "CPUWorker")
    assert answer == (("from a subclass",), {})


def test_watching_often_wraps_once_and_leaves_no_finder(name: str) -> None:
    before = len(sys.meta_path)
    model_watch.watch()
    model_watch.watch()
    assert len(sys.meta_path) == before + 1
    module = importlib.import_module(name)
    wrapped = module.Worker.load_model
    model_watch.watch()
    assert len(sys.meta_path) == before
    assert module.Worker.load_model is wrapped
    assert not hasattr(wrapped.__wrapped__, "__wrapped__")
    assert wrapped.__doc__ == "Load it."


def test_who_only_asks_where_the_module_is_disturbs_nothing(name: str) -> None:
    model_watch.watch()
    assert importlib.util.find_spec(name) is not None
    load(importlib.import_module(name))


def test_an_import_that_failed_is_watched_when_it_is_tried_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a_worker_module.py"
    path.write_text("raise RuntimeError('not now')")
    model_watch.watch()
    with pytest.raises(RuntimeError, match="not now"):
        importlib.import_module(name)
    path.write_text(WORKER)
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    load(importlib.import_module(name))


def test_other_modules_are_found_as_ever(name: str, tmp_path: Path) -> None:
    (tmp_path / "another_module.py").write_text("value = 3")
    model_watch.watch()
    assert importlib.import_module("another_module").value == 3
    del sys.modules["another_module"]
    load(importlib.import_module(name))


def test_the_runner_is_not_kept_alive(name: str) -> None:
    model_watch.watch()
    worker, _ = load(importlib.import_module(name))
    ended = weakref.ref(worker.model_runner)
    del worker
    assert ended() is None
    assert model_watch.model_runner() is None


def test_vllm_still_has_the_method_that_is_wrapped() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    assert issubclass(CPUWorker, Worker)
    assert callable(Worker.load_model)
