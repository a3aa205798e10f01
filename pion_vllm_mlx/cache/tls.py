"""The client's side of TLS: a verified server, behind calls like those of a plain socket.

What the operating system trusts is trusted, or the CA of ``ClientTls`` alone; the name in the
certificate has to be the host of the URL. There is no way to switch that off.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from pion_vllm_mlx.config import ClientTls
from pion_vllm_mlx.errors import ConfigError, StoreUnavailable

_SEND_BYTES = 256 << 10
"""At most so many at a call: it returns when all are sent, or the socket takes no more."""


class TlsSocket:
    """An encrypted connection that does not block, with a socket's errors for what goes wrong.

    OpenSSL has conditions of its own: "wants to read" and "wants to write" are a
    BlockingIOError here, an end in the middle of sending is a BrokenPipeError.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close this process's descriptor; a forked parent keeps its own."""
        self._sock.close()

    def recv_into(self, buffer: memoryview) -> int:
        """Bytes received, 0 at the end. Raises BlockingIOError, OSError."""
        try:
            return self._sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def send(self, data: memoryview) -> int:
        """Bytes taken. After a BlockingIOError the next call must begin with the same bytes."""
        try:
            return self._sock.send(data[:_SEND_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise BrokenPipeError from error

    def spoke(self) -> bool:
        """Whether the other side closed or sent something; a session ticket is neither."""
        try:
            self._sock.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True
        return True


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """The context of a connection. Raises ConfigError, with the file that cannot be used."""
    for path in (tls.ca_file, tls.cert_file, tls.key_file):
        _check_readable(path)
    if tls.key_file is not None and tls.cert_file is None:
        raise ConfigError(f"{tls.key_file}: a key needs its certificate (PION_TLS_CERT_FILE)")
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tls.ca_file} holds no certificate of a CA: {error}") from error
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, _no_passphrase)
        except (OSError, ValueError) as error:
            names = f"{tls.cert_file}, {tls.key_file or 'with its key in it'}"
            raise ConfigError(f"{names}: not a certificate and its key: {error}") from error
    return context


def secured(sock: socket.socket, host: str, tls: ClientTls) -> TlsSocket:
    """A connected socket, after the handshake, which its timeout bounds; not blocking.

    Raises OSError, of it SSLCertVerificationError for a server that is not proved, and
    StoreUnavailable for files that cannot be used any more.
    """
    try:
        wrapped = client_context(tls).wrap_socket(sock, server_hostname=host)
    except ConfigError as error:
        raise StoreUnavailable(str(error)) from error
    wrapped.setblocking(False)
    return TlsSocket(wrapped)


def _check_readable(path: Path | None) -> None:
    """Raises ConfigError; what OpenSSL says names no file."""
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _no_passphrase() -> str:
    """Nobody is there to be asked for one."""
    raise ValueError("the key is locked by a passphrase")
