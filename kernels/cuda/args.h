// Arguments of the kernels, one struct by value each; `crates/gpu/src/cuda/args.rs` mirrors them field by field.
//
// Shapes are slowest axis first. T is the number of tokens of the step, R that of the rows whose logits are asked for;
// `rows` is whichever an op runs over.
#pragma once

#include "quant/ints.h"

typedef long long i64;

// Encoded rows in planes, each contiguous: q [n_stack][n][row bytes of q], and so on. Types of GGUF files have q alone.
struct Matrix {
    const u8* q;
    const u8* scales;
    const u8* biases;
};

// What is done to a row of activations before it is multiplied.
enum PrologueKind : u32 {
    PLAIN = 0,
    NORMED = 1,     // x * rsqrt(mean(x^2) + eps) * w
    GATED = 2,      // x * sigmoid(gate)
    GATED_NORM = 3, // each head: x * rsqrt(mean(x^2) + eps) * w * silu(gate)
};
struct Prologue {
    const float* w;    // [k], of a gated norm [d_head], or null
    const float* gate; // [rows, heads], heads of d_head numbers with these strides
    u32 kind, d_head, gate_head, gate_row;
    float eps;
    u32 reserved;
};

struct LinearPart {
    Matrix w;           // [n, k]
    const float* bias;  // [n], or null
    float* out;         // [rows, n]
    u64 n;
};

struct Linear {
    const float* x;  // [rows, k]
    u32 rows, k;
    u32 n_parts, add; // out += instead of out =
    Prologue prologue; // of the kernels for few rows
    LinearPart parts[4];
};

// Matrices of two types that share x: the first blocks take those of `a`.
struct LinearPair {
    Linear a, b;
    u32 blocks_a, reserved;
};

struct GatedLinear {
    const float* x;  // [rows, k]
    Matrix gate, up; // [n, k]
    float* out;      // [rows, n]
    u32 rows, k, n, act;
    float alpha, limit;
    Prologue prologue; // of the kernels for few rows
};

struct Embed {
    const u32* ids;  // [rows, stride]: the first of each
    Matrix table;    // [n_vocab, d]
    float* out;      // [rows, d]
    u32 rows, d;
    float scale;
    u32 stride;
};

struct HeadLinear {
    const float* x;  // [rows, n_head, k]
    Matrix w;        // [n_head, n, k], transposed [n_head, k, n]
    float* out;      // [rows, n_head, n]
    u32 rows, n_head, n, k;
};

// One projection of the chosen experts, or gate and up with their activation.
struct Experts {
    const float* x;       // [rows, k], or [rows * n_used, k] with x_per_pair
    const u32* ids;       // [rows, n_used]
    Matrix w, up;         // [n_expert, n, k]; without up.q a plain projection
    const float* bias;    // [n_expert, n], or null
    const float* up_bias; // [n_expert, n], or null
    float* out;           // [rows * n_used, n]
    const u32* first;     // [n_expert + 1], or null: where an expert's pairs begin in `pairs`
    const u32* pairs;     // [rows * n_used]
    u32 rows, n_used, n_expert, n, k, x_per_pair, act;
    float alpha, limit;
    u32 n_shared;         // 1: pairs behind the last are the shared expert's
    u32 shared_n, reserved;
    Matrix shared_w, shared_up; // [shared_n, k]; of kernels for more than eight rows [n, k]
    float* shared_out;    // [rows, shared_n]
    Prologue prologue;    // of the kernels for few rows
};

// x[t, i] (+)= sum_s weights[t, s] * (w[ids[t, s], i] * h[t, s] + bias) (+ sigmoid(share[t]) * shared_w[i] *
// shared_h[t])
struct ExpertsDown {
    const float* h;        // [rows, n_used, k]
    const float* shared_h; // [rows, shared_k], or null
    const float* share;    // [rows], or null: the shared expert counts in full
    const u32* ids;        // [rows, n_used]
    const float* weights;  // [rows, n_used]
    Matrix w;              // [n_expert, n, k]
    Matrix shared_w;       // [n, shared_k]
    const float* bias;     // [n_expert, n], or null
    float* x;              // [rows, n]
    u32 rows, n_used, n_expert, n, k, add, shared_k, reserved;
};

// Most parts of a plan.
#define MAX_PARTS 8

