//! Cuts a plan into parts, one for each of several devices, which compute a step together.
//!
//! Every part has the whole residual stream and all that is small. Heads of attention and the columns between two
//! products are shared out (Megatron-LM, arXiv 1909.08053): the first product has some of its rows in each part, the
//! second the columns that go with them, and its outputs are added up over the parts ([`Op::AllReduce`]). Experts are
//! shared out whole: a part computes and sums those that it has, and the sums are added up. What cannot be shared
//! out evenly every part computes for itself, to the same bits.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::{Access, Buf, Local, Op, Plan, Slab, Source, Weight, WeightDecl};
use crate::Error;

/// Maximum number of parts.
pub const MAX_PARTS: usize = 8;

/// What one part computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its plan.
    pub plan: Plan,
    /// Columns of tensors that its weights name as separate tensors.
    pub cuts: Vec<Cut>,
}

/// Some columns of a tensor, the numbers `columns` of each of its rows, under a separate name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The tensor, by its name in the checkpoint.
    pub tensor: String,
    /// The columns, whole blocks of its type.
    pub columns: Range<usize>,
}

impl Cut {
    /// The name that stands for them in [`Source`].
    pub fn name(&self) -> String {
        format!("{}[:, {}..{}]", self.tensor, self.columns.start, self.columns.end)
    }
}

/// What of a weight a part has.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Share {
    /// An equal share of its rows, or of the matrices of a stack.
    Rows,
    /// An equal share of its columns.
    Columns,
    /// These matrices of a stack.
    Stack(Range<usize>),
}

/// Cuts a plan as an architecture wrote it, before passes, into `n_parts`.
///
/// # Errors
/// [`Error::Plan`] where plans of this kind cannot be cut, with the reason: there is nothing to share out, or the plan
/// has a draft head.
pub fn partition(plan: &Plan, n_parts: usize) -> Result<Vec<Part>, Error> {
    let refuse = |why: String| Err(Error::Plan(format!("cannot be shared out among {n_parts} devices: {why}")));
    if !(1..=MAX_PARTS).contains(&n_parts) {
        return refuse(format!("1 to {MAX_PARTS} are possible"));
    }
    if plan.draft.is_some() {
        return refuse("it has a head that drafts tokens".into());
    }
    let groups = Groups::of(plan, n_parts);
    let parts: Vec<Part> = (0..n_parts).map(|part| Cutter::new(plan, &groups, n_parts, part).run()).collect();
    let is_shared = parts[0].plan.ops.iter().any(|op| matches!(op, Op::AllReduce { .. }));
    if n_parts > 1 && !is_shared {
        return refuse("no heads, columns or experts divide evenly".into());
    }
    Ok(parts)
}

/// Range of `n` things that part `part` has.
fn share(n: usize, n_parts: usize, part: usize) -> Range<usize> {
    n * part / n_parts..n * (part + 1) / n_parts
}

/// Which buffers are shared out together: each part has the same share of the rows' numbers in all of a group.
struct Groups {
    /// Parent of each buffer, then of each cache: sets that have been joined.
    parent: Vec<usize>,
    /// Whether the set with this root cannot be shared out.
    is_whole: Vec<bool>,
    n_bufs: usize,
    n_parts: usize,
}

impl Groups {
    fn of(plan: &Plan, n_parts: usize) -> Groups {
        let n = plan.bufs.len() + plan.caches.len();
        let mut groups =
            Groups { parent: (0..n).collect(), is_whole: vec![false; n], n_bufs: plan.bufs.len(), n_parts };
        groups.keep_whole(plan.logits);
        plan.ops.iter().for_each(|op| groups.learn(plan, op));
        // The outputs of a product of shared inputs are sums over the parts.
        for op in &plan.ops {
            if let Op::Linear { x, parts } = op
                && groups.is_shared(*x)
            {
                parts.iter().for_each(|part| groups.keep_whole(part.out));
            }
        }
        groups
    }

