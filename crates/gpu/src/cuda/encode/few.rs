//! Launches of the nodes for steps of few tokens (`cuda/few`).

use super::super::args;
use super::super::batch;
use super::super::delta;
use super::super::driver::DriverError;
use super::super::few;
use super::super::few_launch;
use super::super::launch::Launch;
use super::super::matmul;
use super::super::nodes::{
    ATTEND_PAGES, AttendNode, AttentionNode, DeltaInNode, DenseUp, DownNode, ExpertsNode, FewLinearNode, Late,
    LatentOutNode, LatentQNode, Modules, PackedNode, Part, PostNormNode, QkvNode, RouterNode, Sums, UpNode, WARPS,
};
use super::attention::{Keys, qkv_part};
use super::batch::up_args;
use super::{Encoder, RopeView, gated_args, linear_args};

impl Encoder<'_> {
    pub(super) fn few_linear(&mut self, node: &FewLinearNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if self.few_linear_after_gate(node, rows)? {
            return Ok(());
        }
        if rows > few::MAX_ROWS || self.is_batch_of_few(node, rows) {
            return self.few_linear_batch(node, rows);
        }
        let [first, second] = &node.parts;
        let linear = |parts: &[Part]| {
            let (args, n) = linear_args(&node.x, rows, parts);
            (args::Linear { prologue: node.prologue, add: u32::from(node.add), ..args }, n)
        };
        let (w, sms) = (first[0].w, self.sms);
        let (a, n) = linear(first);
        let (device, half, total) = (self.device(), self.half, n.iter().sum());
        let few = node.few.filter(|_| (1..=few::MAX_ROWS).contains(&rows));
        let columns = self.columns(node.columns, rows);
        let columns = columns.map_or_else(Default::default, |packed| args::Columns {
            of: packed.of,
            squares: packed.norm.map_or(0, |(_, squares)| squares),
            n_squares: node.x.width.div_ceil(few::SUM_THREADS) as u32,
            reserved: 0,
        });
        if let Some(routed) = node.routed.filter(|_| self.is_late(rows, 1))
            && let Some(launch) = few_launch::routed(w.dtype, w.k, w.n, routed.n_expert, device, half)
        {
            self.half = half.next();
            let args = args::FewRouted { op: a, router: routed.router, norm: routed.norm, sums: routed.sums };
            return self.run(routed.module, launch, &args);
        }
        if let (Some(module), None) = (few, second.first())
            && let Some((launch, each)) =
                few_launch::linear(w.dtype, rows, w.k, total, node.prologue.kind > 1, device, half)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewLinear { op: a, each, stages: 0, columns });
        }
        if let (Some(module), None, [part]) = (few, second.first(), first.as_slice())
            && node.prologue.kind <= 1
            && rows <= few_launch::LONG_ROWS
            && let Some((launch, each, stages)) = few_launch::long(w.dtype, rows, w.k, part.w.n, device)
        {
            return self.run(module, launch, &args::FewLinear { op: a, each, stages, columns });
        }
        if let (Some(module), None, 1) = (few, second.first(), rows)
            && node.prologue.kind <= 1
            && let Some((launch, each)) = few_launch::linear_twice(w.dtype, w.k, total, device)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewLinear { op: a, each, stages: 0, columns });
        }
        let Some(other) = second.first() else {
            let launch = |rows| matmul::linear(w.dtype, rows, w.k, &n[..first.len()], sms);
            return self.run_some(rows, node.module, launch, &a);
        };
        let (b, n_other) = linear(second);
        let n = [total, n_other.iter().sum()];
        if let Some(module) = few
            && let Some((launch, blocks_a, [each_a, each_b])) =
                few_launch::pair([w.dtype, other.w.dtype], rows, w.k, n, device, half)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewPair { a, b, blocks_a, each_a, each_b, reserved: 0, columns });
        }
        let (launch, blocks_a) = matmul::linear_pair([w.dtype, other.w.dtype], rows, w.k, n, sms);
        self.run_some(rows, node.module, |_| launch, &args::LinearPair { a, b, blocks_a, reserved: 0 })
    }

    /// A product after a gate whose rows are packed by a launch before it, for some numbers of rows. Returns whether it
    /// is one.
    fn few_linear_after_gate(&mut self, node: &FewLinearNode, rows: usize) -> Result<bool, DriverError> {
        let (Some(module), [first, second]) = (node.few, &node.parts) else { return Ok(false) };
        let (w, (args, n)) = (first[0].w, linear_args(&node.x, rows, first));
        let fits = node.prologue.kind > few::NORMED
            && second.is_empty()
            && few_launch::PACKED_GATES.contains(&rows)
            && self.is_few_batch(rows, 2);
        let launch = few_launch::linear(w.dtype, rows, w.k, n.iter().sum(), false, self.device(), self.half);
        let Some((launch, each)) = launch.filter(|_| fits) else { return Ok(false) };
        let out = self.scratch.batch.x;
        self.normed = None;
        let pack = args::PackColumns { x: node.x.ptr, prologue: node.prologue, out, k: w.k as u32, is_wide: 0 };
        let grid = [w.k.div_ceil(1024) as u32, rows as u32, 1];
        self.run(module, Launch { entry: "few_pack", grid, block: 128, shared: 0 }, &pack)?;
        self.half = self.half.next();
        let op = args::Linear { add: u32::from(node.add), ..args };
        let columns = args::Columns { of: out, ..Default::default() };
        self.run(module, launch, &args::FewLinear { op, each, stages: 0, columns })?;
        Ok(true)
    }

    /// Whether a product of few rows takes the kernels for more.
    fn is_batch_of_few(&self, node: &FewLinearNode, rows: usize) -> bool {
        let [first, second] = &node.parts;
        let n = [first, second].map(|parts| parts.iter().map(|part| part.w.n).sum());
        let types = [first[0].w.dtype, second.first().unwrap_or(&first[0]).w.dtype];
        let is_packed = self.columns(node.columns, rows).is_some_and(|columns| columns.norm.is_some());
        let is_faster = batch::is_from_few(types, n, rows, node.prologue.kind > 1, is_packed);
        let has_kernels = || first.iter().chain(second).all(|part| part.w.batch.is_some());
        is_faster && self.is_few_batch(rows, 1) && has_kernels()
    }

    pub(super) fn attend(&mut self, node: &AttendNode) -> Result<(), DriverError> {
        let n_tokens = self.counts.tokens;
        if self.longest > 1 {
            // Tokens see those before them in the step: keys and values are appended first.
            let [_, k, v] = node.parts;
            let AttendNode { qkv: module, rope, eps, .. } = *node;
            let windowed = node.attention.cache.windowed;
            self.qkv(&QkvNode { module, parts: vec![k, v], rope, eps, windowed })?;
            let n_splits = node.splits(n_tokens, self.most_pages, self.sms);
            return self.attend_rows(node, n_tokens, n_splits, false, Keys::Own);
        }
        let (node, is_short) = &node.sized(n_tokens, self.most_pages, self.sms);
        let mut n_splits = node.splits(n_tokens, self.most_pages, self.sms);
        if *is_short && node.heads == 1 {
            // A block of one head takes eight pages in less time than two and a merge.
            n_splits = n_splits.min(self.most_pages.div_ceil(2 * ATTEND_PAGES));
        }
        self.attend_rows(node, n_tokens, n_splits, *is_short, Keys::New)
    }

    /// Attention of `n_tokens` tokens by themselves.
    pub(super) fn attend_rows(
        &mut self,
        node: &AttendNode,
        n_tokens: usize,
        n_splits: usize,
        is_short: bool,
        keys: Keys,
    ) -> Result<(), DriverError> {
        let AttentionNode { cache, sinks, out, window, scale, softcap, .. } = node.attention;
        let ([workers, stages, bytes], size) =
            node.staged(n_tokens, self.most_pages, n_splits, [self.sms, self.max_shared]);
        let (warps, module) = (WARPS[size], node.modules[size]);
        // One block would take longer than a launch.
        let merges = n_splits > 4;
        let rope = node.rope.map(|rope| self.ropes[rope]);
        let [mut q, mut k, mut v] = node.parts.map(|part| qkv_part(&part));
        // Nothing else reads rows of queries without a gate.
        if keys == Keys::New && node.q_stride == cache.d_k {
            [q.shares, k.shares, v.shares] = self.take_shares([q.x, k.x, v.x]);
        }
        let args = args::Attend {
            step: self.step,
            q,
            k,
            v,
            table: rope.map_or(0, |rope| rope.table),
            k_cache: cache.k,
            v_cache: cache.v,
            sinks,
            out: out.ptr,
            partial: self.scratch.partial,
            counters: if merges { 0 } else { node.counters },
            n_kv: cache.n_kv as u32,
            n_splits: n_splits as u32,
            window: window.min(u32::MAX as usize) as u32,
            windowed: u32::from(cache.windowed),
            half: rope.map_or(0, |rope| rope.half as u32),
            interleaved: u32::from(rope.is_some_and(|rope| rope.interleaved)),
            q_stride: node.q_stride as u32,
            n_tiles: node.tiles() as u32,
            scale,
            softcap,
            eps: node.eps,
            rows: n_tokens as u32,
            workers: workers as u32,
            stages: stages as u32,
            columns: self.columns(node.columns, n_tokens).map_or(0, |packed| packed.of),
            singles: u32::from(keys == Keys::OfSingles),
            cached: u32::from(keys != Keys::New),
        };
        let grid = [(n_tokens * node.tiles() * cache.n_kv * n_splits) as u32, 1, 1];
        let launch = if is_short && !cache.types.has_blocks() {
            Launch { entry: "attend", grid, block: 256, shared: 0 }
        } else {
            Launch { entry: "attend_long", grid, block: 32 * warps as u32, shared: bytes as u32 }
        };
        self.run(module, launch, &args)?;
        if !merges {
            return Ok(());
        }
        let grid = [(n_tokens * node.attention.n_head) as u32, 1, 1];
        self.run(module, Launch { entry: "attend_merge", grid, block: 256, shared: 0 }, &args)
    }

    pub(super) fn latent_q(&mut self, node: &LatentQNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.heads);
        if rows == 0 {
            return Ok(());
        }
        let RopeView { table, half, interleaved, .. } = self.ropes[node.rope];
        let product = node.product.map(|(_, part, _)| (part.w.dtype, part.w.k));
        let (launch, blocks, queries_at) =
            matmul::latent_q(node.w.dtype, product, rows, node.n_head, node.widths, self.sms);
        let q = node.product.map_or_else(Default::default, |(x, part, prologue)| {
            let (args, _) = linear_args(&x, rows, &[part]);
            args::Linear { prologue, ..args }
        });
        let [d_latent, d_nope, d_pe] = node.widths;
        let w = args::HeadLinear {
            x: 0,
            w: node.w.data,
            out: node.out,
            rows: rows as u32,
            n_head: node.n_head as u32,
            n: d_latent as u32,
            k: d_nope as u32,
        };
        let args = args::LatentQ {
            step: self.step,
            q,
            w,
            heads: node.heads.ptr,
            kv: node.kv.ptr,
            norm_w: node.norm_w,
            cache: node.cache.k,
            table,
            counters: node.counters,
            d_pe: d_pe as u32,
            half: half as u32,
            interleaved: u32::from(interleaved),
            windowed: u32::from(node.cache.windowed),
            transposed: u32::from(node.transposed),
            blocks,
            queries_at,
            eps: node.eps,
        };
        self.run(node.module, launch, &args)
    }

    pub(super) fn latent_out(&mut self, node: &LatentOutNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.out);
        if rows == 0 {
            return Ok(());
        }
        let n_splits = self.attention_sums(&node.attention, self.counts.tokens, 0)?;
        let (n_head, n, k) = (node.attention.n_head, node.w.n, node.w.k);
        let (launch, merged_at) = matmul::latent_out(node.w.dtype, rows, n_head, n, k, self.sms);
        let w = args::HeadLinear {
            x: node.attention.out.ptr,
            w: node.w.data,
            out: node.out.ptr,
            rows: rows as u32,
            n_head: n_head as u32,
            n: n as u32,
            k: k as u32,
        };
        let args = args::LatentOut { w, partial: self.scratch.partial, n_splits: n_splits as u32, merged_at };
        self.run(node.module, launch, &args)
    }

    pub(super) fn delta_in(&mut self, node: &DeltaInNode) -> Result<(), DriverError> {
        let rows = self.counts.tokens;
        let [q, k, v, g, beta] = node.out;
        let heads = node.heads;
        let n = heads.n_v_head as u64;
        let gates = args::DecayBeta {
            a: node.a,
            b: node.b,
            a_log: node.a_log,
            dt_bias: node.dt_bias,
            g,
            beta,
            len: rows as u64 * n,
            n,
            each: 1,
            rates: 1,
            bound: 0.0,
            reserved: 0,
        };
        let args = args::DeltaIn {
            step: self.step,
            x: node.x.ptr,
            w: node.w,
            state: node.state.ptr,
            q,
            k,
            v,
            gates,
            state_len: node.state.len as u64,
            d: node.x.width as u32,
            n_k_head: heads.n_k_head as u32,
            n_v_head: heads.n_v_head as u32,
            d_k: heads.d_k as u32,
            d_v: heads.d_v as u32,
            q_scale: node.scales[0],
            k_scale: node.scales[1],
            eps: node.eps,
        };
        let grid = [(2 * heads.n_k_head + heads.n_v_head + 1) as u32, self.counts.chunks as u32, 1];
        let launch = match node.has_rows {
            true => delta::rows(heads, self.longest, self.counts.chunks),
            false => Launch { entry: "delta_in", grid, block: 128, shared: 0 },
        };
        self.run(node.module, launch, &args)
    }

    pub(super) fn post_norm(&mut self, node: &PostNormNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        let (a, w_a, eps_a) = node.a;
        let (b, w_b, eps_b) = node.b.map_or((0, 0, 0.0), |(b, w, eps)| (b.ptr, w, eps));
        let (w, eps) = node.norm.unwrap_or((0, 0.0));
        let d = node.x.width;
        let args = args::PostNorm {
            x: node.x.ptr,
            out: node.out,
            a: a.ptr,
            w_a,
            b,
            w_b,
            w,
            scale: node.scale,
            rows: rows as u32,
            d: d as u32,
            eps_a,
            eps_b,
            eps,
            reserved: 0,
        };
        self.run(Modules::NORM, Launch::rows("post_norm", rows, d), &args)
    }

    pub(super) fn router(&mut self, node: &RouterNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if rows > few::MAX_ROWS {
            if let Some(added) = &node.added {
                self.post_norm(added)?;
            }
            return self.router_batch(node, rows);
        }
        // Of several rows every block would repeat the norms of what is added.
        let added = node.added.as_ref().filter(|_| rows == 1);
        if let (Some(node), None) = (&node.added, added) {
            self.post_norm(node)?;
        }
        if node.added.is_some() && node.logits.is_some() && self.is_few_batch(rows, batch::FROM) {
            return self.router_batch(node, rows);
        }
        if node.is_routed && self.is_late(rows, 1) {
            return Ok(());
        }
        let is_late = self.is_late(rows, node.late_rows);
        let (linear, n) = linear_args(&node.x, rows, &node.parts);
        let linear = args::Linear { prologue: node.prologue, ..linear };
        let args = args::Router {
            linear,
            route: self.route_args(&node.route),
            counter: if is_late { 0 } else { node.counter },
            scale: node.scale,
            ..Default::default()
        };
        let args = match added {
            Some(&PostNormNode { x, out, a: (added, added_w, eps), .. }) => {
                let linear = args::Linear { x: x.ptr, ..args.linear };
                args::Router { linear, eps, added: added.ptr, added_w, sum: out, ..args }
            }
            None => args,
        };
        let packs = node.packs.filter(|_| !is_late && self.is_few_batch(rows, 2));
        let pack = packs.map(|(of, prologue)| self.pack_args(&of, prologue));
        let args = args::Router { pack: pack.unwrap_or_default(), ..args };
        let blocks = (n.iter().sum::<usize>() + if pack.is_some() { rows } else { 0 }) as u32;
        let entry = if added.is_some() { "router_added" } else { "router" };
        let w = node.parts[0].w;
        let block = matmul::router_threads(w.dtype, w.k);
        let launch = Launch { entry, grid: [blocks, 1, 1], block, shared: 0 };
        self.run_some(rows, node.module, |_| launch, &args)
    }

    pub(super) fn experts_up(&mut self, node: &UpNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.experts.x);
        let (sms, device, half) = (self.sms, self.device(), self.half);
        let ExpertsNode { gate, n_expert, n_used, hidden, .. } = node.experts;
        let late = node.late.filter(|late| self.is_late(rows, late.rows));
        if let (Some(dense), Some(late)) = (node.dense, late) {
            let (shape, n_dense) = ([gate.n, gate.k], dense.gate.n);
            if let Some((launch, each)) = few_launch::experts(gate.dtype, n_used, n_dense, shape, device, half) {
                self.half = half.next();
                let op =
                    args::Experts { out: hidden.ptr, prologue: node.prologue, ..dense.beside(up_args(node, rows)) };
                let route = self.late_args(&late, rows);
                let args = args::FewExperts { op, route, each, stages: 0, shared_norm: dense.prologue.w };
                return self.run(late.module, launch, &args);
            }
        }
        // The other kernels for few rows have no second norm.
        let pairs = self.pairs(node.pairs, &node.experts, rows).filter(|_| late.is_none());
        let is_beside = |dense: &DenseUp| dense.is_shared && rows <= few::MAX_ROWS && pairs.is_none();
        let beside = node.dense.filter(is_beside);
        if let (Some(DenseUp { gate, up, act, out, prologue, .. }), None) = (node.dense, beside) {
            // What the router has packed lies where these columns would.
            let from = if pairs.is_some_and(|pairs| pairs.is_packed) { usize::MAX } else { batch::FROM };
            let args = gated_args(node.experts.x.ptr, rows, [gate, up], act, out, prologue);
            self.gated_linear(gate, args, from)?;
        }
        if let Some(pairs) = pairs {
            return self.experts_up_pairs(pairs, node, rows);
        }
        if rows > few::MAX_ROWS {
            return self.experts_up_batch(node, rows);
        }
        let shared_out = node.shared.map_or(0, |(_, _, out)| out.ptr);
        let args = args::Experts { out: hidden.ptr, shared_out, prologue: node.prologue, ..up_args(node, rows) };
        let args = beside.map_or(args, |dense| dense.beside(args));
        let each = n_used + usize::from(args.n_shared > 0);
        let shared_n = if node.shared.is_some() { gate.n } else { 0 };
        let shape = [gate.n, gate.k];
        let late_launch = late.and_then(|late| {
            let (launch, each, stages) = if rows == 1 {
                let (launch, each) = few_launch::experts(gate.dtype, n_used, shared_n, shape, device, half)?;
                (launch, each, 0)
            } else {
                few_launch::experts_rows(gate.dtype, rows, n_used + usize::from(shared_n > 0), shape, device, half)?
            };
            Some((late, launch, each, stages))
        });
        if let Some((late, launch, each, stages)) = late_launch {
            self.half = half.next();
            let route = self.late_args(&late, rows);
            return self.run(late.module, launch, &args::FewExperts { op: args, route, each, stages, shared_norm: 0 });
        }
        let launch = |rows| matmul::experts(gate.dtype, rows, each, n_expert, gate.n, gate.k, true, sms);
        self.run_some(rows, gate.module, launch, &args)
    }

    pub(super) fn experts_down(&mut self, node: &DownNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        let late = node.late.filter(|late| self.is_late(rows, late.rows));
        // A dense product that has no place in the launch.
        let is_late = late.is_some() && self.down_with(node).is_some();
        let pairs = self.pairs(node.pairs, &node.experts, rows).filter(|_| late.is_none());
        let is_other = node.other.is_some() && rows <= few::MAX_ROWS && pairs.is_none();
        let apart = node.dense.as_ref().filter(|_| !is_late && !is_other);
        if let Some(dense) = apart {
            self.few_linear(dense)?;
        }
        if let Some(pairs) = pairs {
            return self.experts_down_pairs(pairs, node, rows);
        }
        if rows > few::MAX_ROWS {
            return self.experts_down_batch(node, rows);
        }
        let ExpertsNode { ids, down, biases: [_, _, bias], n_expert, n_used, hidden, .. } = node.experts;
        let dense = node.dense.as_ref().filter(|_| apart.is_none());
        let beside = node.shared.or(dense.map(|dense| (dense.parts[0][0].w, dense.x)));
        let (shared_w, shared_h) = beside.map_or_else(Default::default, |(w, h)| (w.data, h.ptr));
        let args = args::ExpertsDown {
            h: hidden.ptr,
            shared_h,
            share: node.share,
            ids: ids.ptr,
            weights: node.weights.ptr,
            w: down.data,
            shared_w,
            bias,
            x: node.x.ptr,
            rows: rows as u32,
            n_used: n_used as u32,
            n_expert: n_expert as u32,
            n: down.n as u32,
            k: down.k as u32,
            add: u32::from(node.add),
            shared_k: beside.map_or(0, |(w, _)| w.k as u32),
            reserved: 0,
        };
        let (device, half, k_shared) = (self.device(), self.half, beside.map(|(w, _)| w.k));
        let late_launch = late.and_then(|late| {
            let shape = [down.n, down.k];
            let (launch, each, stages) = if rows == 1 {
                let (launch, each) = few_launch::down(down.dtype, n_used, k_shared, shape, device, half)?;
                (launch, each, 0)
            } else {
                few_launch::down_rows(down.dtype, rows, n_used, k_shared.is_some(), shape, device, half)?
            };
            Some((late, launch, each, stages))
        });
        if let Some((late, launch, each, stages)) = late_launch {
            self.half = half.next();
            let route = self.late_args(&late, rows);
            let shared_out = dense.filter(|dense| !dense.add).map_or(0, |dense| dense.parts[0][0].out.ptr);
            return self.run(late.module, launch, &args::FewDown { op: args, route, each, stages, shared_out });
        }
        let beside = beside.map(|(w, _)| (w.dtype, w.k));
        let module = node.other.filter(|_| node.dense.is_some()).unwrap_or(node.module);
        let launch = |rows| matmul::experts_down(down.dtype, rows, n_used, beside, down.n, down.k);
        self.run_some(rows, module, launch, &args)
    }

    /// The launch of the last product of the experts with the dense one of the same type beside them.
    fn down_with(&self, node: &DownNode) -> Option<few_launch::Each> {
        let ExpertsNode { down, n_used, .. } = node.experts;
        let of_dense = node.dense.as_ref().map(|dense| dense.parts[0][0].w);
        if of_dense.is_some_and(|w| w.dtype != down.dtype) {
            return None;
        }
        let k_shared = of_dense.map(|w| w.k);
        few_launch::down(down.dtype, n_used, k_shared, [down.n, down.k], self.device(), self.half)
    }

    /// Whether the blocks of the experts choose, and no launch before them, where they can for up to `most` rows.
    fn is_late(&self, rows: usize, most: usize) -> bool {
        (1..=most).contains(&rows) && !self.is_traced
    }

    /// The packed columns that one node puts out and the next one reads, for so many rows.
    pub(super) fn columns(&self, packed: Option<PackedNode>, rows: usize) -> Option<PackedNode> {
        packed.filter(|packed| match packed.norm {
            Some(_) => self.is_few_batch(rows, packed.from),
            None => (packed.from..=few::MAX_ROWS).contains(&rows),
        })
    }

    fn late_args(&self, late: &Late, rows: usize) -> args::Route {
        let args = self.route_args(&late.route);
        match late.sums.filter(|_| rows == 1) {
            Some(Sums { of, n_squares, k, eps }) => {
                args::Route { n_squares: n_squares as u32, k: k as u32, norm_eps: eps, sums: of, ..args }
            }
            None => args,
        }
    }
}