// A sum over the parts of a plan.
struct AllReduce {
    float* x;               // [rows, d]
    void* parts[MAX_PARTS]; // the room of each part
    u64 n;                  // rows * d
    u32 part, n_parts;      // which part this is
    u32 rooms[2];           // numbers of a turn, of few rows and of many
    float* residual;        // [rows, d], or null: x is added to it
    const float* norm_w;    // [d], or null
    float* norm_out;        // [rows, d]
    u32 d;
    float eps;
    u32 keeps_x, reserved;  // x itself is read, besides what it is added to
};

// Pairs whose experts may have slots on the device, and the rows of the others in host memory.
struct Hot {
    const u32* ids;    // [n_pairs]
    const u32* table;  // [n_expert]: slots, or past the last
    u32* slots;        // [n_pairs]
    const float* host; // [n_pairs, n]
    float* out;        // [n_pairs, n]
    u32 n_pairs, n_expert, n_slots, n;
};

// Packed columns of x (`columns.h`), or null: blocks round x themselves. Those of a row behind a norm are without its
// factor, with the sums of squares of each row's parts.
struct Columns {
    const u8* of;         // [rows, column_bytes(k)]
    const float* squares; // [rows, n_squares], or null
    u32 n_squares, reserved;
};

// As `Linear`, in blocks of `each` rows of weights; `stages`: of few_long.
struct FewLinear {
    Linear op;
    u32 each, stages;
    Columns columns; // for two rows and more
};

// Logits of one row whose parts are added up as they come, as integers, whose sums have no order; and what each block
// gives to the sum of squares of the row.
struct LogitSums {
    i64* of;        // [copies, n_expert], then the number of parts that no sum holds; zero at the beginning of a step
    float* squares; // [n_squares]
};

// As `FewLinear` for one row, one matrix and `add`, with the logits of the router behind it, before the norm's factor.
struct FewRouted {
    Linear op;
    const float* router; // [n_expert, n]
    const float* norm;   // [n]
    LogitSums sums;
};

// As `LinearPair`, in blocks of `each_a` and `each_b` rows of weights.
struct FewPair {
    Linear a, b;
    u32 blocks_a, each_a, each_b, reserved;
    Columns columns; // of both
};

// Counts the pairs (row * n_used + slot) of every expert and lists them, ascending.
struct ExpertLists {
    const u32* ids; // [n_pairs]
    u32* first;     // [n_expert + 1]
    u32* pairs;     // [n_pairs]
    u32* places;    // [n_pairs]: the index of a pair in `pairs`
    // Or null: for tiles of `width` pairs, which begin at multiples of 8, how many there are in addition to one an
    // expert, and of each its expert << 16 | its number among the expert's.
    u32* further[3];
    u32 width[3];
    u32 n_pairs, n_expert;
    // Where products of bytes read the pairs' rows next: groups of eight columns of a step. Rows have k numbers, one
    // for n_used pairs.
    u32 n_groups;
    const float* x;
    uint4* columns;
    u32 k, n_used;
};

// Consecutive tokens of one sequence, as `Chunk` of the batch.
struct Chunk {
    u32 first, len, pos;
    u32 first_page;         // in `pages`
    u32 first_window_page;  // in `window_pages`
    u32 first_window_block;
    u32 state;
    u32 single;   // the token of the step's chunk of this number among those of one token
    u32 n_draft;  // tokens at its end that are drafts: states stay before them
    u32 n_replay; // drafts of the state's last step that were accepted since: states move past them first
    u32 side;     // 0 or 1: where what they move states by was kept; this step's goes to the other side
};

// What changes from step to step, in device memory at places that depend on T and R alone.
struct Step {
    const u32* ids;          // [T]
    const u32* positions;    // [T]
    const u32* chunk_of;     // [T]
    const u32* rows;         // [R]
    const Chunk* chunks;     // [n_chunks]
    const u32* pages;
    const u32* window_pages;
    u32* faults;             // [n_chunks], smallest (router << 20 | token) that saw NaN
};

struct RmsNorm {
    float* x;              // [rows, d], updated when there is a residual
    const float* residual; // [rows, d], or null
    const float* w;        // [d]
    float* out;            // [rows, d]
    u32 rows, d;
    float eps;
    u32 reserved;
};

struct Center {
    const float* x; // [rows, d]
    float* out;     // [rows, d]
    u64 rows;
    u32 d;
    u32 reserved;
};

struct HeadNorm {
    float* x;          // [n, d], rows of heads
    const float* w;    // [d], [n_w, d] of heads that differ, or null
    const float* gate; // [n, d] of a gated norm
    u64 n;
    u32 d;
    float eps;
    u32 n_w, gate_first;
};

