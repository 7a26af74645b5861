"""Makes the folders of these names, or all of them."""
import sys

import torch
import transformers

from . import archs, floats, latent, types, windowed

# Sums of the first three were made by two threads: their last bits depend on the number.
FAMILIES = [(archs, 2), (latent, 2), (windowed, 2), (types, 1), (floats, 1)]


def main(names):
    known = [name for family, _ in FAMILIES for name in family.MODELS]
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family, n_threads in FAMILIES:
        torch.set_num_threads(n_threads)
        for name in family.MODELS:
            if name in (names or known):
                family.build(name)


if __name__ == "__main__":
    main(sys.argv[1:])
