// A type as tiles of few columns read it: Q4_K in units of 64 values (`q4_k_batch.h`).
#pragma once

#include "cuda/q4_k_batch.h"

template <class W>
struct BatchOf {
    typedef W type;
};
template <>
struct BatchOf<q4_k> {
    typedef q4_k_batch type;
};