struct RopeTable {
    const u32* positions;   // [T]
    const u32* places;      // [T, 3], or null: a position on each axis in place of `positions`
    const u32* axes;        // [half], or null: the axis of each pair; all are of axis 0
    const double* inv_freq; // [half]
    float* table;           // [T, half, 2]: cosine, sine, times the factor
    u64* zeroed;            // [n_zeroed]: what a step begins with as zero
    u32 rows, half;
    float factor;
    u32 n_zeroed;
    // Where step is not 0, another factor: 1 + beta * ln(1 + floor((position + offset) / step)).
    float beta;
    u32 step, offset, reserved;
};

struct Rope {
    float* x;           // [T, n_head, d_head]
    const float* table; // [T, half, 2]
    u32 rows, n_head, d_head, half, interleaved, reserved;
};

// A part of every head's row: parts of a head are neighbours in `whole`.
struct Heads {
    const float* from;
    float* to;
    u64 n;                   // heads in all rows
    u32 width, d_head, first, is_split;
};

// Rows that a step is given.
struct Input {
    float* x;          // [T, d]
    const float* rows; // [n / d, d_input]
    const u32* tokens; // [n / d]
    u64 n;
    u32 d, d_input;
    u32 first;         // of their numbers
    u32 add;           // to x; else in place of it
};

struct Elementwise {
    float* x;        // [n]
    const float* y;  // [n], or [n / width], or [width]
    float* out;      // [n]
    u64 n;
    u32 width, act;
    float a, b;
};

struct DecayBeta {
    const float* a;       // [rows, n]
    const float* b;       // [rows, n / each], or null
    const float* a_log;   // [n / each, rates]
    const float* dt_bias; // [n]
    float* g;             // [rows, n, rates]
    float* beta;          // [rows, n / each]
    u64 len;              // rows * n
    u64 n;
    u32 each;             // numbers of `a` of a head
    u32 rates;            // decays of a number of `a`
    float bound;          // of the decays' exponents, or 0
    u32 reserved;
};

struct KvAppend {
    Step step;
    const float* k; // [T, n_kv, d_k]
    const float* v; // [T, n_kv, d_v], or null
    void* k_cache;  // [n_pages, n_kv, PAGE, d_k]
    void* v_cache;  // [n_pages, n_kv, PAGE, d_v]
    u32 rows, n_kv, d_k, d_v, windowed;
    u32 blocks; // bit 0: keys are kept in blocks of 8 bits, bit 1: values
};

// Keys and values that are kept in blocks, as f16 in copies of the cache.
// The positions that attention sees, n of each token.
struct Choose {
    Step step;
    const float* q;       // [T, n_head, d]
    const float* weights; // [T, n_head]
    const void* k_cache;  // [n_pages, PAGE, d]
    u32* ranks;           // [n_tokens, stride]
    u32* out;             // [T, n]
    u32 first, n_tokens;  // of the slice of the step
    u32 n_head, n, stride;
    u32 per;              // of choose_scores_tile: tokens of a block
};

struct KvWiden {
    Step step;
    const void* k;
    const void* v;
    u16* k_out; // [n_pages, n_kv, PAGE, d_k], or null
    u16* v_out; // [n_pages, n_kv, PAGE, d_v], or null
    u32 n_kv, d_k, d_v;
    u32 window, windowed; // as those of attention
    u32 singles;          // not 0: chunks of one token are left out
};

// A form of rows.
struct PackTo {
    void* out;    // [rows, stride]
    u32 stride;   // of a row, in numbers
    u32 runs;     // of a unit of the weights that will read them: bf16 in the order of `packed_at`; 0: f32 as they are
    u32 paired;
    u32 n_groups; // or 0; of `pack` of `wide.h`, whose form it is then, `stride` numbers of a row in whole steps
    u32 split;    // there: what rounding to bf16 leaves has a panel after it
    u32 reserved;
};

