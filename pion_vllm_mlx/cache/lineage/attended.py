"""Stored conversations attended where they live: the longest stored prefix of a prompt.

Nothing is restored. Each segment of the chain is proved by its record as a restore proves it, and
the server warms the chain while these very records lie there. What conversations have in common
is resident once.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from pion_vllm_mlx.cache.attend_client import AttendClient
from pion_vllm_mlx.cache.attend_request import Ancestor
from pion_vllm_mlx.cache.attend_stored import StoredPrefix, content_session, shape_of
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord
from pion_vllm_mlx.cache.lineage.client import connect
from pion_vllm_mlx.cache.lineage.coverage import joined, latest_point
from pion_vllm_mlx.cache.lineage.index import Index
from pion_vllm_mlx.cache.lineage.matching import Rules, match_of
from pion_vllm_mlx.cache.lineage.model_key import ModelKey
from pion_vllm_mlx.cache.lineage.records import Claim, covered, links, proved
from pion_vllm_mlx.cache.lineage.shape import Shape
from pion_vllm_mlx.cache.lineage.tokens import Tokens, token_ids
from pion_vllm_mlx.cache.lineage.types import LineageOptions, Match
from pion_vllm_mlx.config import ClientSwitches, ServerEnvironment
from pion_vllm_mlx.errors import (
    CommandError,
    DamagedData,
    NewerFormat,
    StoreUnavailable,
    UnsupportedCache,
)

log = logging.getLogger("pion_vllm_mlx")


class AttendedConversations:
    """The conversations that a ``LineageStore`` of the same model and options keeps.

    Needs no store of its own in this process. Reads the weights for the key.
    """

    def __init__(self, model: Any, options: LineageOptions | None = None) -> None:
        """Raises UnsupportedCache for a model whose conversations are not kept, or need states."""
        self.model = model
        self.options = options or LineageOptions()
        switches = ClientSwitches.from_environment()
        self._shape = Shape.of(model, None, self.options.kv_bits, self.options.kv_group_size)
        if self._shape.stateful or self.options.kv_bits is not None:
            raise UnsupportedCache("recurrent states and quantized caches are not attended there")
        self._key = ModelKey(model, None, self.options)
        self.client = connect(self.options)
        password = self.options.password or ServerEnvironment.from_environment().password
        # the binary lane takes the server's own password alone
        no_binary = switches.no_binary or self.client.endpoint.tenant
        self.attention = AttendClient(self.client, password, no_binary=no_binary)
        self.attend_unfused = switches.no_fused_attend
        weakref.finalize(self, _close, self.attention, self.client)

    def find(self, tokens: Tokens) -> AttendedPrefix | None:
        """The longest stored prefix of a prompt, at most all but its last token; None for none.

        For ``make_pion_prompt_cache(model, found.namespace, found, found.length)``. Raises
        StoreUnavailable where no server answers.
        """
        ids, why = token_ids(tokens)
        if ids is None:
            log.info("no prefix is attended: %s", why)
            return None
        names = self._key.current().names
        self.client.open()
        with self.client.within(self.options.deadline_seconds):
            found = Index(self.client, names).find(ids, whole=self._shape.wants_cuts)
        rules = Rules(self._shape, self.options.min_gain, checkpoints=True)
        match = match_of(found, ids, names, rules)
        if not match:
            log.info("no prefix is attended: %s", match.why)
            return None
        return AttendedPrefix(self, match)

    def proofs(self, match: Match) -> list[tuple[bytes, CompletionRecord]]:
        """The records of a match's pieces. Raises DamagedData for one that does not prove it."""
        commands = [("SSM.PREFIX.FETCH", one.namespace, COMPLETION_LAYER) for one in match.chain]
        blobs = self.client.pipeline(match.chain[0].namespace, commands)
        bases = [piece.base for piece in match.chain]
        keys = links(self._key.current().identity, match.tokens, bases)
        found = []
        for piece, key, blob in zip(match.chain, keys, blobs, strict=True):
            if isinstance(blob, CommandError):
                raise StoreUnavailable(blob.sentence) from blob
            claim = Claim(key, match.tokens[: piece.end], piece.base, piece.namespace)
            proof = proved(blob, claim)
            if proof.shared < piece.end:
                raise DamagedData(f"{piece.namespace}: its record is of other tokens")
            found.append((blob, proof.record))
        self._check_windows(match, [record for _, record in found])
        return found

    def session(self, match: Match) -> str:
        """The session id of a prefix: of its tokens and the key of the model."""
        identity = self._key.current().identity
        return content_session(match.chain[-1].namespace, identity, match.tokens[: match.length])

    def close(self) -> None:
        """Closes the connections."""
        _close(self.attention, self.client)

    def _check_windows(self, match: Match, records: Sequence[CompletionRecord]) -> None:
        """Raises DamagedData where rows of a sliding window are not there."""
        parts = [
            (covered(record, piece.base, piece.end), piece.base, piece.end)
            for record, piece in zip(records, match.chain, strict=True)
        ]
        there = joined(parts)
        windows = {window: there.get(window, ()) for window in self._shape.windows}
        if latest_point(match.length, windows) != match.length:
            raise DamagedData(f"{match.chain[-1].namespace}: rows of a window are not there")


class AttendedPrefix:
    """One prefix of a conversation; stands for a prompt cache in ``make_pion_prompt_cache``.

    ``length`` tokens of the prompt; ``namespace`` is that of the last segment. What is proved
    when a cache is made of it is proved again where the server says that a record changed.
    """

    #: nothing without a completion record is attended
    strict = True

    def __init__(self, owner: AttendedConversations, match: Match) -> None:
        self._owner, self._match = owner, match
        self.model = owner.model
        self.attention: AttendClient = owner.attention
        self.attend_unfused: bool = owner.attend_unfused
        self.length = match.length
        self.namespace: str = match.chain[-1].namespace

    @property
    def source(self) -> AttendedPrefix:
        """As that of a prompt cache: this prefix and no other."""
        return self

    def local(self, namespace: str, num_tokens: int) -> list[Any] | None:
        """None: it is not in this process."""
        return None

    def asked(self, namespace: str) -> bool:
        """Whether these tokens are meant by a namespace."""
        return namespace == self.namespace

    def stored(self, namespace: str, num_tokens: int) -> StoredPrefix | None:
        """What the server has of it now; None for another namespace.

        Raises ValueError for another number of tokens, and where it is not proved any more.
        """
        if namespace != self.namespace:
            return None
        if num_tokens != self.length:
            raise ValueError(
                f"namespace {namespace}: {self.length} tokens are meant, not {num_tokens}"
            )
        try:
            found = self._owner.proofs(self._match)
        except (DamagedData, NewerFormat) as error:
            raise ValueError(f"namespace {namespace}: {error}") from error
        digests = [hashlib.sha256(blob).hexdigest() for blob, _ in found]
        above = zip(self._match.chain[:-1], digests, strict=False)
        return StoredPrefix(
            self._owner.session(self._match),
            self.length,
            digests[-1],
            tuple(shape_of(leaf) for leaf in found[-1][1].leaves),
            tuple(Ancestor(one.namespace, one.end - one.base, digest) for one, digest in above),
        )


def _close(attention: AttendClient, client: Any) -> None:
    attention.close()
    client.close()
