# SPDX-License-Identifier: Apache-2.0
"""Opens one connection: TCP or unix socket, TLS, AUTH, database, and a PING that must come back.

What goes wrong is told apart: `fatal` is what waiting does not mend (wrong password, missing right,
certificate that is not trusted). No message ever holds a secret or what a server says to AUTH,
since old servers repeat the arguments.

Threads and ownership. Runs on the event loop. The password is read again for every connection, so
that it may be changed without a restart; that blocks for the time of reading a small file.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass

from tierkv.config.base import SecretRef
from tierkv.config.redis import RedisConfig, is_loopback
from tierkv.config.secrets import resolve_secret
from tierkv.errors import ConfigError, ErrorKind
from tierkv.tiers.redis.commands import Reply, ReplyError, command, is_unavailable
from tierkv.tiers.redis.link import Link, LinkLost

RIGHTS = "+get +set +exists +unlink +ping +hello +info +pexpire"
"""What a user needs; Cluster `+cluster|slots` and a database other than 0 `+select` too."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        return bool(self.path) or is_loopback(self.host)


class DialError(Exception):
    """No connection.

    Attributes:
        kind: what it is counted as.
        fatal: trying again will not help.
    """

    def __init__(self, message: str, kind: ErrorKind, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.fatal = fatal


class Dialer:
    """Opens connections as the configuration says.

    Raises:
        DialError: fatal; a TLS file cannot be read.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._tls = _tls_context(config) if config.uses_tls else None

    async def dial(self, endpoint: Endpoint, seconds: float, *, master: bool = False) -> Link:
        """A connection that has answered.

        Args:
            seconds: for everything together.
            master: accept only a server that is a master (Sentinel may be ahead of it).

        Raises:
            DialError: see the module.
        """
        if self._tls is None and not endpoint.is_local and not self._config.insecure:
            raise DialError(
                f"plaintext to {endpoint}, which the server or Sentinel named: use TLS, "
                "or set insecure: true",
                ErrorKind.AUTH,
                fatal=True,
            )
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                link = await self._connect(endpoint)
        except TimeoutError:
            raise DialError(f"{endpoint} does not answer", ErrorKind.TIMEOUT) from None
        except ssl.SSLError as error:
            raise _tls_error(endpoint, error) from None
        except OSError as error:
            raise DialError(
                f"{endpoint} cannot be reached: {_reason(error)}", ErrorKind.EIO
            ) from None
        try:
            await self._greet(link, endpoint, deadline, master)
        except LinkLost as lost:
            if isinstance(link.cause, ssl.SSLError):  # TLS 1.3 tells of a missing certificate late
                raise _tls_error(endpoint, link.cause) from None
            what = "does not answer" if lost.kind is ErrorKind.TIMEOUT else "closes the connection"
            if self._tls is not None and self._config.tls_cert is None:
                what += "; does it want tls_cert and tls_key?"  # if its reason did not reach us
            raise DialError(f"{endpoint} {what}", lost.kind) from None
        except BaseException:
            link.abort(ErrorKind.WORKER)
            raise
        return link

    async def _connect(self, endpoint: Endpoint) -> Link:
        loop = asyncio.get_running_loop()
        if endpoint.path:
            _, link = await loop.create_unix_connection(Link, endpoint.path)
            return link
        transport, link = await loop.create_connection(Link, endpoint.host, endpoint.port)
        if self._tls is not None:
            # In two steps, so that what is cancelled in between can be given up at once: asyncio
            # would say goodbye first, on a loop that may be about to end.
            try:
                secured = await loop.start_tls(
                    transport, link, self._tls, server_hostname=endpoint.host
                )
            except BaseException:
                transport.abort()
                raise
            assert secured is not None
            link.connection_made(secured)
        sock: socket.socket = transport.get_extra_info("socket")
        # So that a peer that vanished without a word is noticed while nothing is asked.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        return link

    async def _greet(self, link: Link, endpoint: Endpoint, deadline: float, master: bool) -> None:
        config = self._config
        requests: list[tuple[str, bytes]] = []
        if config.username or config.password is not None:
            # A user may need no password; Redis then takes any, but wants to hear the name.
            password = b"" if config.password is None else read_secret(config.password)
            words = [config.username.encode()] if config.username else []
            requests.append(("AUTH", command(b"AUTH", *words, password)))
        if config.database:
            requests.append(("SELECT", command(b"SELECT", b"%d" % config.database)))
        if master:
            requests.append(("INFO", command(b"INFO", b"replication")))
        requests.append(("PING", command(b"PING")))
        replies = await link.ask(b"".join(data for _, data in requests), len(requests), deadline)
        for (name, _), reply in zip(requests, replies, strict=True):
            if isinstance(reply, ReplyError):
                raise self._refusal(name, reply, endpoint)
            if name == "INFO" and isinstance(reply, bytes) and b"role:slave" in reply:
                raise DialError(f"{endpoint} is not the master yet", ErrorKind.EIO)

    def _refusal(self, name: str, error: ReplyError, endpoint: Endpoint) -> DialError:
        user = self._config.username or "default"
        if is_unavailable(error) or (name == "PING" and error.code == "ERR"):
            return DialError(f"{endpoint} is not ready ({error.code})", ErrorKind.EIO)
        if "max number of clients" in error.text:  # said to whatever was asked first
            return DialError(
                f"{endpoint} takes no more connections; raise maxclients there", ErrorKind.EIO
            )
        if error.code in ("WRONGPASS", "NOAUTH") or (name, error.code) == ("AUTH", "ERR"):
            message = (
                f"{endpoint} does not take the password of user {user!r}; "
                "set username and password, or mend the user there"
            )
        elif error.code == "NOPERM":
            message = rights_message(str(endpoint), user, name, self._config)
        elif name == "SELECT":
            message = f"{endpoint} has no database {self._config.database}; mend the url"
        else:  # too many clients, protected mode, ...
            return DialError(f"{endpoint} refuses ({error.code})", ErrorKind.EIO)
        return DialError(message, ErrorKind.AUTH, fatal=True)


def rights_message(place: str, user: str, what: str, config: RedisConfig) -> str:
    """What to tell somebody whose user may not do what is needed."""
    more = " +cluster|slots" if config.cluster else ""
    more += " +select" if config.database else ""
    return (
        f"{place}: user {user!r} may not run {what}; run there: ACL SETUSER {user} "
        f"~{config.key_prefix}:* {RIGHTS}{more}"
    )


def read_secret(ref: SecretRef) -> bytes:
    """The secret, for one connection. Blocks on reading a small file.

    Raises:
        DialError: fatal; it cannot be read.
    """
    try:
        return resolve_secret(ref)
    except ConfigError as error:
        raise DialError(f"password: {error}", ErrorKind.AUTH, fatal=True) from None


def is_error(reply: Reply, code: str) -> bool:
    """Whether a reply is the error of that code."""
    return isinstance(reply, ReplyError) and reply.code == code


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)  # asyncio's own text has the address in it once more


def _tls_context(config: RedisConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(f) for f in (config.tls_ca, config.tls_cert, config.tls_key) if f)
        reason = error.strerror or type(error).__name__
        raise DialError(
            f"TLS files {files}: {reason}; mend tls_ca, tls_cert, tls_key",
            ErrorKind.AUTH,
            fatal=True,
        ) from None
    return context


def _tls_error(endpoint: Endpoint, error: ssl.SSLError) -> DialError:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        message = (
            f"{endpoint}: its certificate is not trusted ({reason}); set tls_ca to the authority "
            "that signed it, and url to a name that it holds"
        )
    else:
        reason = (error.reason or type(error).__name__).lower().replace("_", " ")
        message = (
            f"{endpoint}: no TLS connection ({reason}); is this its TLS port, and does it want "
            "tls_cert and tls_key?"
        )
    return DialError(message, ErrorKind.AUTH, fatal=True)