struct Attention {
    Step step;
    const float* q;       // [T, n_head, d_k]
    const void* k_cache;  // [n_pages, n_kv, PAGE, d_k]
    const void* v_cache;  // [n_pages, n_kv, PAGE, d_v]; unused where the values lie in the keys
    const float* sinks;   // [n_head], or null
    float* out;           // [T, n_head, d_v]
    float* partial;       // [T, n_head, n_splits, d_v + 2]
    const u32* ends;      // [T], the position after the last that a token sees; null: after its own
    u32 rows, n_head, n_kv;
    u32 n_splits;         // of attention_tile: the number of chunks
    u32 window;           // as first_seen takes it
    u32 windowed;         // the cache keeps a window
    float scale, softcap; // softcap 0: none
    u32 singles;          // not 0: chunks of one token are for `attention`, others for attention_tile
    u32 reach;            // positions from its own on that a token sees of its span at most; 0: all
    PackTo packed;        // of attention_wide: in place of `out`, or null
};

struct CausalConv {
    Step step;
    const float* x; // [T, d]
    const float* w; // [d, WIDTH]
    const float* bias; // [d] or none
    float* state;   // [n_states][(WIDTH - 1) + most drafts, d]
    float* out;     // [T, d]
    u64 state_len;  // of a slot
    u32 d, silu;
};

struct AttentionChosen {
    Attention op;
    const u32* chosen; // [T, n]
    u32 n, reserved;
};

struct DeltaNet {
    Step step;
    const float* q;    // [T, n_k_head, d_k]
    const float* k;    // [T, n_k_head, d_k]
    const float* v;    // [T, n_v_head, d_v]
    const float* g;    // [T, n_v_head], by_row [T, n_v_head, d_k]
    const float* beta; // [T, n_v_head]
    const float* skip; // [n_v_head], or null
    float* state;      // [n_states][n_v_head, d_k, d_v], in a slot before k, v, g and beta of drafts, [2][most_drafts]
    float* out;        // [T, n_v_head, d_v]
    u64 state_len;     // of a slot
    u32 n_k_head, n_v_head, d_v, tiled, is_sum, by_row;
    u32 most_drafts;
    u32 beside_tiles;  // only chunks with drafts, and states that move past accepted ones
};

// The delta rule in tiles of 32 positions: what `delta_tiles` finds of each, for `delta_chunks`.
struct DeltaChunks {
    DeltaNet op;
    u16* keys;    // [tiles, n_k_head, 4, 32, d_k] f16: k and q in two parts each, their rows scaled
    u16* shares;  // [tiles, n_v_head, 4, 32, 32] f16: the inverse and the shares in two parts each, their rows scaled
    float* gates; // [tiles, n_v_head, 8, 32]
};

// Sums of shares of k that a wide product leaves to the launch after it (`shares.h`): number i of row t is the sum of
// of[s * share + t * row + i], in the order of s.
struct Shares {
    const float* of; // null: none
    u64 share;       // numbers from share to share
    u32 row, n;      // numbers from row to row, shares
};

struct Route {
    Step step;
    const float* logits;       // [rows, n_expert]
    const float* bias;         // [n_expert], or null
    const float* expert_scale; // [n_expert], or null
    u32* ids;                  // [rows, n_used]
    float* weights;            // [rows, n_used]
    u32 rows, n_used, score, n_group, n_group_used, group_sums, renormalise, of_outputs, router;
    float eps, scale;
    u32 n_squares;             // 0, or of few_routed: `sums` in place of logits
    u32 k;                     // with sums: numbers of the normed row
    float norm_eps;
    LogitSums sums;
    u32 first, n_local;        // 0, or the experts of this part of a plan
    float margin;              // of the score that compares experts with those near them
    u32 reserved;
};

// The choice of all rows.
struct RouteRows {
    Route op;
    Shares shares; // of the logits, and of numbers after them
    float* rest;   // [rows, n_rest]: where these go
    u32 n_rest, reserved;
};

// Rows of x behind a norm, packed (`columns.h`).
struct PackColumns {
    const float* x; // [rows, k]
    Prologue prologue;
    u8* out;        // [rows, column_bytes(k)]
    u32 k, is_wide; // a scale for 64 numbers, not 32
};

// The router's product and its choice: the block that ends last chooses for all rows.
struct Router {
    Linear linear; // part 0: the experts' logits; others: rows of their own
    Route route;
    u32* counter; // zero before and after
    float scale;  // of the logits
    float eps;    // of the norm of `added`
    const float* added;   // [rows, k], or null: x is x + norm(added) * added_w
    const float* added_w; // [k]
    float* sum;           // [rows, k]: that x
    PackColumns pack;     // of x, by a block a row behind all others; without `out` by none
};

