#!/usr/bin/env python3
"""Makes the code books of IQ1, IQ2 and IQ3, for the crate and for the kernels of GPUs, from those of gguf-py.

Needs numpy and gguf (pip install gguf). Run at the project root:  python3 tools/grid_tables.py

An entry is 16 bits: the indices of its eight values, two bits each, or of its four values, three bits each, the first
in the low bits. What the indices stand for is in crates/quant/src/types/grid.rs.
"""

import numpy as np
from gguf import quants

NAMES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1", "IQ3_XXS", "IQ3_S"]
HEAD = "// Made by tools/grid_tables.py from the code books of gguf-py: indices of values, the first in the low bits."


def entries(name: str) -> list[int]:
    codec = getattr(quants, "IQ1_S" if name == "IQ1" else name)
    codec.init_grid()
    grid, levels = codec.grid.reshape(codec.grid_shape), list(codec.grid_map)
    bits = 2 if grid.shape[1] == 8 else 3
    return [sum(levels.index(int(v)) << (bits * i) for i, v in enumerate(row)) for row in grid]


def rows(numbers: list[int]) -> str:
    words = [f"0x{n:04x}," for n in numbers]
    return "\n".join("    " + " ".join(words[i : i + 14]) for i in range(0, len(words), 14))


def main() -> None:
    rust, header = [HEAD.replace("//", "//!", 1), ""], [HEAD, "#pragma once", "", '#include "quant/unit.h"', ""]
    for name in NAMES:
        numbers = entries(name)
        rust += ["#[rustfmt::skip]", f"pub(super) const {name}: [u16; {len(numbers)}] = [", rows(numbers), "];", ""]
        header += [f"QUANT_TABLE u16 {name.lower()}_codes[{len(numbers)}] = {{", rows(numbers), "};", ""]
    with open("crates/quant/src/types/grid_tables.rs", "w") as f:
        f.write("\n".join(rust[:-1]) + "\n")
    with open("kernels/quant/grids.h", "w") as f:
        f.write("\n".join(header[:-1]) + "\n")


if __name__ == "__main__":
    main()
