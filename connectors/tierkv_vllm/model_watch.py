# SPDX-License-Identifier: Apache-2.0
"""Learn of the model runner of this process's vLLM worker, which no connector hook hands over.

The plug-in runs in every vLLM process, most of which never have a worker, and with fork only in the
parent; vLLM's worker module is heavy. So it is not imported here: when somebody imports it,
`load_model` of its `Worker` (all platforms' workers inherit it) is wrapped to leave a weak
reference to the runner. Nothing else changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

WORKER_MODULE = "vllm.v1.worker.gpu_worker"

_runner: weakref.ref[Any] | None = None


def model_runner() -> Any | None:
    """vLLM's model runner in this process, once its model is loaded."""
    return _runner() if _runner is not None else None


def watch() -> None:
    """Wrap `load_model` now, or as soon as there is one. Idempotent."""
    module = sys.modules.get(WORKER_MODULE)
    if module is not None and hasattr(module, "Worker"):
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module as everybody would, and has it wrapped once it is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != WORKER_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module)
                # Not before: who only looks for the module, or fails to import it, tries again.
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)

            loader.exec_module = exec_module
        return spec


def _wrap(module: Any) -> None:
    load_model = module.Worker.load_model
    if getattr(load_model, "_tierkv", False):
        return

    @functools.wraps(load_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        global _runner
        _runner = weakref.ref(self.model_runner)
        return result

    wrapped._tierkv = True  # type: ignore[attr-defined]
    module.Worker.load_model = wrapped
