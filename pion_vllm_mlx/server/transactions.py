"""MULTI: commands of one connection that wait for EXEC."""

from __future__ import annotations

from dataclasses import dataclass, field

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.command import Command
from pion_vllm_mlx.server.keyspace_command import value
from pion_vllm_mlx.wire.resp import Arg, Simple

#: bytes of arguments that one transaction may hold.
MAX_QUEUED_BYTES = 512 << 20
#: commands that one transaction may hold.
MAX_QUEUED_COMMANDS = 1 << 20

QUEUED = Simple("QUEUED")
#: what a transaction may hold beside commands of the keyspace.
_HARMLESS = {"PING", "ECHO", "SELECT", "CLIENT", "COMMAND", "CONFIG", "INFO", "LASTSAVE"}


@dataclass
class Transaction:
    """Commands to execute together; ``broken`` once one of them was refused."""

    commands: list[tuple[Command, list[Arg]]] = field(default_factory=list)
    broken: bool = False
    _bytes: int = 0

    def growth(self) -> int:
        """Bytes of arguments of the commands that store something."""
        stored = (arg for entry, args in self.commands if entry.grows for arg in args)
        return sum(len(arg) for arg in stored if isinstance(arg, bytes))

    def queue(self, command: Command, args: list[Arg]) -> Simple:
        """Keep a command for EXEC. Raises CommandError for one that cannot be in here."""
        if not command.keyspace and command.name not in _HARMLESS:
            raise CommandError(f"{command.name} is not allowed in a transaction")
        held: list[Arg] = [value(arg) for arg in args]
        self._bytes += sum(len(arg) for arg in held if isinstance(arg, bytes))
        if self._bytes > MAX_QUEUED_BYTES or len(self.commands) >= MAX_QUEUED_COMMANDS:
            self.commands.clear()
            raise CommandError("the transaction is too long")
        self.commands.append((command, held))
        return QUEUED