// As `Experts` and `ExpertsDown`, in blocks of `each` rows of weights; experts chosen by the logits of `route`, where
// there are any.
struct FewExperts {
    Experts op;
    Route route;
    u32 each, stages;
    const float* shared_norm; // [k], or null: weights of its own norm over the same row
};
struct FewDown {
    ExpertsDown op;
    Route route;
    u32 each, stages;
    float* shared_out; // [rows, n], or null: its product goes there and not into the sum
};

// As `Experts`, for pairs of several rows, in blocks whose warps have `each` rows of weights. Rows of x are packed
// columns, and so are act(gate) * up.
struct FewPairs {
    Experts op;
    const u8* columns;        // of x: of rows, or of pairs with x_per_pair
    const u8* shared_columns; // of the shared expert's x: of rows
    u8* packed;               // [rows * n_used, column_bytes(n)]: act(gate) * up
    u8* shared_packed;        // [rows, column_bytes(n)]
    u32 each, reserved;
};

// out = (x + y) * scale, where y = norm(a) * w_a (+ norm(b) * w_b), normed again where there is a w.
struct PostNorm {
    const float* x;     // [rows, d]
    float* out;         // [rows, d]
    const float* a;     // [rows, d]
    const float* w_a;   // [d]
    const float* b;     // [rows, d], or null
    const float* w_b;   // [d]
    const float* w;     // [d], or null
    const float* scale; // [1], or null
    u32 rows, d;
    float eps_a, eps_b, eps;
    u32 reserved;
};

// What comes before a delta rule, for a token of each sequence: the causal convolution of q, k and v, the norms of q
// and k, the gates.
struct DeltaIn {
    Step step;
    const float* x; // [T, d], channels of q, of k, of v
    const float* w; // [d, WIDTH]
    float* state;   // [n_states][(WIDTH - 1) + most drafts, d]
    float* q;       // [T, n_k_head, d_k]
    float* k;       // [T, n_k_head, d_k]
    float* v;       // [T, n_v_head, d_v]
    DecayBeta gates;
    u64 state_len; // of a slot
    u32 d, n_k_head, n_v_head, d_k, d_v;
    float q_scale, k_scale, eps;
};

struct Combine {
    float* x;             // [rows, d]
    const float* y;       // [rows, n_used, d]; with `places` bf16, rows in the order of the experts' lists
    const float* weights; // [rows, n_used]
    const float* norm_w;  // [d], or null
    float* norm_out;      // [rows, d]
    const float* shared_y; // [rows, d], or null: the shared expert's
    const float* share;    // [rows], or null: it counts in full
    u32 rows, n_used, d, add;
    float eps;
    u32 reserved;
    const float* next_w; // [d]: of the norm behind x, whose packed columns combine_sum puts out without its factor
    u8* columns;         // [rows, column_bytes(d)], or null
    float* squares;      // [rows, d / 256]
    const u32* places;   // [rows * n_used], or null: the row of y that is a pair's
    PackTo packed[2];    // of combine_listed: forms of norm_out besides; each may be null
};

struct Select {
    const float* x;  // [T, d]
    const u32* rows; // [R]
    float* out;      // [R, d_out]
    u32 n_rows, d;
    u32 d_out;       // d times the rows that are merged
    u32 reserved;
};

// Heads of q, k or v.
struct QkvPart {
    float* x;       // [T, n_head, d_head]
    const float* w; // [d_head], or null
    void* cache;    // [n_pages, n_head, PAGE, d_head], or null
    u32 n_head, d_head, is_normed, is_rotated;
    u32 is_blocks; // the cache has blocks of 8 bits
    u32 reserved;
    Shares shares; // of x, heads one after the other; of single tokens
};

struct Qkv {
    Step step;
    QkvPart parts[3];
    const float* table; // [T, half, 2]
    u32 rows, n_heads;  // of all parts
    u32 half, interleaved, windowed;
    float eps;
};

// The step form of attention with what comes before it: head norms, ropes, the append; and the merge of its splits.
struct Attend {
    Step step;
    QkvPart q, k, v;
    const float* table; // [T, half, 2]
    void* k_cache;      // [n_pages, n_kv, PAGE, d]
    void* v_cache;
    const float* sinks; // [n_head], or null
    float* out;         // [T, n_head, d]
    float* partial;     // [T, n_kv, tiles, n_splits, HEADS, d + 4]
    u32* counters;      // [T, n_kv, tiles], zero before and after
    u32 n_kv, n_splits, window, windowed;
    u32 half, interleaved, q_stride, n_tiles; // q_stride: from head to head of q
    float scale, softcap, eps;
    u32 rows;
    u32 workers, stages; // warps of a block that have pages, and half pages of each in shared memory, 1 or 2
    u8* columns;         // [T, column_bytes(n_head * d)], or null: `out` packed
    u32 singles;         // not 0: the rows are the chunks of one token among others
    u32 cached;          // not 0: keys and values of the rows are in the cache
};

