//! Arguments of the kernels: the structs of `kernels/cuda/args.h`, field by field. The sizes are checked below and by a
//! test that compiles the header.
#![allow(missing_docs)]

use super::driver::Ptr;

macro_rules! args {
    ($($(#[$doc:meta])* struct $name:ident: $bytes:literal { $($field:ident: $ty:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name { $(pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    )*
    /// Names and sizes of all structs.
    #[cfg(test)]
    pub const SIZES: &[(&str, usize)] = &[$((stringify!($name), $bytes)),*];
    };
}

args! {
    struct Matrix: 24 { q: Ptr, scales: Ptr, biases: Ptr }
    struct Prologue: 40 {
        w: Ptr, gate: Ptr, kind: u32, d_head: u32, gate_head: u32, gate_row: u32, eps: f32, reserved: u32,
    }
    struct LinearPart: 48 { w: Matrix, bias: Ptr, out: Ptr, n: u64 }
    struct Linear: 256 {
        x: Ptr, rows: u32, k: u32, n_parts: u32, add: u32, prologue: Prologue, parts: [LinearPart; 4],
    }
    struct LinearPair: 520 { a: Linear, b: Linear, blocks_a: u32, reserved: u32 }
    struct GatedLinear: 128 {
        x: Ptr, gate: Matrix, up: Matrix, out: Ptr, rows: u32, k: u32, n: u32, act: u32, alpha: f32, limit: f32,
        prologue: Prologue,
    }
    struct Embed: 56 { ids: Ptr, table: Matrix, out: Ptr, rows: u32, d: u32, scale: f32, stride: u32 }
    struct HeadLinear: 56 { x: Ptr, w: Matrix, out: Ptr, rows: u32, n_head: u32, n: u32, k: u32 }
    struct Experts: 248 {
        x: Ptr, ids: Ptr, w: Matrix, up: Matrix, bias: Ptr, up_bias: Ptr, out: Ptr, first: Ptr, pairs: Ptr,
        rows: u32, n_used: u32, n_expert: u32, n: u32, k: u32, x_per_pair: u32, act: u32,
        alpha: f32, limit: f32, n_shared: u32, shared_n: u32, reserved: u32, shared_w: Matrix, shared_up: Matrix,
        shared_out: Ptr, prologue: Prologue,
    }
    struct ExpertsDown: 136 {
        h: Ptr, shared_h: Ptr, share: Ptr, ids: Ptr, weights: Ptr, w: Matrix, shared_w: Matrix, bias: Ptr, x: Ptr,
        rows: u32, n_used: u32, n_expert: u32, n: u32, k: u32, add: u32, shared_k: u32, reserved: u32,
    }
    struct Columns: 24 { of: Ptr, squares: Ptr, n_squares: u32, reserved: u32 }
    struct FewLinear: 288 { op: Linear, each: u32, stages: u32, columns: Columns }
    struct LogitSums: 16 { of: Ptr, squares: Ptr }
    struct FewRouted: 288 { op: Linear, router: Ptr, norm: Ptr, sums: LogitSums }
    struct FewPair: 552 {
        a: Linear, b: Linear, blocks_a: u32, each_a: u32, each_b: u32, reserved: u32, columns: Columns,
    }
    struct ExpertLists: 104 {
        ids: Ptr, first: Ptr, pairs: Ptr, places: Ptr, further: [Ptr; 3], width: [u32; 3], n_pairs: u32, n_expert: u32,
        n_groups: u32, x: Ptr, columns: Ptr, k: u32, n_used: u32,
    }
    struct Chunk: 44 {
        first: u32, len: u32, pos: u32, first_page: u32, first_window_page: u32, first_window_block: u32, state: u32,
        single: u32, n_draft: u32, n_replay: u32, side: u32,
    }
    struct Step: 64 {
        ids: Ptr, positions: Ptr, chunk_of: Ptr, rows: Ptr, chunks: Ptr, pages: Ptr, window_pages: Ptr, faults: Ptr,
    }
    struct RmsNorm: 48 { x: Ptr, residual: Ptr, w: Ptr, out: Ptr, rows: u32, d: u32, eps: f32, reserved: u32 }
    struct Center: 32 { x: Ptr, out: Ptr, rows: u64, d: u32, reserved: u32 }
    struct HeadNorm: 48 { x: Ptr, w: Ptr, gate: Ptr, n: u64, d: u32, eps: f32, n_w: u32, gate_first: u32 }
    struct RopeTable: 80 {
        positions: Ptr, places: Ptr, axes: Ptr, inv_freq: Ptr, table: Ptr, zeroed: Ptr, rows: u32, half: u32,
        factor: f32, n_zeroed: u32,
        beta: f32, step: u32, offset: u32, reserved: u32,
    }
    struct Rope: 40 {
        x: Ptr, table: Ptr, rows: u32, n_head: u32, d_head: u32, half: u32, interleaved: u32, reserved: u32,
    }
    struct Heads: 40 { from: Ptr, to: Ptr, n: u64, width: u32, d_head: u32, first: u32, is_split: u32 }
    struct Input: 48 {
        x: Ptr, rows: Ptr, tokens: Ptr, n: u64, d: u32, d_input: u32, first: u32, add: u32,
    }
    struct Elementwise: 48 {
        x: Ptr, y: Ptr, out: Ptr, n: u64, width: u32, act: u32, a: f32, b: f32,
    }
    struct DecayBeta: 80 {
        a: Ptr, b: Ptr, a_log: Ptr, dt_bias: Ptr, g: Ptr, beta: Ptr, len: u64, n: u64, each: u32, rates: u32,
        bound: f32, reserved: u32,
    }
    struct KvAppend: 120 {
        step: Step, k: Ptr, v: Ptr, k_cache: Ptr, v_cache: Ptr, rows: u32, n_kv: u32, d_k: u32, d_v: u32, windowed: u32,
        blocks: u32,
    }
    struct KvWiden: 120 {
        step: Step, k: Ptr, v: Ptr, k_out: Ptr, v_out: Ptr, n_kv: u32, d_k: u32, d_v: u32, window: u32, windowed: u32,
        singles: u32,
    }
    struct Attention: 192 {
        step: Step, q: Ptr, k_cache: Ptr, v_cache: Ptr, sinks: Ptr, out: Ptr, partial: Ptr, ends: Ptr,
        rows: u32, n_head: u32, n_kv: u32, n_splits: u32, window: u32, windowed: u32, scale: f32, softcap: f32,
        singles: u32, reach: u32, packed: PackTo,
    }
    struct Choose: 128 {
        step: Step, q: Ptr, weights: Ptr, k_cache: Ptr, ranks: Ptr, out: Ptr, first: u32, n_tokens: u32, n_head: u32,
        n: u32, stride: u32, per: u32,
    }
    struct AttentionChosen: 208 { op: Attention, chosen: Ptr, n: u32, reserved: u32 }
    struct CausalConv: 120 {
        step: Step, x: Ptr, w: Ptr, bias: Ptr, state: Ptr, out: Ptr, state_len: u64, d: u32, silu: u32,
    }
    struct DeltaNet: 168 {
        step: Step, q: Ptr, k: Ptr, v: Ptr, g: Ptr, beta: Ptr, skip: Ptr, state: Ptr, out: Ptr, state_len: u64,
        n_k_head: u32, n_v_head: u32, d_v: u32, tiled: u32, is_sum: u32, by_row: u32,
        most_drafts: u32, beside_tiles: u32,
    }
    struct DeltaChunks: 192 { op: DeltaNet, keys: Ptr, shares: Ptr, gates: Ptr }
    struct Shares: 24 { of: Ptr, share: u64, row: u32, n: u32 }
    struct Route: 192 {
        step: Step, logits: Ptr, bias: Ptr, expert_scale: Ptr, ids: Ptr, weights: Ptr,
        rows: u32, n_used: u32, score: u32, n_group: u32, n_group_used: u32, group_sums: u32, renormalise: u32,
        of_outputs: u32, router: u32, eps: f32, scale: f32, n_squares: u32, k: u32, norm_eps: f32,
        sums: LogitSums, first: u32, n_local: u32, margin: f32, reserved: u32,
    }
    struct RouteRows: 232 { op: Route, shares: Shares, rest: Ptr, n_rest: u32, reserved: u32 }
    struct Router: 552 {
        linear: Linear, route: Route, counter: Ptr, scale: f32, eps: f32, added: Ptr, added_w: Ptr, sum: Ptr,
        pack: PackColumns,
    }
    struct FewExperts: 456 { op: Experts, route: Route, each: u32, stages: u32, shared_norm: Ptr }
    struct PackColumns: 64 { x: Ptr, prologue: Prologue, out: Ptr, k: u32, is_wide: u32 }
    struct FewPairs: 288 {
        op: Experts, columns: Ptr, shared_columns: Ptr, packed: Ptr, shared_packed: Ptr, each: u32, reserved: u32,
    }
    struct FewDown: 344 { op: ExpertsDown, route: Route, each: u32, stages: u32, shared_out: Ptr }
    struct PostNorm: 88 {
        x: Ptr, out: Ptr, a: Ptr, w_a: Ptr, b: Ptr, w_b: Ptr, w: Ptr, scale: Ptr, rows: u32, d: u32, eps_a: f32, eps_b: f32,
        eps: f32, reserved: u32,
    }
    struct DeltaIn: 232 {
        step: Step, x: Ptr, w: Ptr, state: Ptr, q: Ptr, k: Ptr, v: Ptr, gates: DecayBeta, state_len: u64,
        d: u32, n_k_head: u32, n_v_head: u32, d_k: u32, d_v: u32, q_scale: f32, k_scale: f32, eps: f32,
    }
    struct Combine: 176 {
        x: Ptr, y: Ptr, weights: Ptr, norm_w: Ptr, norm_out: Ptr, shared_y: Ptr, share: Ptr, rows: u32, n_used: u32,
        d: u32, add: u32, eps: f32, reserved: u32, next_w: Ptr, columns: Ptr, squares: Ptr, places: Ptr,
        packed: [PackTo; 2],
    }
    struct AllReduce: 136 {
        x: Ptr, parts: [Ptr; 8], n: u64, part: u32, n_parts: u32, rooms: [u32; 2], residual: Ptr, norm_w: Ptr,
        norm_out: Ptr, d: u32, eps: f32, keeps_x: u32, reserved: u32,
    }
    struct Hot: 56 {
        ids: Ptr, table: Ptr, slots: Ptr, host: Ptr, out: Ptr, n_pairs: u32, n_expert: u32, n_slots: u32, n: u32,
    }
    struct Select: 40 { x: Ptr, rows: Ptr, out: Ptr, n_rows: u32, d: u32, d_out: u32, reserved: u32 }
    struct QkvPart: 72 {
        x: Ptr, w: Ptr, cache: Ptr, n_head: u32, d_head: u32, is_normed: u32, is_rotated: u32, is_blocks: u32,
        reserved: u32, shares: Shares,
    }
    struct Qkv: 312 {
        step: Step, parts: [QkvPart; 3], table: Ptr, rows: u32, n_heads: u32, half: u32, interleaved: u32, windowed: u32,
        eps: f32,
    }
    struct Attend: 408 {
        step: Step, q: QkvPart, k: QkvPart, v: QkvPart, table: Ptr, k_cache: Ptr, v_cache: Ptr, sinks: Ptr, out: Ptr,
        partial: Ptr, counters: Ptr, n_kv: u32, n_splits: u32, window: u32, windowed: u32, half: u32, interleaved: u32,
        q_stride: u32, n_tiles: u32, scale: f32, softcap: f32, eps: f32, rows: u32,
        workers: u32, stages: u32, columns: Ptr, singles: u32, cached: u32,
    }
    struct LatentQ: 456 {
        step: Step, q: Linear, w: HeadLinear, heads: Ptr, kv: Ptr, norm_w: Ptr, cache: Ptr, table: Ptr, counters: Ptr,
        d_pe: u32, half: u32, interleaved: u32, windowed: u32, transposed: u32, blocks: u32, queries_at: u32, eps: f32,
    }
    struct LatentOut: 72 { w: HeadLinear, partial: Ptr, n_splits: u32, merged_at: u32 }
    struct PickAsk: 24 { row: u32, n: u32, first_listed: u32, n_listed: u32, log_sum_exp: u32, first_out: u32 }
    struct PickPart: 16 { top: f32, sum: f32, first_bad: u32, reserved: u32 }
    struct Pick: 64 {
        logits: Ptr, asks: Ptr, listed: Ptr, parts: Ptr, candidates: Ptr, out: Ptr, listed_out: Ptr, n_vocab: u32,
        rows: u32,
    }
    struct PackTo: 32 {
        out: Ptr, stride: u32, runs: u32, paired: u32, n_groups: u32, split: u32, reserved: u32,
    }
    struct Pack: 160 { x: Ptr, residual: Ptr, prologue: Prologue, to: [PackTo; 3], rows: u32, k: u32 }
    struct Batched: 16 { x: Ptr, stride: u32, n_split: u32 }
    struct BatchLinear: 272 { op: Linear, columns: Batched }
    struct BatchGatedLinear: 144 { op: GatedLinear, columns: Batched }
    struct BatchExperts: 288 {
        op: Experts, columns: Batched, hidden: Ptr, hidden_stride: u32, hidden_runs: u32, hidden_paired: u32,
        reserved: u32,
    }
    struct Packed: 16 { packed: Ptr, n_groups: u32, width: u32 }
    struct WideLinear: 288 { op: Linear, wide: Packed, sums: Ptr, n_shares: u32, reserved: u32 }
    struct WideGatedLinear: 144 { op: GatedLinear, wide: Packed }
    struct PackedHidden: 24 { packed: Ptr, n_groups: u32, runs: u32, paired: u32, n: u32 }
    struct WideExperts: 304 {
        op: Experts, wide: Packed, hidden: PackedHidden, further: Ptr, listed: u32, reserved: u32,
    }
}
