# SPDX-License-Identifier: Apache-2.0
"""TCP ports on the loopback interface."""

from __future__ import annotations

import socket

from tierkv.demo.paths import DemoError


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def check_port(port: int) -> int:
    """`port`, if a server can listen on it.

    Raises:
        DemoError: it cannot.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise DemoError(
                f"--port {port}: cannot listen on 127.0.0.1:{port} ({error}); choose another one, "
                "or leave it out for a free one"
            ) from error
    return port
