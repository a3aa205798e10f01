"""Every error the package raises, and the wire codes they travel under.

::

    PionError
    ├── CommandError               a command was refused; carries the wire code
    │   ├── AuthenticationRequired   NOAUTH
    │   ├── WrongPassword            WRONGPASS
    │   ├── PermissionRefused        NOPERM
    │   ├── OutOfMemory              OOM
    │   ├── UnsupportedProtocol      NOPROTO
    │   ├── ColdMiss                 COLDMISS
    │   ├── WrongType                WRONGTYPE
    │   ├── WorkerDown               LOADING; to clients a StoreUnavailable
    │   ├── UnknownFormat            ERR; a ConfigError too
    │   └── TransactionAborted       EXECABORT
    ├── ServerRefused              a command's refusal, as the adapters raise it
    ├── ProtocolError              bytes on the wire that are not RESP
    ├── StoreUnavailable           the server is absent, too slow, or answers nonsense
    │   ├── DeadlineExceeded         the time a cache operation may take is over
    │   │   └── StillStarting          an embedded server is on its way up
    │   └── GreetingRefused          the right server wants another password
    ├── DamagedData                stored bytes that do not verify
    ├── NewerFormat                a file written by a newer version
    ├── DataFolderBusy             another process owns the data folder
    ├── UnsupportedCache           a cache class this version cannot store
    ├── ConfigError                a bad flag or setting
    └── PionMlxCompatError         mlx-lm is missing, or its seam is not one we know

``WIRE_CODES`` maps a code to its class: the server turns an exception into
``-<code> <sentence>``, a client turns the line back into the same class.
"""

from __future__ import annotations


class PionError(Exception):
    """Base of every error of this package."""


class CommandError(PionError):
    """A command was refused and changed nothing.

    ``code`` is the first word of the error line, ``sentence`` the rest.
    """

    code = "ERR"

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class AuthenticationRequired(CommandError):
    """The connection has to authenticate first."""

    code = "NOAUTH"


class WrongPassword(CommandError):
    """The credentials do not match."""

    code = "WRONGPASS"


class PermissionRefused(CommandError):
    """The connection's user may not use this command."""

    code = "NOPERM"


class OutOfMemory(CommandError):
    """The server is at its memory limit."""

    code = "OOM"


class UnsupportedProtocol(CommandError):
    """HELLO asked for a RESP version that does not exist here."""

    code = "NOPROTO"


class ColdMiss(CommandError):
    """The attention slot is known but not resident."""

    code = "COLDMISS"


class WrongType(CommandError):
    """A key holds another kind of value than the command works on."""

    code = "WRONGTYPE"


class WorkerDown(CommandError):
    """The worker of several that was asked cannot be started; the code is what clients wait at."""

    code = "LOADING"


class TransactionAborted(CommandError):
    """A command of a transaction was refused while it was queued."""

    code = "EXECABORT"


class ServerRefused(PionError, RuntimeError):
    """A command was refused; the message is the server's error line."""


class ProtocolError(PionError):
    """Bytes that are not valid RESP; the connection cannot go on."""


class StoreUnavailable(PionError):
    """The server is absent, closed the connection, or answers something else."""


class DeadlineExceeded(StoreUnavailable):
    """A cache operation took longer than its deadline allows."""


class StillStarting(DeadlineExceeded):
    """An embedded server does not listen yet, and may soon."""


class GreetingRefused(StoreUnavailable):
    """The right server answers and does not let us in; knocking again will not help."""


class DamagedData(PionError):
    """Stored bytes do not match their checksum or their description."""


class NewerFormat(PionError):
    """A file was written by a newer version of this package."""


class DataFolderBusy(PionError):
    """Another process owns the data folder; the message says which."""


class UnsupportedCache(PionError, TypeError):
    """A cache object of a class that this version cannot store."""


class ConfigError(PionError, ValueError):
    """A flag, an environment variable or an argument is not acceptable."""


class UnknownFormat(CommandError, ConfigError):
    """A format name that this version does not know."""


class PionMlxCompatError(PionError, RuntimeError):
    """mlx-lm is missing, too old, or its attention seam has changed."""


WIRE_CODES: dict[str, type[CommandError]] = {
    kind.code: kind
    for kind in (
        CommandError,
        AuthenticationRequired,
        WrongPassword,
        PermissionRefused,
        OutOfMemory,
        UnsupportedProtocol,
        ColdMiss,
        WrongType,
        WorkerDown,
        TransactionAborted,
    )
}


def from_wire(line: str) -> CommandError:
    """The exception for an error line without its leading dash."""
    code, _, sentence = line.partition(" ")
    kind = WIRE_CODES.get(code)
    if kind is None:
        return CommandError(line)
    return kind(sentence)