// What comes before attention over latents, for single tokens: queries are multiplied with the cache, which holds a
// normed latent and a rotated key a position.
struct LatentQ {
    Step step;
    Linear q;            // part 0 [n_head * (k + d_pe), q.k]; no parts: `heads` are there
    HeadLinear w;        // W_uk; out [T, n_head, n + d_pe], where n is the latent's width
    float* heads;        // [T, n_head, k + d_pe]
    const float* kv;     // [T, n + d_pe]
    const float* norm_w; // [n]
    void* cache;         // [n_pages, PAGE, n + d_pe]
    const float* table;  // [T, half, 2]
    u32* counters;       // [n_head], zero before and after
    u32 d_pe, half, interleaved, windowed, transposed;
    u32 blocks;          // of a head
    u32 queries_at;      // in shared memory, bytes
    float eps;
};

// What attention summed over latents, times W_uv.
struct LatentOut {
    HeadLinear w;         // x where there is one split
    const float* partial; // [rows, n_head, n_splits, k + 2]
    u32 n_splits;
    u32 merged_at; // in shared memory, bytes
};

// What is asked of a row of logits.
struct PickAsk {
    u32 row, n, first_listed, n_listed, log_sum_exp;
    u32 first_out; // in `listed_out`
};

struct PickPart {
    float top, sum;
    u32 first_bad, reserved;
};

struct Picked {
    double log_sum_exp;
    u32 n, bad;
    float bad_value;
    u32 reserved;
    u32 ids[64];
    float values[64];
};

struct Pick {
    const float* logits;    // [R, n_vocab]
    const PickAsk* asks;    // [rows]
    const u32* listed;
    PickPart* parts;        // [rows, 64]
    void* candidates;       // [rows, 64, 64] of value and id
    Picked* out;            // [rows]
    float* listed_out;
    u32 n_vocab, rows;
};

// Activations of a product of many rows, packed (`wide.h`).
struct Packed {
    uint4* packed; // [chunks][panels][n_groups][8][64] bf16
    u32 n_groups;  // of 8 rows
    u32 width;     // columns of a tile
};

struct WideLinear {
    Linear op;
    Packed wide;
    float* sums; // [shares of k][rows of x][rows of all parts], where there are several
    u32 n_shares;
    u32 reserved;
};

struct WideGatedLinear {
    GatedLinear op;
    Packed wide;
};

// The experts' activations as bf16, packed for the last product (`pack` of `wide.h`), pairs in the order of the lists.
struct PackedHidden {
    uint4* packed;   // or null: f32, a row a pair
    u32 n_groups;    // of eight pairs
    u32 runs;        // of a unit of the weights that will read them
    u32 paired;      // a unit's runs lie 32 values apart
    u32 n;           // numbers of a row in whole steps of four units; those after the last are zero
};

struct WideExperts {
    Experts op;
    Packed wide;
    PackedHidden hidden; // of gated products
    const u32* further;  // tiles in addition to one an expert (`ExpertLists`)
    u32 listed;          // of the last product: `out` is bf16, rows in the order of the lists
    u32 reserved;
};

// Rows of x after their prologue, in up to three forms.
struct Pack {
    float* x;              // [rows, k]
    const float* residual; // [rows, k], which is added to x, or null
    Prologue prologue;
    PackTo to[3];          // the second and the third may be null
    u32 rows, k;
};

// Columns of a product of 9 to 64 rows (`batch.h`).
struct Batched {
    const u16* x;  // [rows, stride] bf16
    u32 stride;
    u32 n_split;   // warps that share rows of weights
};

struct BatchLinear {
    Linear op;
    Batched columns;
};

struct BatchGatedLinear {
    GatedLinear op;
    Batched columns;
};

// Pairs behind the last are the shared expert's, of every row.
struct BatchExperts {
    Experts op;
    Batched columns;
    u16* hidden;  // [pairs, hidden_stride], packed for the next product; or null: op.out
    u32 hidden_stride, hidden_runs, hidden_paired, reserved;
};
