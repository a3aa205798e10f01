"""TLS: what the certificate flags ask for."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.session import TlsConfig

#: how long a client may take to shake hands.
HANDSHAKE_SECONDS = 10.0


def tls_context(config: TlsConfig) -> ssl.SSLContext:
    """A context for the listener; with a CA every client has to show a certificate of it.

    Raises ConfigError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _check_readable(config)
    pair = f"--tls-cert-file {config.cert_file} with --tls-key-file {config.key_file}"
    with _named(pair):
        context.load_cert_chain(config.cert_file, config.key_file, _no_passphrase)
    if config.ca_cert_file is not None:
        with _named(f"--tls-ca-cert-file {config.ca_cert_file}"):
            context.load_verify_locations(config.ca_cert_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _named(files: str) -> Iterator[None]:
    """What OpenSSL refuses is a ConfigError that names the files."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tls-port: {files} cannot be used: {error}") from error


def _check_readable(config: TlsConfig) -> None:
    """Raise ConfigError, with flag and path: what OpenSSL says names neither."""
    files = {
        "--tls-cert-file": config.cert_file,
        "--tls-key-file": config.key_file,
        "--tls-ca-cert-file": config.ca_cert_file,
    }
    for flag, path in files.items():
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from error


def _no_passphrase() -> str:
    """Nobody is there to be asked for one."""
    raise ValueError("the key is locked by a passphrase")