    /// Joins what an op wants alike, and keeps whole what it cannot compute in parts.
    fn learn(&mut self, plan: &Plan, op: &Op) {
        let n_parts = self.n_parts;
        let width = |buf: Buf| plan.buf(buf).width;
        match *op {
            Op::Linear { x, ref parts } => {
                for part in parts {
                    let decl = plan.weight(part.w);
                    let (n, k) = (decl.shape[0], decl.shape[1]);
                    if !k.is_multiple_of(n_parts) || !(k / n_parts).is_multiple_of(decl.dtype.block_len()) {
                        self.keep_whole(x);
                    }
                    if !n.is_multiple_of(n_parts) {
                        self.keep_whole(part.out);
                    }
                }
            }
            Op::HeadNorm { x, n_head, .. } | Op::Rope { x, n_head, .. } => self.heads(&[x], n_head),
            Op::SplitHeads { x, n_head, ref parts } | Op::JoinHeads { out: x, n_head, ref parts } => {
                let bufs: Vec<Buf> = parts.iter().map(|&(_, part)| part).chain([x]).collect();
                self.heads(&bufs, n_head);
            }
            Op::HeadLinear { x, w, out, .. } => self.heads(&[x, out], plan.weight(w).shape[0]),
            Op::GatedAct { gate, up, out, .. } => self.heads(&[gate, up, out], width(out)),
            Op::Add { x, y } => self.heads(&[x, y], width(x)),
            Op::Scale { .. } | Op::Softcap { .. } | Op::Gelu { .. } | Op::Clamp { .. } => {}
            Op::GateBy { x, gate, .. } if width(gate) == 1 => {
                self.keep_whole(gate);
                self.heads(&[x], width(x));
            }
            Op::GateBy { x, gate, .. } => self.heads(&[x, gate], width(gate)),
            Op::KvAppend { cache, k, v } => {
                let cache_ = self.n_bufs + cache.0 as usize;
                for buf in [Some(k), v].into_iter().flatten() {
                    self.join(buf.0 as usize, cache_);
                }
                if !plan.cache(cache).n_kv.is_multiple_of(n_parts) {
                    self.keep_whole(k);
                }
            }
            Op::Attention { cache, q, n_head, chosen, out, .. } => {
                chosen.into_iter().for_each(|chosen| self.keep_whole(chosen));
                self.heads(&[q, out], n_head);
                let n_kv = plan.cache(cache).n_kv;
                // Heads that all read one head of keys and values find it in every part.
                if n_kv > 1 {
                    self.join(q.0 as usize, self.n_bufs + cache.0 as usize);
                }
            }
            Op::Embed { .. }
            | Op::EmbedPlace { .. }
            | Op::Input { .. }
            | Op::GatedLinear { .. }
            | Op::RmsNorm { .. }
            | Op::Center { .. }
            | Op::AddBias { .. }
            | Op::Constant { .. }
            | Op::Choose { .. }
            | Op::CausalConv { .. }
            | Op::DeltaNet { .. }
            | Op::Route { .. }
            | Op::Experts { .. }
            | Op::Combine { .. }
            | Op::Select { .. }
            | Op::ScaleBy { .. }
            | Op::DecayBeta { .. }
            | Op::GatedNorm { .. }
            | Op::AllReduce { .. } => op.bufs().into_iter().for_each(|(buf, _)| self.keep_whole(buf)),
        }
    }

    /// Joins buffers whose rows are `n` things each.
    fn heads(&mut self, bufs: &[Buf], n: usize) {
        for pair in bufs.windows(2) {
            self.join(pair[0].0 as usize, pair[1].0 as usize);
        }
        if !n.is_multiple_of(self.n_parts) {
            self.keep_whole(bufs[0]);
        }
    }

    fn root(&self, mut of: usize) -> usize {
        while self.parent[of] != of {
            of = self.parent[of];
        }
        of
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.parent[a] = b;
        self.is_whole[b] |= self.is_whole[a];
    }

    fn keep_whole(&mut self, buf: Buf) {
        let root = self.root(buf.0 as usize);
        self.is_whole[root] = true;
    }

    fn is_shared(&self, buf: Buf) -> bool {
        self.n_parts > 1 && !self.is_whole[self.root(buf.0 as usize)]
    }

    fn is_cache_shared(&self, cache: usize) -> bool {
        self.n_parts > 1 && !self.is_whole[self.root(self.n_bufs + cache)]
    }
}

/// Writes the plan of one part.
struct Cutter<'a> {
    plan: &'a Plan,
    groups: &'a Groups,
    n_parts: usize,
    part: usize,
    new: Plan,
    cuts: Vec<Cut>,
    /// What it has of weights that are shared out.
    shares: HashMap<Weight, Share>,
    /// Buffers that hold this part's share of a sum.
    partial: HashSet<Buf>,
    /// What this part has of experts that are shared out, by the ids and the weights of their router.
    routed: HashMap<Buf, Range<usize>>,
    layer: Option<u32>,
}

