#!/usr/bin/env python3
"""Makes crates/quant/tests/data/golden_acts.bin: rows of activations and their quantised form by the rule of quant::act.

The rule is written here a second time, in numpy's single-precision operations. Needs numpy.
Run at the project root:  python3 tools/golden_acts.py

File, little endian, for each row of 256 values:  f32 x[256],
then by 32-blocks:  i16 q[256], f32 d[8], i32 sums[8],  then as a super-block:  i8 q[256], u8 u[8], f32 d, i16 sums[16].
"""

import itertools
from pathlib import Path

import numpy as np

F = np.float32


def amax(x: np.ndarray) -> np.float32:
    return (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).max().view(F)


def empty(a: np.float32) -> np.float32 | None:
    """The scale of a block that holds no integers, or None."""
    if not np.isfinite(a):
        return F(np.nan)
    return F(0) if a < F(1e-30) else None


def rounded(x: np.ndarray, inv: np.float32, most: int) -> np.ndarray:
    return np.clip(np.rint(x * inv), F(-most), F(most)).astype(np.int32)


def block32(x: np.ndarray) -> tuple[np.ndarray, np.float32, int]:
    a = amax(x)
    if (d := empty(a)) is not None:
        return np.zeros(32, np.int32), d, 0
    q = rounded(x, F(32767) / a, 32767)
    return q, a / F(32767), q.sum()


def block256(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    a = amax(x)
    if (d := empty(a)) is not None:
        return np.zeros(256, np.int32), np.ones(8, np.uint8), d, np.zeros(16, np.int32)
    d, ratio = a / F(1905), F(15) / a
    u = np.array([np.clip(np.ceil(amax(s) * ratio), F(1), F(15)) for s in x.reshape(8, 32)], F)
    q = np.concatenate([rounded(s, F(1) / (d * uj), 127) for s, uj in zip(x.reshape(8, 32), u)])
    return q, u.astype(np.uint8), d, q.reshape(16, 16).sum(axis=1) * np.repeat(u, 2).astype(np.int32)


def per_sub(x: np.ndarray) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Sub-blocks, d and u of a super-block."""
    _, u, d, _ = block256(x)
    return x.reshape(8, 32), d, u.astype(F)[:, None]


# Forms of the rule that are as good but not the same: whether one gives a row other bits. Rows that tell are rare.
SLIPS = [
    lambda x: any((rounded(s, F(1) / (amax(s) / F(32767)), 32767) != block32(s)[0]).any() for s in x.reshape(8, 32)),
    lambda x: any(amax(s) * (F(1) / F(32767)) != amax(s) / F(32767) for s in x.reshape(8, 32)),
    lambda x: amax(x) * (F(1) / F(1905)) != amax(x) / F(1905),
    lambda x: (lambda s, d, u: (rounded(s, F(1) / d / u, 127) != rounded(s, F(1) / (d * u), 127)).any())(*per_sub(x)),
    lambda x: (lambda s, d, u: (rounded(s / (d * u), F(1), 127) != rounded(s, F(1) / (d * u), 127)).any())(*per_sub(x)),
]


def rows(rng: np.random.Generator) -> list[np.ndarray]:
    normal = lambda: rng.standard_normal(256).astype(F)
    out = [normal() * F(s) for s in (1, 1e-3, 37, 1e-30, 1e30)]
    for place in (3, 100):  # outliers
        x = normal()
        x[place] = F(-60)
        out.append(x)
    # Ties: with amax 32767 the 32-block's grid is the integers; with 1905 in the first sub-block, the super-block's is.
    x = (np.arange(256) - 128 + 0.5).astype(F)
    x[::32] = F(32767)
    out.append(x)
    x = (np.arange(256) % 128 - 64 + 0.5).astype(F)
    x[0] = F(1905)
    out.append(x)
    out += [next(filter(slip, (normal() for _ in itertools.count()))) for slip in SLIPS for _ in range(2)]
    edge = normal() * F(1e-38)
    edge[:5] = [1e-30, -0.0, 1e-45, np.nextafter(F(1e-30), F(0)), -1e-40]
    edge[40] = np.nextafter(F(1e-30), F(0))
    out.append(edge)
    for bad in (np.nan, np.inf, -np.inf):
        x = normal()
        x[77] = bad
        out.append(x)
    largest = normal()
    largest[[0, 31, 200]] = [np.finfo(F).max, -np.finfo(F).max, 1e-30]
    return [*out, largest, np.zeros(256, F)]


def main() -> None:
    out = Path("crates/quant/tests/data/golden_acts.bin")
    with open(out, "wb") as f, np.errstate(all="ignore"):
        for x in rows(np.random.default_rng(20260102)):
            assert x.dtype == F
            f.write(x.tobytes())
            q, d, sums = zip(*(block32(s) for s in x.reshape(8, 32)))
            for part, kind in ((np.concatenate(q), np.int16), (d, F), (sums, np.int32)):
                f.write(np.array(part, kind).tobytes())
            for part, kind in zip(block256(x), (np.int8, np.uint8, F, np.int16)):
                f.write(np.array(part, kind).tobytes())
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
