"""Renders one frame of a rotating, lit sphere as an image: `sphere.py FRAME`. Uses only the standard library."""

from __future__ import annotations

import math
import sys
from pathlib import Path

SIZE = 96
FRAMES_A_TURN = 24


def shade(x: float, y: float, angle: float) -> int:
    """Brightness of the sphere at a point of the image, from 0 to 255."""
    inside = 1.0 - x * x - y * y
    if inside < 0:
        return 16
    light = x * math.sin(angle) + inside**0.5 * math.cos(angle) - 0.4 * y
    return 32 + round(223 * max(0.0, light) / 1.2)


def picture(frame: int) -> bytes:
    angle = 2 * math.pi * frame / FRAMES_A_TURN
    steps = [2.2 * place / (SIZE - 1) - 1.1 for place in range(SIZE)]
    return f"P5 {SIZE} {SIZE} 255\n".encode() + bytes(min(255, shade(x, y, angle)) for y in steps for x in steps)


if __name__ == "__main__":
    number = int(sys.argv[1])
    Path(f"sphere.{number:04d}.pgm").write_bytes(picture(number))
    print(f"frame {number} is done")