impl<'a> Cutter<'a> {
    fn new(plan: &'a Plan, groups: &'a Groups, n_parts: usize, part: usize) -> Cutter<'a> {
        let (ops, layers) = (Vec::with_capacity(plan.ops.len()), Vec::with_capacity(plan.ops.len()));
        let new = Plan { ops, layers, ..plan.clone() };
        Cutter {
            plan,
            groups,
            n_parts,
            part,
            new,
            cuts: Vec::new(),
            shares: HashMap::new(),
            partial: HashSet::new(),
            routed: HashMap::new(),
            layer: None,
        }
    }

    fn run(mut self) -> Part {
        if self.n_parts > 1 {
            self.routed = self.routed();
        }
        let of = |n: usize| n / self.n_parts;
        for (i, buf) in self.new.bufs.iter_mut().enumerate() {
            if self.groups.is_shared(Buf(i as u32)) {
                buf.width = of(buf.width);
            }
        }
        for (i, cache) in self.new.caches.iter_mut().enumerate() {
            if self.groups.is_cache_shared(i) {
                cache.n_kv = of(cache.n_kv);
            }
        }
        for (op, &layer) in self.plan.ops.iter().zip(&self.plan.layers) {
            self.layer = layer;
            self.op(op.clone());
        }
        for (w, share) in std::mem::take(&mut self.shares) {
            self.cut(w, share);
        }
        Part { plan: self.new, cuts: self.cuts }
    }

    /// The experts that this part has of each router whose choice nothing but experts and their sums read, by the ids
    /// and by the weights that it writes.
    fn routed(&self) -> HashMap<Buf, Range<usize>> {
        let ops = &self.plan.ops;
        let mut uses: HashMap<Buf, Vec<usize>> = HashMap::new();
        for (i, op) in ops.iter().enumerate() {
            op.bufs().into_iter().for_each(|(buf, _)| uses.entry(buf).or_default().push(i));
        }
        let all = |buf: Buf, holds: &mut dyn FnMut(&Op) -> bool| uses[&buf].iter().all(|&i| holds(&ops[i]));
        let mut routed = HashMap::new();
        for op in ops {
            let &Op::Route { logits, ids, weights, .. } = op else { continue };
            let n_expert = self.plan.buf(logits).width;
            let mut rows = Vec::new();
            let by_experts = all(ids, &mut |op| match *op {
                Op::Route { .. } => true,
                Op::Experts { out, gate, .. } => {
                    rows.push(out);
                    self.plan.weight(gate).shape[0] == n_expert
                }
                _ => false,
            });
            let mut is_summed = |op: &Op| match *op {
                Op::Route { .. } | Op::Experts { .. } => true,
                Op::Combine { y, weights: by, .. } => rows.contains(&y) && by == weights,
                _ => false,
            };
            let are_summed = all(weights, &mut is_summed) && rows.iter().all(|&y| all(y, &mut is_summed));
            if by_experts && are_summed && n_expert >= self.n_parts {
                let own = share(n_expert, self.n_parts, self.part);
                routed.extend([(ids, own.clone()), (weights, own)]);
            }
        }
        routed
    }

    /// Writes an op of the whole plan as this part has it.
    fn op(&mut self, mut op: Op) {
        let n_parts = self.n_parts;
        let shared = |buf: Buf| self.groups.is_shared(buf);
        match &mut op {
            Op::Linear { x, parts } => {
                let is_sum = shared(*x);
                for part in parts {
                    if is_sum {
                        self.shares.insert(part.w, Share::Columns);
                        // One part alone adds it.
                        part.bias = part.bias.filter(|_| self.part == 0);
                    } else if shared(part.out) {
                        self.shares.insert(part.w, Share::Rows);
                        self.shares.extend(part.bias.map(|bias| (bias, Share::Columns)));
                    }
                }
            }
            Op::HeadNorm { x, n_head, .. }
            | Op::Rope { x, n_head, .. }
            | Op::SplitHeads { x, n_head, .. }
            | Op::JoinHeads { out: x, n_head, .. }
                if shared(*x) =>
            {
                *n_head /= n_parts;
            }
            Op::Attention { q, n_head, sinks, .. } if shared(*q) => {
                *n_head /= n_parts;
                self.shares.extend(sinks.map(|sinks| (sinks, Share::Columns)));
            }
            Op::HeadLinear { x, w, .. } if shared(*x) => {
                self.shares.insert(*w, Share::Rows);
            }
            Op::Route { ids, router, .. } => {
                let range = self.routed.get(ids);
                router.local = range.map(|range| Local { first: range.start, n: range.len() });
            }
            Op::Experts { ids, gate, up, down, biases, .. } => {
                if let Some(range) = self.routed.get(ids) {
                    let of_biases = biases.iter().flat_map(|b| [b.gate, b.up, b.down]);
                    for w in [*gate, *up, *down].into_iter().chain(of_biases) {
                        self.shares.insert(w, Share::Stack(range.clone()));
                    }
                }
            }
            Op::Combine { x, add, weights, .. } if self.routed.contains_key(weights) => {
                if !*add {
                    self.write(op.clone());
                    return self.sum_of(&op);
                }
                // The sum travels before it is added to what every part has.
                let decl = self.new.buf(*x).clone();
                let sum = Buf(self.new.bufs.len() as u32);
                self.new.bufs.push(super::BufDecl { name: format!("{}.part", decl.name), ..decl });
                let to = std::mem::replace(x, sum);
                *add = false;
                self.write(op.clone());
                self.partial.insert(sum);
                return self.write(Op::Add { x: to, y: sum });
            }
            _ => {}
        }
        let is_sum = matches!(&op, Op::Linear { x, .. } if shared(*x));
        self.write(op.clone());
        if is_sum {
            self.sum_of(&op);
        }
    }

    /// What an op has written are shares of sums.
    fn sum_of(&mut self, op: &Op) {
        let written = op.bufs().into_iter().filter(|(_, access)| *access == Access::Write);
        self.partial.extend(written.map(|(buf, _)| buf));
    }

    /// Appends an op, after the sums over the parts of what it reads.
    fn write(&mut self, op: Op) {
        let stays = match op {
            // Sums of shares, and multiples of them, are shares.
            Op::Add { x, y } => self.partial.contains(&x) && self.partial.contains(&y),
            Op::Scale { .. } | Op::ScaleBy { .. } => true,
            Op::GateBy { gate, .. } => !self.partial.contains(&gate),
            _ => false,
        };
        for (buf, access) in op.bufs() {
            if access == Access::Write {
                self.partial.remove(&buf);
            } else if !stays && self.partial.remove(&buf) {
                self.new.ops.push(Op::AllReduce { x: buf });
                self.new.layers.push(self.layer);
            }
        }
        self.new.ops.push(op);
        self.new.layers.push(self.layer);
    }

    /// Makes a weight what this part has of it.
    fn cut(&mut self, w: Weight, share_: Share) {
        let decl = self.plan.weight(w).clone();
        let (&k, outer) = decl.shape.split_last().expect("a valid plan's weights have axes");
        let n_stack = if outer.len() > 1 { outer[0] } else { 1 };
        let n_rows = outer.iter().product::<usize>() / n_stack; // of one matrix
        let slabs = slabs(&decl, n_stack, n_rows);
        let new = match share_ {
            Share::Columns => {
                let columns = share(k, self.n_parts, self.part);
                let shape = [outer, &[columns.len()]].concat();
                let mut cut = |slab: &Slab| {
                    let cut = Cut { tensor: slab.tensor.clone(), columns: columns.clone() };
                    let tensor = cut.name();
                    if !self.cuts.contains(&cut) {
                        self.cuts.push(cut);
                    }
                    Slab { tensor, first_row: slab.first_row }
                };
                let source = match &decl.source {
                    Source::Tensor(tensor) => {
                        Source::Tensor(cut(&Slab { tensor: tensor.clone(), first_row: 0 }).tensor)
                    }
                    Source::Slabs(slabs) => Source::Slabs(slabs.iter().map(cut).collect()),
                };
                WeightDecl { shape, source, is_repacked: true, ..decl }
            }
            Share::Rows if n_stack == 1 => {
                let rows = share(n_rows, self.n_parts, self.part);
                let slab = Slab { tensor: slabs[0].tensor.clone(), first_row: slabs[0].first_row + rows.start };
                WeightDecl { shape: vec![rows.len(), k], source: Source::Slabs(vec![slab]), ..decl }
            }
            Share::Rows => self.stack(decl, slabs, share(n_stack, self.n_parts, self.part)),
            Share::Stack(range) if n_stack == 1 => {
                let slab = Slab { tensor: slabs[0].tensor.clone(), first_row: slabs[0].first_row + range.start };
                WeightDecl { shape: vec![range.len(), k], source: Source::Slabs(vec![slab]), ..decl }
            }
            Share::Stack(range) => self.stack(decl, slabs, range),
        };
        self.new.weights[w.0 as usize] = new;
    }

    fn stack(&self, decl: WeightDecl, slabs: Vec<Slab>, range: Range<usize>) -> WeightDecl {
        let shape = [&[range.len()], &decl.shape[1..]].concat();
        WeightDecl { shape, source: Source::Slabs(slabs[range].to_vec()), ..decl }
    }
}

/// Where each matrix of a weight lies.
fn slabs(decl: &WeightDecl, n_stack: usize, n_rows: usize) -> Vec<Slab> {
    match &decl.source {
        Source::Tensor(tensor) => {
            (0..n_stack).map(|i| Slab { tensor: tensor.clone(), first_row: i * n_rows }).collect()
        }
        Source::Slabs(slabs) => slabs.clone(),
    }
}
