// Pairs of a head's numbers that a rotary embedding turns.
#pragma once

// Numbers of a head that a lane takes together: pair i, or one behind the pairs.
struct Pair {
    uint first;
    uint second; // of a pair only
    bool is_pair;
};

inline Pair pair_of(uint i, uint rotated, uint interleaved) {
    Pair p;
    p.is_pair = i < rotated;
    p.first = !p.is_pair ? i + rotated : interleaved ? 2 * i : i;
    p.second = interleaved ? 2 * i + 1 : i + rotated;
    return p;
}
