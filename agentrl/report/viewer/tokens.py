"""Token texts, from the tokenizer that lies in a run's newest checkpoint; without one, tokens are shown as numbers."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokenizer_file(run: Path) -> Path | None:
    """Return the tokenizer of a run's newest checkpoint."""
    files = sorted((run / "checkpoints").glob("step-*/model/tokenizer.json"))
    return files[-1] if files else None


def texts(run: Path, ids: list[int]) -> list[str] | None:
    """Return the text of each token, so that together they read as what the model saw; None without a tokenizer."""
    path = tokenizer_file(run)
    if path is None:
        return None
    tokenizer = _load(path, path.stat().st_mtime_ns)
    if tokenizer is None:
        return None
    pieces = [_bytes(tokenizer.id_to_token(number), number) for number in ids]
    return _whole(pieces)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain exceptions for files it cannot read
        return None


def _bytes(piece: str | None, number: int) -> bytes:
    """Return what a token of a byte-level or sentencepiece vocabulary stands for."""
    if piece is None:
        return f"<{number}>".encode()
    if match := BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    table = _byte_table()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.replace("\u2581", " ").encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2 lays them out."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _whole(pieces: list[bytes]) -> list[str]:
    """Decode each piece; a character whose bytes are spread over several tokens stands at the last of them."""
    result, held = [], b""
    for piece in pieces:
        data = held + piece
        try:
            result.append(data.decode())
            held = b""
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(data) - error.start < 4:
                result.append(data[: error.start].decode())
                held = data[error.start :]
            else:
                result.append(data.decode("utf-8", "replace"))
                held = b""
    if held and result:
        result[-1] += held.decode("utf-8", "replace")
    return result
