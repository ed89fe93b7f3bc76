"""Where a long text may be cut without changing its tokens.

GPT-2's pattern, with which a byte-level BPE splits text into words, is

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

It looks behind nowhere and ahead by one character, behind white space only. So where one of its words ends and neither
side sees the other, the words of the two sides are the words of the whole. Three such places, in all scripts:

    before a newline that no white space follows   `\\s+(?!\\S)` leaves the last white space of a run alone, and a
                                                   newline never joins the word after it
    before white space that follows none           no word goes from a visible character to white space
    between two of letters, numbers and others     each is a run of its own; but `'` and what follows may be one word

The first is looked for before the second, the second before the third. A text of BLOCK bytes that has none, a run of
white space or of characters of one kind, is cut at BLOCK: there the words are those of the pieces. A test compares all
of it with the `tokenizers` package.

What is a letter differs with the version of Unicode. Characters of which 3.2 says something else than this Python's
version are not used; those two agree with every version between them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 18  # what is read at once, and how long a piece of a document can get
SMALL = 1 << 16  # what is encoded at once, where it can be cut: encoding takes some 240 bytes per byte
UNSURE, LETTER, NUMBER, OTHER, WHITE = range(5)

# A newline before a first byte that begins no white space, which visible ASCII does not, and of UTF-8 all but those of
# U+0085, U+1680, U+2000 … U+3000.
LINE = rb"\n(?=[\x21-\x7e\xc3-\xe0\xe4-\xf4])"
# ASCII's white space, but after none, be it ASCII's or U+0085, U+00A0, U+1680, U+180E (once), U+2000 … U+205F, U+3000.
WORD = (
    rb"(?=[\t\n\r ])(?<![\t-\r\x1c-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe1\xa0\x8e)"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)[\t\n\r ]"
)
LAST_LINE, LAST_WORD = (re.compile(rb"(?s:.+)" + place) for place in (LINE, WORD))
SMALL_PIECE = re.compile(rb"(?s).{1,%d}(?:\Z|(?=%s))|.+" % (SMALL, WORD))
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def place(held: bytes | bytearray) -> int:
    """Return where to cut a text of more than BLOCK bytes: up to there, or 0 if not even a character ends so early."""
    return safe_place(held) or character_border(held, BLOCK)


def safe_place(held: bytes | bytearray) -> int:
    """Return the last place up to BLOCK where a cut changes no token, or 0 if there is none."""
    for pattern in (LAST_LINE, LAST_WORD):
        if found := pattern.match(held, 0, BLOCK + 1):
            return found.end() - 1
    return _between_kinds(held)


def small(piece: bytes) -> Iterator[bytes]:
    """Yield a piece in smaller ones, where it has white space to cut before."""
    return (found[0] for found in SMALL_PIECE.finditer(piece))


def character_border(held: bytes | bytearray, place: int) -> int:
    """Return the last place up to this one where a character begins."""
    while place and held[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _between_kinds(held: bytes | bytearray) -> int:
    text = bytes(held[: character_border(held, BLOCK)]).decode()
    kinds = kinds_of(text)
    first, second = kinds[:-1], kinds[1:]
    visible = (first != UNSURE) & (first != WHITE) & (code_points(text)[:-1] != ord("'"))
    places = np.flatnonzero(visible & (second != UNSURE) & (first != second))
    return len(text[: int(places[-1]) + 1].encode()) if len(places) else 0


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def kinds_of(text: str) -> npt.NDArray[np.uint8]:
    """Return the kind of each character, as GPT-2's pattern has them: LETTER, NUMBER, OTHER, WHITE or UNSURE."""
    return _kinds()[code_points(text)]


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    names = {"L": LETTER, "N": NUMBER, "P": OTHER, "S": OTHER, "M": OTHER}
    characters = [chr(number) for number in range(0x30000)]  # the planes that have letters
    old, new = (
        np.array([names.get(category(one)[0], UNSURE) for one in characters], dtype=np.uint8)
        for category in (unicodedata.ucd_3_2_0.category, unicodedata.category)
    )
    kinds = np.zeros(0x110000, dtype=np.uint8)
    kinds[: len(characters)] = np.where(old == new, new, UNSURE)
    kinds[[ord(character) for character in WHITE_SPACE]] = WHITE
    return kinds
