// Random weights of a type with the numbers they stand for, and comparisons with sums in double.
#pragma once

// Shared memory of every launch, the widest tile's.
const u32 SHARED = 65536;

static u64 seed = 1;
static double uniform() {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(seed >> 11) / 9007199254740992.0;
}
static float normal() { return (float)(sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform())); }

// A finite number rounded to bf16.
static u32 bf16_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static const bool IS_FLOAT8 = WEIGHT::IS_FLOAT && WEIGHT::BYTES == 128;

// A stack of encoded rows with random bytes, but finite scales of one size, and the numbers they stand for.
struct Weights {
    Array<u8> planes[3];
    Array<float> values;
    Matrix matrix;
    Weights(u64 rows, u32 k) : values(rows * k) {
        const u64 blocks = rows * (k / WEIGHT::BLOCK);
        const int bytes[3] = {WEIGHT::BYTES, WEIGHT::SCALE_BYTES, WEIGHT::BIAS_BYTES};
        for (int i = 0; i < 3; i++) {
            planes[i].resize(blocks * bytes[i] + 16);
            for (u8& b : planes[i]) b = (u8)(seed = seed * 6364136223846793005ull + 1442695040888963407ull, seed >> 56);
        }
        // Whatever 16 bits a scale may lie in become a number near 1, of any sign, in every 16-bit form; f32 too.
        const auto tame = [](u8* p, int n) {
            for (int i = 0; i < n; i++) p[i] = (u8)(p[i] & 0x83) | 0x38;
        };
        for (u64 b = 0; b < blocks; b++) {
            u8* q = &planes[0][b * WEIGHT::BYTES];
            for (const auto& [at, n] : SCALES) {
                for (int i = at; i < at + n; i++) tame(q + i, 1);
            }
            // No NaN among 8-bit floats.
            for (int i = 0; IS_FLOAT8 && i < 128; i++) q[i] &= (q[i] & 127) == 127 ? 0xf7 : 0xff;
            for (int i = 1; i < 3; i++) {
                for (int j = 0; j < bytes[i]; j++) tame(&planes[i][b * bytes[i] + j], 1);
            }
            if (WEIGHT::SCALE_BYTES == 1) planes[1][b] = 120 + planes[1][b] % 8;
            if (WEIGHT::BLOCK == 32 && WEIGHT::BYTES == 17) q[0] = 120 + q[0] % 8;
        }
        matrix = {planes[0].data(), planes[1].data(), planes[2].data()};
        for (u64 i = 0; i < rows; i++) {
            const Row row = row_of<WEIGHT>(matrix.q, matrix.scales, matrix.biases, i, k);
            for (u32 unit = 0; unit < (k + WEIGHT::UNIT - 1) / WEIGHT::UNIT; unit++) {
                WEIGHT::Raw raw;
                WEIGHT::load(row, unit, raw);
                for (int r = 0; r < WEIGHT::RUNS; r++) {
                    float v[16];
                    decode_run<WEIGHT>(raw, unit, r, v);
                    for (u32 j = 0; j < 16; j++) {
                        const u32 at = 16 * run_index<WEIGHT>(unit, r) + j;
                        if (at < k) values[i * k + at] = v[j];
                    }
                }
            }
        }
    }
    double dot(u64 row, const float* x, u32 k, u64 step = 1) const {
        double sum = 0;
        for (u32 i = 0; i < k; i++) sum += (double)values[row * k + i] * x[i * step];
        return sum;
    }
    // What `x` is multiplied by, so that sums are near 1.
    float inverse(u32 k) const {
        double sum = 0;
        for (float v : values) sum += (double)v * v;
        return (float)(1 / sqrt(sum / values.size() * k));
    }
    // Activations whose products with rows of k numbers are of size one.
    void level(Array<float>& x, u32 k) const {
        const float scale = inverse(k);
        for (float& v : x) v *= scale;
    }
    static const std::vector<std::pair<int, int>> SCALES;
};
// Bytes of scales in a block of f16 or 8-bit floats, and of floats with none.
const std::vector<std::pair<int, int>> Weights::SCALES =
    WEIGHT::BYTES == 36   ? std::vector<std::pair<int, int>>{{0, 4}}
    : IS_FLOAT8            ? std::vector<std::pair<int, int>>{}
    : WEIGHT::IS_FLOAT     ? std::vector<std::pair<int, int>>{{0, WEIGHT::BYTES}}
    : WEIGHT::SCALE_BYTES ? std::vector<std::pair<int, int>>{}
    : WEIGHT::BYTES == 20 || WEIGHT::BYTES == 24 || WEIGHT::BYTES == 144 || WEIGHT::BYTES == 176
        ? std::vector<std::pair<int, int>>{{0, 4}}
    : WEIGHT::BYTES == 84  ? std::vector<std::pair<int, int>>{{80, 4}}
    : WEIGHT::BYTES == 110 ? std::vector<std::pair<int, int>>{{108, 2}}
    : WEIGHT::BYTES == 210 ? std::vector<std::pair<int, int>>{{208, 2}}
                           : std::vector<std::pair<int, int>>{{0, 2}};

static int failures = 0;
static void check(const char* what, const Array<float>& got, const std::vector<double>& want, double limit) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    const double relative = sqrt(error / norm);
    const bool is_good = relative <= limit;
    failures += !is_good;
    printf("  %-28s %.1e%s\n", what, relative, is_good ? "" : "  TOO FAR");
}
static Array<float> normals(size_t n) {
    Array<float> x(n);
    for (float& v : x) v = normal();
    return x;
}
static const double VEC_LIMIT = WEIGHT::IS_FLOAT ? 1e-6 : WEIGHT::WIDE ? 2e-4 : 1e-2;
static const double TILE_LIMIT = WEIGHT::IS_FLOAT && WEIGHT::BYTES == 4 ? 2e-5 : 4e-3;
