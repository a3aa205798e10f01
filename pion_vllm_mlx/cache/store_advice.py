"""What a user can do about a store that is not to be had."""

from __future__ import annotations

import ssl

from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    CommandError,
    GreetingRefused,
    PionError,
    WrongPassword,
)

_NEEDS_NONE = 'use url="embedded:", which needs none'
_OTHER_NAME = (62, 64)  # OpenSSL's codes for a certificate of another host name, or address


def nobody_listens(error: BaseException) -> bool:
    """Whether a connection failed for want of a listener, at once."""
    cause = error.__cause__
    # A socket that is not there has no file name in its error; a data folder that is not has.
    missing = isinstance(cause, FileNotFoundError) and cause.filename is None
    return missing or isinstance(cause, ConnectionRefusedError)


def what_helps(error: PionError, *, command_line: bool = False) -> str:
    """What the user can do about a store that is not to be had; empty where nobody can tell.

    ``command_line``: in the words of one who has options, and no arguments of Python.
    """
    if isinstance(error.__cause__, CommandError):
        error = error.__cause__  # the pause after a refusal is told as an absence
    if isinstance(error, AuthenticationRequired | WrongPassword | GreetingRefused):
        argument = "" if command_line else "as password= or "
        return f"give the server's password {argument}in PION_REQUIREPASS"
    if isinstance(error, CommandError) and error.sentence.startswith("unknown command"):
        return "what answers there is no pion-server"
    if nobody_listens(error):
        other = "--url names another place" if command_line else _NEEDS_NONE
        return f'start "pion-server --kvcache", or {other}'
    return _what_helps_tls(error.__cause__, command_line)


def with_advice(error: PionError, *, command_line: bool = False) -> str:
    """What went wrong, and what can be done about it where that is known."""
    advice = what_helps(error, command_line=command_line)
    return f"{str(error).rstrip('.')}; {advice}" if advice else str(error)


def _what_helps_tls(cause: BaseException | None, command_line: bool) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in _OTHER_NAME:
            return "the URL has to name the host as the server's certificate does"
        option = "--tls-ca-file" if command_line else "?ca=FILE"
        return f"name the CA of the server's certificate by {option} or in PION_TLS_CA_FILE"
    reason = getattr(cause, "reason", None) if isinstance(cause, ssl.SSLError) else None
    if reason == "WRONG_VERSION_NUMBER":
        return "no TLS is spoken there: tls:// needs the port of --tls-port"
    return ""
