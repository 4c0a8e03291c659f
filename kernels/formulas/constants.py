"""Numbers of formulas in floating point: which two of them are one, and when one is the other.

In real numbers ``(x + a) + b`` is ``x + (a + b)``. In floating point it is so, up to a rounding of the result, unless the sum
that is taken first loses what the second one uncovers.
"""

import struct

_FAR = 2.0**16


def add_up(a: float, b: float) -> bool:
    """True if ``(x + a) + b`` is ``x + (a + b)`` for every x.

    (x + 1.0) + 0.5      but not  (x + 1e8) - 1e8, which rounds x
    """
    return 0 in (a, b) or (a > 0) == (b > 0)


def multiply(a: float, b: float) -> bool:
    """True if ``(x * a) * b`` is ``x * (a * b)`` for every x whose distance to the ends of fp32's range is a factor of 2**16.

    (x * 0.5) * 2.0, (x * 1e-30) * 0.1      but not  (x * 1e30) * 1e-30, which is infinite where x is 1e10
    """
    a, b = abs(a), abs(b)
    same_way = (is_moderate(a) and is_moderate(b)) or max(a, b) <= 1 or min(a, b) >= 1
    return same_way and 2.0**-126 <= a * b < 2.0**128


def is_moderate(a: float) -> bool:
    """True if ``(x * a) * y`` is ``(x * y) * a``, of such x and y.

    (x * 0.5) * sigmoid(x)      but not  (x * 1e30) * sigmoid(x), where one of them is infinite and one is zero
    """
    return 1 / _FAR <= abs(a) <= _FAR


def as_used(number: float, double: bool) -> float:
    """The number that arithmetic finds, in fp32 as half precision is computed, or in fp64."""
    try:
        return number if double else struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return number
