"""What a model computes inside, as arrays. Knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


class Router(NamedTuple):
    """A layer that chooses among experts."""

    layer: int
    #: Number of experts that it chooses from.
    n_expert: int
    #: Number of experts that it chooses for each token.
    n_used: int


@dataclass
class Trace:
    """What a model computes at each token of a text."""

    tokens: list[int]
    #: The layers that have experts, in the order of the second axis below.
    routers: list[Router]
    #: Ids of the chosen experts, best first, int32 [tokens, layers, k]; -1 where a layer uses fewer than k.
    experts: NDArray[numpy.int32]
    #: What their outputs are multiplied with, float32 of the same shape; None where the backend does not report it.
    weights: NDArray[numpy.float32] | None = None
    #: Logits of the token after each, float32 [tokens, vocab_size], where asked for.
    logits: NDArray[numpy.float32] | None = None
    #: The state after the last norm, float32 [tokens, size], where asked for.
    hidden: NDArray[numpy.float32] | None = None


def by_layer(flat: Any, routers: Sequence[Router], fill: float) -> Any:
    """`[tokens, sum of k]` as `[tokens, layers, k]`; layers that use fewer end with `fill`."""
    import numpy

    k = max((router.n_used for router in routers), default=0)
    out = numpy.full((len(flat), len(routers), k), fill, flat.dtype)
    at = 0
    for i, router in enumerate(routers):
        out[:, i, : router.n_used] = flat[:, at : at + router.n_used]
        at += router.n_used
    return out
