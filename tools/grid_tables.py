#!/usr/bin/env python3
"""Makes kernels/quant/grids.h, the code books of IQ1, IQ2 and IQ3, from those of gguf-py. The crate `quant` reads it too.

Needs numpy and gguf (pip install gguf). Run at the project root:  python3 tools/grid_tables.py

An entry is 16 bits: the indices of its eight values, two bits each, or of its four values, three bits each, the first
in the low bits. What the indices stand for is in crates/quant/src/types/grid.rs. Kernels of Metal have the values of
some types themselves, a byte each with 128 added, and which bytes seven signs turn around.
"""

import numpy as np
from gguf import quants

NAMES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1", "IQ3_XXS", "IQ3_S"]
# Types whose values Metal's kernels look up.
AS_BYTES = ["IQ2_XXS", "IQ2_XS", "IQ3_XXS"]
HEAD = "// Made by tools/grid_tables.py from the code books of gguf-py: indices of values, the first in the low bits."


def entries(name: str) -> list[int]:
    codec = getattr(quants, "IQ1_S" if name == "IQ1" else name)
    codec.init_grid()
    grid, levels = codec.grid.reshape(codec.grid_shape), list(codec.grid_map)
    bits = 2 if grid.shape[1] == 8 else 3
    return [sum(levels.index(int(v)) << (bits * i) for i, v in enumerate(row)) for row in grid]


def values(name: str) -> list[int]:
    codec = getattr(quants, name)
    codec.init_grid()
    grid = codec.grid.reshape(codec.grid_shape)
    return [sum(int(v) + 128 << (8 * i) for i, v in enumerate(row)) for row in grid]


def masks(seven: int) -> int:
    """Bytes of ones where one of seven signs is a minus, and where an eighth makes their number even."""
    eight = seven | (seven.bit_count() & 1) << 7
    return sum(255 << (8 * i) for i in range(8) if eight >> i & 1)


def rows(numbers: list[int], digits: int = 4) -> str:
    words = [f"0x{n:0{digits}x}," for n in numbers]
    of_a_line = 116 // (digits + 4)
    return "\n".join("    " + " ".join(words[i : i + of_a_line]) for i in range(0, len(words), of_a_line))


def main() -> None:
    header = [HEAD, "#pragma once", "", '#include "quant/unit.h"', ""]
    for name in NAMES:
        numbers = entries(name)
        header += [f"QUANT_TABLE u16 {name.lower()}_codes[{len(numbers)}] = {{", rows(numbers), "};", ""]
    header += ["// Values with 128 added, a byte each, and bytes of ones where eight signs are a minus.",
               "#if defined(__METAL_VERSION__)"]
    for name in AS_BYTES:
        numbers = values(name)
        digits, u = (8, "u32") if "IQ3" in name else (16, "u64")
        header += [f"QUANT_TABLE {u} {name.lower()}_bytes[{len(numbers)}] = {{", rows(numbers, digits), "};", ""]
    header += ["QUANT_TABLE u64 even_sign_masks[128] = {", rows([masks(i) for i in range(128)], 16), "};"]
    header += ["#endif", ""]
    with open("kernels/quant/grids.h", "w") as f:
        f.write("\n".join(header[:-1]) + "\n")


if __name__ == "__main__":
    main()
