// What the types with code books share: their entries as bytes, and signs. `grids.h` has the code books, indices of two
// or three bits.
#pragma once

#include "quant/grids.h"
#include "quant/unit.h"

// Four fields of two bits, those in the low byte, as bytes.
QUANT_FN u32 spread2(u32 code) {
    const u32 x = code & 0xff, y = (x | x << 12) & 0x000f000fu;
    return (y | y << 6) & 0x03030303u;
}

// Four fields of three bits as bytes.
QUANT_FN u32 spread3(u32 code) {
    return (code & 7) | (code & 0x38) << 5 | (code & 0x1c0) << 10 | (code & 0xe00) << 15;
}

// Magnitudes of IQ2: 8, 25 and 43.
QUANT_FN u32 iq2_levels(u32 x) { return 0x08080808u + 17 * x + (x >> 1 & 0x01010101u); }

// Magnitudes of IQ3_XXS: 4, 12, 20, 28, 36, 44, 52 and 62.
QUANT_FN u32 iq3_xxs_levels(u32 x) { return 0x04040404u + 8 * x + 2 * (x & x >> 1 & x >> 2 & 0x01010101u); }

// Eight signs of seven: the eighth makes the number of minus signs even.
QUANT_FN u32 even_signs(u32 seven) {
    u32 odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    return seven | ((odd ^ odd >> 1) & 1) << 7;
}

// Four bytes, none of them zero, minus where the low four bits of `signs` say so.
QUANT_FN u32 with_signs(u32 bytes, u32 signs) {
    const u32 ones = (signs & 15) * 0x00204081u & 0x01010101u;
    return (bytes ^ ones * 255) + ones;
}

// Eight values of a row as bytes.
struct Eight {
    u32 low, high;
};

// Entries of eight and of four values, and those minus where seven signs and their eighth say so: signed bytes, spread
// from codes, or on Metal what tables hold, whose bytes have 128 added, as products want them there.
#if defined(__METAL_VERSION__)
enum { ENTRIES_SIGNED = 0, ENTRIES_OFFSET = -128 };
QUANT_FN Eight eight_bytes(u64 x) {
    const uint2 two = as_type<uint2>(x);
    return Eight{two.x, two.y};
}
QUANT_FN Eight iq2_xxs_entry(u32 i) { return eight_bytes(iq2_xxs_bytes[i]); }
QUANT_FN Eight iq2_xs_entry(u32 i) { return eight_bytes(iq2_xs_bytes[i]); }
QUANT_FN u32 iq3_xxs_entry(u32 i) { return iq3_xxs_bytes[i]; }
// 128 + v becomes 127 - v and then 128 - v.
QUANT_FN Eight with_even_signs(Eight x, u32 seven) {
    const Eight mask = eight_bytes(even_sign_masks[seven]);
    return Eight{(x.low ^ mask.low) + (mask.low & 0x01010101u), (x.high ^ mask.high) + (mask.high & 0x01010101u)};
}
#else
enum { ENTRIES_SIGNED = 1, ENTRIES_OFFSET = 0 };
QUANT_FN Eight iq2_eight(u32 code) { return Eight{iq2_levels(spread2(code)), iq2_levels(spread2(code >> 8))}; }
QUANT_FN Eight iq2_xxs_entry(u32 i) { return iq2_eight(iq2_xxs_codes[i]); }
QUANT_FN Eight iq2_xs_entry(u32 i) { return iq2_eight(iq2_xs_codes[i]); }
QUANT_FN u32 iq3_xxs_entry(u32 i) { return iq3_xxs_levels(spread3(iq3_xxs_codes[i])); }
QUANT_FN Eight with_even_signs(Eight x, u32 seven) {
    const u32 signs = even_signs(seven);
    return Eight{with_signs(x.low, signs), with_signs(x.high, signs >> 4)};
}
#endif
