// Decodes rows with the headers of `kernels/quant`, for `device_headers.rs`.
//
// Input, little endian: u32 type (place in WeightType::ALL), u32 n, u32 bytes of q, scales, biases, then the bytes.
// Output: n floats. Until the input ends.
#include <cstdio>
#include <vector>

#include "quant/affine.h"
#include "quant/bf16.h"
#include "quant/f16.h"
#include "quant/f32.h"
#include "quant/f8_e4m3.h"
#include "quant/iq1_m.h"
#include "quant/iq1_s.h"
#include "quant/iq2_s.h"
#include "quant/iq2_xs.h"
#include "quant/iq2_xxs.h"
#include "quant/iq3_s.h"
#include "quant/iq3_xxs.h"
#include "quant/iq4_nl.h"
#include "quant/iq4_xs.h"
#include "quant/mxfp4.h"
#include "quant/mxfp4_planar.h"
#include "quant/nvfp4.h"
#include "quant/nvfp4_scaled.h"
#include "quant/q2_k.h"
#include "quant/q3_k.h"
#include "quant/q4_0.h"
#include "quant/q4_1.h"
#include "quant/q4_k.h"
#include "quant/q5_0.h"
#include "quant/q5_1.h"
#include "quant/q5_k.h"
#include "quant/q6_k.h"
#include "quant/q8_0.h"
#include "quant/tq1_0.h"
#include "quant/tq2_0.h"

typedef std::vector<u8> Bytes;

// Every run of every unit; a run that two units claim, or none, leaves a wrong number.
template <class W>
bool decode(const Bytes& q, const Bytes& scales, const Bytes& biases, std::vector<float>& out) {
    const u32 n = (u32)out.size(), blocks = n / W::BLOCK;
    if (n % W::BLOCK || q.size() != blocks * W::BYTES || scales.size() != blocks * W::SCALE_BYTES ||
        biases.size() != blocks * W::BIAS_BYTES) {
        return false;
    }
    const Row row = row_of<W>(q.data(), scales.data(), biases.data(), 0, n);
    for (u32 unit = 0; unit < (n + W::UNIT - 1) / W::UNIT; unit++) {
        typename W::Raw raw;
        W::load(row, unit, raw);
        for (int r = 0; r < W::RUNS; r++) {
            float v[16];
            decode_run<W>(raw, unit, r, v);
            for (u32 i = 0; i < 16 && 16 * run_index<W>(unit, r) + i < n; i++)
                out[16 * run_index<W>(unit, r) + i] = v[i];
        }
    }
    return true;
}

typedef bool (*Decode)(const Bytes&, const Bytes&, const Bytes&, std::vector<float>&);

template <int BITS>
void add_affine(std::vector<Decode>& all) {
    const Decode of[] = {
        decode<affine_of<BITS, 32, 0>>,  decode<affine_of<BITS, 32, 1>>,  decode<affine_of<BITS, 32, 2>>,
        decode<affine_of<BITS, 64, 0>>,  decode<affine_of<BITS, 64, 1>>,  decode<affine_of<BITS, 64, 2>>,
        decode<affine_of<BITS, 128, 0>>, decode<affine_of<BITS, 128, 1>>, decode<affine_of<BITS, 128, 2>>};
    all.insert(all.end(), of, of + 9);
}

int main() {
    std::vector<Decode> all = {decode<f32>,   decode<f16>,         decode<bf16>, decode<q4_0>,   decode<q4_1>,
                               decode<q5_0>,  decode<q5_1>,        decode<q8_0>, decode<q2_k>,   decode<q3_k>,
                               decode<q4_k>,  decode<q5_k>,        decode<q6_k>, decode<iq4_nl>, decode<iq4_xs>,
                               decode<mxfp4>, decode<iq2_xxs>,     decode<iq2_xs>, decode<iq2_s>, decode<iq3_xxs>,
                               decode<iq3_s>, decode<iq1_s>,       decode<iq1_m>,  decode<tq1_0>, decode<tq2_0>,
                               decode<nvfp4>, decode<mxfp4_planar>, decode<f8_e4m3>, decode<nvfp4_scaled>};
    add_affine<2>(all), add_affine<3>(all), add_affine<4>(all);
    add_affine<5>(all), add_affine<6>(all), add_affine<8>(all);
    u32 head[5];
    while (std::fread(head, 4, 5, stdin) == 5) {
        Bytes planes[3];
        for (int i = 0; i < 3; i++) {
            planes[i].resize(head[2 + i]);
            if (std::fread(planes[i].data(), 1, head[2 + i], stdin) != head[2 + i]) return 2;
        }
        std::vector<float> out(head[1]);
        if (head[0] >= all.size() || !all[head[0]](planes[0], planes[1], planes[2], out)) {
            std::fprintf(stderr, "type %u: wrong sizes\n", head[0]);
            return 1;
        }
        std::fwrite(out.data(), 4, out.size(), stdout);
    }
    return 0;
}
