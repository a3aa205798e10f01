"""Certificates for tests: one that signs itself, for a name of this machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A certificate, which is its own CA, and its key."""

    cert: Path
    key: Path

    def server_flags(self, port: int) -> tuple[str, ...]:
        """The flags of a server that shows it at ``port``."""
        files = ("--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key))
        return ("--tls-port", str(port), *files)


def self_signed(folder: Path, name: str, hosts: str = "DNS:localhost") -> Certificate:
    """A new one for ``hosts``, as OpenSSL writes a subjectAltName."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(made.key)]
    command += ["-addext", f"subjectAltName={hosts}", "-out", str(made.cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return made
