# SPDX-License-Identifier: Apache-2.0
"""Makes the development environment, repairs it, or sees at once that nothing is to be done.

Usage: make_env.py VENV EXTRAS. Runs on any Python 3.8 or newer, before anything is installed; the
environment itself gets Python 3.11 or newer. A stamp, written last, holds a digest of what the
environment was made from: without it, or with another one, the installation runs (again), which
is quick for what is already there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = [(3, 11), (3, 12), (3, 13), (3, 14)]
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
"""Come along with vLLM and are not needed for text; one that does not fit torch breaks the rest."""
QUIET_S = 20


def say(text):
    print("[env] " + text, flush=True)


def fail(text):
    sys.exit("[env] error: " + text)


def find_python():
    """The interpreter for the environment: this one, or the newest supported one on the PATH."""
    if sys.version_info[:2] in SUPPORTED:
        return sys.executable
    for major, minor in reversed(SUPPORTED):
        # A shim may exist for a version that is not there: ask it.
        found = shutil.which(f"python{major}.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    fail(
        f"Python {sys.version.split()[0]} is too old or too new, and no python3.11 to 3.14 is on "
        "the PATH; install one, or run: make PYTHON=/path/to/python3.11"
    )


def fingerprint(python, extras):
    """What decides the environment's content; a change of it runs the installation again."""
    digest = hashlib.sha256()
    for part in (python, extras, str(ROOT)):
        digest.update(part.encode() + b"\0")
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1]


def works(python, code):
    return subprocess.run([str(python), "-c", code], capture_output=True, cwd="/").returncode == 0


def make_venv(base, venv):
    python = venv / "bin" / "python"
    if python.exists() and works(python, ""):
        say(f"using the environment that is there: {venv}")
        if not works(python, "import pip"):
            subprocess.run([str(python), "-m", "ensurepip"], capture_output=True)
        if works(python, "import pip"):
            forget_half_installed(venv)
            return python
    say(f"making {venv} with {base}")
    done = subprocess.run(
        [base, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True
    )
    if done.returncode or not works(python, "import pip"):
        fail(
            f"cannot make a virtual environment: {last_line(done.stdout + done.stderr)}; "
            "on Debian and Ubuntu install python3-venv"
        )
    return python


def forget_half_installed(venv):
    """Let pip install anew what it was interrupted in: it writes INSTALLER after all the files."""
    for info in venv.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").is_file():
            say(f"incomplete, will be installed again: {info.name}")
            shutil.rmtree(info)


def pip_install(python, log, *arguments):
    """Run pip, its output into `log`, and show that it is alive. Returns the exit status."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    shown = time.monotonic()
    with log.open("a") as file:
        file.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        for line in process.stdout:
            file.write(line)
            file.flush()
            line = line.strip()
            milestone = line.startswith(("Installing collected", "Building wheel", "ERROR"))
            if milestone or (time.monotonic() - shown > QUIET_S and line.startswith("Collecting")):
                shown = time.monotonic()
                say("  " + (line if len(line) < 90 else line[:89] + "…"))
        return process.wait()


def drop_what_does_not_fit(python):
    """Remove the optional companions of torch if one of them cannot be imported with it."""
    check = "import importlib.util as u; u.find_spec('torchvision') and __import__('torchvision')"
    if works(python, check):
        return
    say("torchvision does not fit this torch and is not needed: removing " + ", ".join(OPTIONAL))
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *OPTIONAL],
        check=True,
        capture_output=True,
    )


def main():
    venv, extras = ROOT / sys.argv[1], sys.argv[2]
    stamp, log = venv / ".tierkv-env", venv / "setup.log"
    base = find_python()
    wanted = fingerprint(base, extras)
    if stamp.is_file() and stamp.read_text() == wanted and (venv / "bin" / "tierkv").exists():
        return
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    python = make_venv(base, venv)
    target = f"{ROOT}[{extras}]"
    say(f"installing tierkv[{extras}], about 2 GB the first time; pip's output: {log}")
    if pip_install(python, log, "--editable", target) != 0:
        print("".join(log.read_text(errors="replace").splitlines(True)[-8:]), end="")
        fail(
            f"pip could not install it (above its last lines, all in {log}). If it lacks a CPU "
            "build of torch, which PyTorch publishes on an index of its own, set "
            "PIP_EXTRA_INDEX_URL to that index; then run 'make env' again"
        )
    if "vllm" in extras:
        drop_what_does_not_fit(python)
        say("asking vLLM for its version")
        ask = [str(python), "-m", "tierkv.demo.launch", "--version"]
        done = subprocess.run(ask, capture_output=True, text=True, cwd=str(venv))
        if done.returncode:
            fail(f"vLLM does not start: {last_line(done.stderr)}")
        say("vLLM " + done.stdout.strip().splitlines()[-1])
    stamp.write_text(wanted)
    say(f"ready in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n[env] interrupted; 'make env' goes on from here")
