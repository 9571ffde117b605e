"""Spoilt copies of good messages: what a scanner, a broken peer or an attacker sends."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence

LONGEST = 1 << 16
BOUNDARIES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
NESTS = (b"\x91", b"\x81\xa1a", b"[", b'{"a":')
"""Each opens one more level, in msgpack and in JSON."""

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def flip(chance: random.Random, one: bytes, others: Sequence[bytes]) -> bytes:
    spoilt = bytearray(one or b"\0")
    for _ in range(chance.choice((1, 1, 2, 8))):
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


def replace(chance: random.Random, one: bytes, _: Sequence[bytes]) -> bytes:
    at, size = _piece(chance, one)
    return one[:at] + chance.randbytes(chance.randrange(1, 9)) + one[at + size :]


def cut(chance: random.Random, one: bytes, _: Sequence[bytes]) -> bytes:
    at, size = _piece(chance, one)
    return chance.choice((one[:at], one[at:], one[:at] + one[at + size :]))


def repeat(chance: random.Random, one: bytes, _: Sequence[bytes]) -> bytes:
    at, size = _piece(chance, one)
    piece = one[at : at + size]
    return (one[:at] + piece * chance.choice((2, 3, 100)) + one[at + size :])[:LONGEST]


def splice(chance: random.Random, one: bytes, seeds: Sequence[bytes]) -> bytes:
    other = chance.choice(seeds)
    return one[: _piece(chance, one)[0]] + other[_piece(chance, other)[0] :]


def number(chance: random.Random, one: bytes, _: Sequence[bytes]) -> bytes:
    """A length or a count that is at the edge of what fits."""
    at, _size = _piece(chance, one)
    layout = chance.choice(("<B", "<H", ">H", "<I", ">I"))
    value = chance.choice(BOUNDARIES) & ((1 << 8 * struct.calcsize(layout)) - 1)
    return one[:at] + struct.pack(layout, value) + one[at + struct.calcsize(layout) :]


def nest(chance: random.Random, one: bytes, _: Sequence[bytes]) -> bytes:
    """Deeper than any stack."""
    at, size = _piece(chance, one)
    opened = chance.choice(NESTS)
    return one[:at] + (opened * chance.choice((3, 2_000, LONGEST)))[:LONGEST] + one[at + size :]


MUTATIONS: tuple[Mutation, ...] = (flip, flip, replace, cut, repeat, splice, number, nest)


def mutants(seeds: Sequence[bytes], rounds: int, seed: int) -> Iterator[bytes]:
    """So many spoilt messages; the same ones for the same ``seed``."""
    chance = random.Random(seed)
    for _ in range(rounds):
        one = chance.choice(seeds)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            one = chance.choice(MUTATIONS)(chance, one, seeds)
        yield one


def _piece(chance: random.Random, one: bytes) -> tuple[int, int]:
    at = chance.randrange(len(one) + 1)
    return at, chance.randrange(min(16, len(one) - at) + 1)
