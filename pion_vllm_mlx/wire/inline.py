"""Inline commands: one line of words, with the quoting rules of Redis."""

from __future__ import annotations

from pion_vllm_mlx.errors import ProtocolError

_BLANK = b" \t\n\r\x0b\x0c\x00"
_QUOTES = b"\"'"
_ESCAPES = {ord("n"): 10, ord("r"): 13, ord("t"): 9, ord("b"): 8, ord("a"): 7}


def split_inline(line: bytes) -> list[bytes]:
    r"""Split a line, without its line end, into words.

    ``"…"`` knows ``\n \r \t \b \a``, ``\xHH`` and ``\`` before any other character;
    ``'…'`` knows ``\'`` only. A closing quote ends its word. Raises ProtocolError
    where a quote is not closed or is followed by something else than a blank.
    """
    if b'"' not in line and b"'" not in line:
        return line.replace(b"\0", b" ").split()
    words: list[bytes] = []
    at = 0
    while True:
        while at < len(line) and line[at] in _BLANK:
            at += 1
        if at == len(line):
            return words
        word, at = _word(line, at)
        words.append(word)


def _word(line: bytes, at: int) -> tuple[bytes, int]:
    """One word that starts at ``at``; the word, and where it ends."""
    word = bytearray()
    while at < len(line) and line[at] not in _BLANK:
        if line[at] in _QUOTES:
            at = _quoted(line, at, word)
            if at < len(line) and line[at] not in _BLANK:
                raise _unbalanced()
            break
        word.append(line[at])
        at += 1
    return bytes(word), at


def _quoted(line: bytes, at: int, word: bytearray) -> int:
    """Append the quoted text that opens at ``at`` to ``word``; where it ends."""
    quote = line[at]
    double = quote == _QUOTES[0]
    at += 1
    while at < len(line):
        byte = line[at]
        if byte == quote:
            return at + 1
        if byte == 92 and at + 1 < len(line) and (double or line[at + 1] == quote):
            at = _escape(line, at, word)
            continue
        word.append(byte)
        at += 1
    raise _unbalanced()


def _escape(line: bytes, at: int, word: bytearray) -> int:
    """Append what the backslash at ``at`` stands for; where the escape ends."""
    digits = line[at + 2 : at + 4]
    if line[at + 1] == ord("x") and len(digits) == 2 and _is_hex(digits):
        word.append(int(digits, 16))
        return at + 4
    byte = line[at + 1]
    word.append(_ESCAPES.get(byte, byte) if line[at + 1] != ord("'") else byte)
    return at + 2


def _is_hex(digits: bytes) -> bool:
    return all(byte in b"0123456789abcdefABCDEF" for byte in digits)


def _unbalanced() -> ProtocolError:
    return ProtocolError("Protocol error: unbalanced quotes in request")
