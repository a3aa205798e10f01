"""What the rows that KV.PREFIX.WARM makes resident have to be, and stay while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.attention import warming
from pion_vllm_mlx.server.attention.resident import Resident
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.index import StateBlob
from pion_vllm_mlx.wire.resp import Arg

WHERE = "KV.PREFIX.WARM"
NOT_FOUND = f"{WHERE} session not found"
#: how often rows are read again that were moved or replaced while they were read.
ATTEMPTS = 5
#: where the completion record of a namespace lies among its states.
_RECORD_LAYER = 65_535


@dataclass(frozen=True)
class Whole:
    """What a layer has to be to become resident; 0 tokens and no record: anything."""

    namespace: bytes
    tokens: int
    record: StateBlob | None

    @classmethod
    async def of(cls, context: Context, namespace: bytes, given: Mapping[str, list[Arg]]) -> Whole:
        """From TOKENS and RECORD. Raises CommandError where the record is another one."""
        tokens = arguments.given_integer(given, "TOKENS", 1, arguments.MAX_TOKENS)
        if "RECORD" not in given:
            return cls(namespace, tokens, None)
        wanted = arguments.given_word(given, "RECORD").lower()
        record = context.state.states.get(namespace, {}).get(_RECORD_LAYER)
        if record is None:
            raise CommandError(f"{WHERE}: the namespace has no completion record")
        try:
            digest = await context.store.run(partial(warming.state_digest, record))
        except OSError as error:
            raise CommandError(f"{WHERE}: the record cannot be read: {error.strerror}") from error
        if digest.encode() != wanted:
            raise CommandError(f"{WHERE}: the namespace has another completion record")
        return cls(namespace, tokens, record)

    def check(self, context: Context, layer: int, resident: Resident) -> None:
        """Raise CommandError for a layer that was not read whole under this record.

        Rows are stored in order, and a sliding layer has none of the first tokens: what
        tells a half is its end. Queries that would see a gap are refused by the slot.
        """
        if self.tokens and resident.tokens != self.tokens:
            raise CommandError(
                f"{WHERE}: layer {layer} holds {resident.tokens} tokens, not {self.tokens}"
            )
        if self.record is not None:
            now = context.state.states.get(self.namespace, {}).get(_RECORD_LAYER)
            if now is not self.record:
                raise CommandError(f"{WHERE}: the prefix was replaced meanwhile")
