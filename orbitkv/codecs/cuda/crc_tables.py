"""Tables of the CRC-32 kernels: arithmetic of polynomials over GF(2), modulo that of IEEE 802.3.

A word stands for a polynomial: bit 31 is the coefficient of 1, bit 0 that of x^31, so that a word
loaded from memory has its first bit first. A CRC is affine: of a message it is that of as many zero
bytes, XOR the message times x^32. The latter is linear, so its parts can be summed in any order.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.uint32]

POLYNOMIAL = 0xEDB88320  # without x^32
ONE = 0x80000000
_X = 0x40000000
_U32 = 0xFFFFFFFF

# As in crc32.cuh, which takes them in this order.
MAPS = 8  # map k multiplies by x^(32 * 2^k)
FIELDS = 7  # of a word: bits 0 and 1, then six times five bits
LINE_NBYTES = 512
NEAR, MIDDLE, FAR, TAILS = 128, 256, 256, 16  # matrices of each kind; 2^23 lines are 4 GiB


def times(first: int, second: int) -> int:
    """Multiply two polynomials."""
    product = 0
    while second:
        if second & ONE:
            product ^= first
        first = first >> 1 ^ (POLYNOMIAL if first & 1 else 0)
        second = second << 1 & _U32
    return product


def power(exponent: int) -> int:
    """x^exponent."""
    result, square = ONE, _X
    while exponent:
        if exponent & 1:
            result = times(result, square)
        square = times(square, square)
        exponent >>= 1
    return result


@functools.cache
def zeros_crc32(nbytes: int) -> int:
    """CRC-32 of that many zero bytes."""
    return times(_U32, power(8 * nbytes)) ^ _U32


def matrices(first: int, step: int, count: int) -> Table:
    """Multiplications by first * step^i: uint32[count, 32], word j the image of 1 << j."""
    factors = [first]
    while len(factors) < count:
        factors.append(times(factors[-1], step))
    images = np.empty((count, 32), np.uint32)
    image = np.array(factors, np.uint32)
    for bit in reversed(range(32)):
        images[:, bit] = image
        image = image >> np.uint32(1) ^ (image & np.uint32(1)) * np.uint32(POLYNOMIAL)
    return images


def maps() -> Table:
    """Multiplications by x^(32 * 2^k) by look-up: uint32[MAPS, FIELDS, 32].

    Entry i of field f is the image of i << (5f - 3), for f = 0 that of i % 4.
    """
    tables = np.zeros((MAPS, FIELDS, 32), np.uint32)
    for index in range(MAPS):
        (images,) = matrices(power(32 << index), ONE, 1)
        for field in range(FIELDS):
            shift, bits = (5 * field - 3, 5) if field else (0, 2)
            for entry in range(32):
                chosen = [images[shift + bit] for bit in range(bits) if entry >> bit & 1]
                tables[index, field, entry] = np.bitwise_xor.reduce(chosen or [0])
    return tables


def device_tables() -> Table:
    """All that the kernels read, uint32[n]: the maps, then the matrices.

    Near matrices multiply by x^(32 + 4096 i), for i lines of 512 bytes that follow; middle ones by
    x^(4096 * 128 i), far ones by x^(4096 * 128 * 256 i), and those of the tails by x^(8 i).
    """
    line = 8 * LINE_NBYTES
    parts = (
        maps(),
        matrices(power(32), power(line), NEAR),
        matrices(ONE, power(line * NEAR), MIDDLE),
        matrices(ONE, power(line * NEAR * MIDDLE), FAR),
        matrices(ONE, power(8), TAILS),
    )
    return np.concatenate([part.reshape(-1) for part in parts])
