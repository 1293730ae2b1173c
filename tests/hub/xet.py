"""Reading what hf_xet stores.

Given ``local://DIR`` as the address of its content store, hf_xet keeps the data in that folder itself: in *xorbs*, blocks
of compressed chunks, and in *shards*, which say which chunks of which xorbs make up a file. This is the way back to the
bytes, for clients that download by plain HTTP.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHARD_HEADER_SIZE = 48
ENTRY_SIZE = 48
LAST_FILE = b"\xff" * 32
HAS_VERIFICATION, HAS_METADATA = 0x80000000, 0x40000000
CHUNK_HEADER_SIZE = 8
UNCOMPRESSED, GROUPED_LZ4 = 0, 2


class Term(NamedTuple):
    """Consecutive chunks of a xorb, from ``first`` to before ``end``."""

    xorb: str
    first: int
    end: int


class XetFile(NamedTuple):
    """What a shard knows of a file."""

    sha256: str | None
    hash: str
    size: int
    terms: list[Term]


class XetStore:
    """The folder that hf_xet stores into."""

    def __init__(self, folder: Path) -> None:
        self.url = f"local://{folder}"
        self._xorbs = folder / "xet/xorbs/xorbs"
        self._shards = folder / "xet/xorbs/shards"

    def find(self, sha256: str) -> XetFile | None:
        for shard in self._shards.glob("*.mdb"):
            for file in files_of_shard(shard.read_bytes()):
                if file.sha256 == sha256:
                    return file
        return None

    def read(self, file: XetFile) -> bytes:
        """The file put together from its chunks."""
        data = b"".join(
            read_chunks((self._xorbs / f"default.{term.xorb}").read_bytes(), term.first, term.end)
            for term in file.terms
        )
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ValueError(f"the chunks of {file.hash} do not add up to the SHA-256 {file.sha256}")
        return data


def hex_of_hash(raw: bytes) -> str:
    """Xet writes a hash as four little-endian 64-bit numbers."""
    return "".join(raw[i : i + 8][::-1].hex() for i in range(0, 32, 8))


def files_of_shard(data: bytes) -> Iterator[XetFile]:
    """The files of a shard: each a header, its terms, a verification entry for each term, and its SHA-256."""
    at = SHARD_HEADER_SIZE
    while data[at : at + 32] != LAST_FILE:
        file_hash = hex_of_hash(data[at : at + 32])
        flags, count = struct.unpack_from("<II", data, at + 32)
        at += ENTRY_SIZE
        size, terms, sha256 = 0, [], None
        for _ in range(count):
            _, length, first, end = struct.unpack_from("<IIII", data, at + 32)
            terms.append(Term(hex_of_hash(data[at : at + 32]), first, end))
            size += length
            at += ENTRY_SIZE
        if flags & HAS_VERIFICATION:
            at += ENTRY_SIZE * count
        if flags & HAS_METADATA:
            sha256 = hex_of_hash(data[at : at + 32])
            at += ENTRY_SIZE
        yield XetFile(sha256, file_hash, size, terms)


def read_chunks(xorb: bytes, first: int, end: int) -> bytes:
    """The chunks of a xorb from ``first`` to before ``end``, decompressed."""
    at, chunks = 0, []
    for index in range(end):
        packed_size = int.from_bytes(xorb[at + 1 : at + 4], "little")
        scheme = xorb[at + 4]
        size = int.from_bytes(xorb[at + 5 : at + 8], "little")
        at += CHUNK_HEADER_SIZE
        if index >= first:
            chunk = xorb[at : at + packed_size]
            if scheme != UNCOMPRESSED:
                chunk = lz4_frame(chunk)
            if scheme == GROUPED_LZ4:
                chunk = ungroup(chunk, size)
            chunks.append(chunk)
        at += packed_size
    return b"".join(chunks)


def ungroup(grouped: bytes, size: int) -> bytes:
    """Undo the grouping of bytes by their position modulo four, which makes floats compress better."""
    data, at = bytearray(size), 0
    for lane in range(4):
        length = (size - lane + 3) // 4
        data[lane::4] = grouped[at : at + length]
        at += length
    return bytes(data)


def lz4_frame(frame: bytes) -> bytes:
    """Decompress an LZ4 frame (checksums are skipped: the SHA-256 of the whole file is checked)."""
    flags = frame[4]
    has_size, has_dictionary, has_block_checksum = flags & 8, flags & 1, flags & 16
    at = 6 + (8 if has_size else 0) + (4 if has_dictionary else 0) + 1
    out = bytearray()
    while header := int.from_bytes(frame[at : at + 4], "little"):
        is_raw, size = header >> 31, header & 0x7FFFFFFF
        at += 4
        block = frame[at : at + size]
        at += size + (4 if has_block_checksum else 0)
        if is_raw:
            out += block
        else:
            lz4_block(block, out)
    return bytes(out)


def lz4_block(block: bytes, out: bytearray) -> None:
    """Append a decompressed block: literals, then a copy from what is already there, and so on."""
    at = 0
    while at < len(block):
        token = block[at]
        literals, at = lz4_length(block, at + 1, token >> 4)
        out += block[at : at + literals]
        at += literals
        if at >= len(block):  # the last sequence is literals alone
            break
        offset = int.from_bytes(block[at : at + 2], "little")
        length, at = lz4_length(block, at + 2, token & 15)
        length += 4
        start = len(out) - offset
        while length > 0:  # the copy may reach into itself, then it repeats
            piece = out[start : start + min(length, len(out) - start)]
            out += piece
            length -= len(piece)


def lz4_length(block: bytes, at: int, length: int) -> tuple[int, int]:
    """A length of four bits that goes on in further bytes if it is 15, and where it ends."""
    if length == 15:
        while block[at] == 255:
            length += 255
            at += 1
        length += block[at]
        at += 1
    return length, at
