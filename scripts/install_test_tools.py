# SPDX-License-Identifier: Apache-2.0
"""Installs the programs that some tests run, with the system's package manager, where possible.

Runs on any Python 3.8 or newer. Without a known package manager or the right to use it, it says
what is missing and how to install it, and lets the tests go on: those that need it say so.
"""

import os
import shutil
import subprocess
import sys

PACKAGES = {
    # manager: (commands in front, {program: package})
    "apt-get": (
        ["apt-get", "install", "-y", "--no-install-recommends"],
        {"promtool": "prometheus"},
    ),
    "dnf": (["dnf", "install", "-y"], {"redis-server": "redis"}),
    "yum": (["yum", "install", "-y"], {"redis-server": "redis"}),
    "zypper": (["zypper", "--non-interactive", "install"], {"redis-server": "redis"}),
    "apk": (["apk", "add"], {"redis-server": "redis"}),
    "pacman": (["pacman", "-S", "--noconfirm", "--needed"], {"redis-server": "redis"}),
}
PROGRAMS = ("redis-server", "strace", "chromium", "promtool")
ALSO_CALLED = {"chromium": ("chromium-browser", "google-chrome")}
"""Other names of a program that will do."""


def say(text):
    print("[test-tools] " + text, flush=True)


def is_installed(program):
    return any(shutil.which(name) for name in (program, *ALSO_CALLED.get(program, ())))


def privilege():
    """What goes in front of a command that changes the system; None if it cannot be had."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None:
        return None
    if subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0:
        return [sudo]
    # A person at a terminal can type a password; a CI job would wait for ever.
    return [sudo] if sys.stdin.isatty() else None


def run(command):
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    say("$ " + " ".join(command))
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if done.returncode:
        print("\n".join("  | " + line for line in done.stdout.splitlines()[-8:]), flush=True)
    return done.returncode == 0


def main():
    missing = [program for program in PROGRAMS if not is_installed(program)]
    if not missing:
        return
    say("missing: " + ", ".join(missing))
    manager = next((name for name in PACKAGES if shutil.which(name)), None)
    if manager is None:
        say("no package manager known here; install them by hand: tests that need them will say so")
        return
    command, names = PACKAGES[manager]
    packages = [names.get(program, program) for program in missing]
    front = privilege()
    if front is None:
        say("no right to install; run this as root: " + " ".join([*command, *packages]))
        return
    done = run([*front, *command, *packages])
    if not done and manager == "apt-get":
        # A fresh container has no package lists.
        done = run([*front, "apt-get", "update"]) and run([*front, *command, *packages])
    if not done and len(packages) > 1:
        # One that this system does not have must not keep the others away.
        results = [run([*front, *command, package]) for package in packages]
        done = all(results)
    if not done:
        say("could not install all of them: tests that need them will say so")


if __name__ == "__main__":
    main()
