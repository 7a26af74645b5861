//! Dispatches of products: matrices, gated pairs of them, one a head, those of experts.

use model::plan::{Buf, ExpertBiases, Gate, GateFactor, LinearPart, Norm, Op, Rope, RopePairing, Rows, Weight};

use super::super::{fuse, sources, variants};
use super::{Draft, Lower, MAX_PARTS, activation, float, is, per_row, simdgroups_of};
use crate::commands::node::{Count, Extent, Form, Place, THREADS, When, Word};
use crate::commands::tables::Table;
use crate::commands::{Span, Use};

/// Pairs of a token and a slot, sorted by expert.
struct Groups {
    order: Place,
    tiles: Place,
    slots: Extent,
    n_used: usize,
}

/// All that experts do: the fields of [`model::plan::Op::Experts`].
#[derive(Clone, Copy)]
pub(super) struct Experts {
    pub x: Buf,
    pub ids: Buf,
    pub gate: Weight,
    pub up: Weight,
    pub down: Weight,
    pub biases: Option<ExpertBiases>,
    pub act: Gate,
    pub hidden: Buf,
    pub out: Buf,
}

impl Lower<'_> {
    /// Matrices of one type go together.
    pub(super) fn linear(&mut self, x: Buf, parts: &[LinearPart]) {
        let mut rest: Vec<&LinearPart> = parts.iter().collect();
        while let Some(first) = rest.first() {
            let dtype = self.plan.weight(first.w).dtype;
            let fits = |part: &&LinearPart| self.plan.weight(part.w).dtype == dtype;
            let (same, other): (Vec<&LinearPart>, Vec<&LinearPart>) = rest.into_iter().partition(fits);
            for parts in same.chunks(MAX_PARTS) {
                let parts: Vec<_> = parts.iter().map(|part| (part.w, part.bias, self.buf(part.out))).collect();
                self.products(x, &parts);
            }
            rest = other;
        }
    }

    /// Up to [`MAX_PARTS`] matrices of one type times the rows of `x`, each with its bias and output.
    pub(super) fn products(&mut self, x: Buf, parts: &[(Weight, Option<Weight>, (Place, Use))]) {
        let (_, k) = self.shape(parts[0].0);
        let biases = parts.iter().enumerate().map(|(i, part)| usize::from(part.1.is_some()) << i).sum();
        let longest = parts.iter().map(|part| self.shape(part.0).0).max().unwrap_or(0);
        let shape = variants::Shape { n: longest, ..self.product(parts[0].0) };
        let form = variants::few(shape, self.at.tuning);
        let mut draft = self
            .typed(sources::LINEAR, "linear", parts[0].0)
            .define("N_PARTS", parts.len())
            .define("BIASES", biases)
            .bind(12, self.buf_as(x, Use::Read));
        let (mut widths, mut groups) = ([0; MAX_PARTS], 0);
        for (i, &(w, bias, out)) in parts.iter().enumerate() {
            let (n, _) = self.shape(w);
            draft = draft.planes(3 * i as u8, self.planes(w)).bind(14 + i as u8, out);
            if let Some(bias) = bias {
                draft = draft.bind(18 + i as u8, self.vector(bias));
            }
            widths[i] = n;
            groups += n.div_ceil(2 * form.rows);
        }
        let rows = self.rows(x);
        let words = [k].into_iter().chain(widths).map(is).chain([Word::Each(rows, 1)]);
        let draft = draft.params(13, words);
        let groups_of = |per: usize| parts.iter().map(|part| self.shape(part.0).0.div_ceil(per)).sum();
        let few = groups_of(2 * variants::rows_of_few(form));
        let forms = self.forms(&draft, form, rows, few, groups_of(variants::TILE[0] as usize));
        let grid = [Extent::Is(groups as u32), per_row(rows), Extent::Is(1)];
        self.push_with(draft.define("TILED", 0).define("COLUMNS", 1).form(form).grid(grid), forms);
    }

    /// The forms of a product for more than one row of x: `few` threadgroups where a few rows go together, `tiles` for
    /// each tile's rows of x.
    fn forms(&mut self, draft: &Draft, form: variants::Rows, rows: Rows, few: usize, tiles: usize) -> Vec<Form> {
        if self.at.tuning.is_plain {
            return Vec::new();
        }
        let count = Count::Rows(rows);
        let grid =
            |x: usize, per: usize| [Extent::Is(x as u32), Extent::Of { rows, each: 1, per: per as u32 }, Extent::Is(1)];
        let own = draft.clone().define("TILED", 1);
        let mut forms = vec![Form {
            when: When { count, from: variants::LEAST_ROWS, to: usize::MAX },
            unit: self.unit(&own),
            grid: grid(tiles, variants::TILE[1] as usize),
            threads: variants::TILE_THREADS,
        }];
        if form.is_wide {
            let own = draft.clone().define("TILED", 0).define("COLUMNS", variants::COLUMNS);
            let own = own.define("ROWS", variants::rows_of_few(form)).define("WIDE_X", 1);
            forms.push(Form {
                when: When { count, from: 2, to: variants::LEAST_ROWS },
                unit: self.unit(&own),
                grid: grid(few, variants::COLUMNS),
                threads: THREADS,
            });
        }
        forms
    }

    /// The part of scratch `i` that has a number for each of `out`.
    pub(super) fn scratch(&self, i: usize, out: Buf, used: Use) -> (Place, Use) {
        match self.at.apart.map(|spans| spans[i]) {
            Some(span) => (Place::Rows(span, self.rows(out), 4 * self.width(out) as u64), used),
            None => unreachable!("scratch is laid out where gate and up differ"),
        }
    }

    pub(super) fn gated_linear(&mut self, x: Buf, gate: Weight, up: Weight, act: Gate, out: Buf) {
        if self.plan.weight(gate).dtype != self.plan.weight(up).dtype {
            self.products(x, &[(gate, None, self.scratch(0, out, Use::Write))]);
            self.products(x, &[(up, None, self.scratch(1, out, Use::Write))]);
            return self.gated_act(self.scratch(0, out, Use::Read), self.scratch(1, out, Use::Read), act, out);
        }
        let ((n, k), form, rows) = (self.shape(gate), self.form(gate), self.rows(x));
        let (kind, numbers) = activation(act);
        let draft = self
            .typed(sources::GATED_LINEAR, "gated_linear", gate)
            .define("ACT", kind)
            .planes(0, self.planes(gate))
            .planes(3, self.planes(up))
            .bind(6, self.buf_as(x, Use::Read))
            .bind(7, self.buf_as(out, Use::Write))
            .params(8, [is(n), is(k), Word::Each(rows, 1)].into_iter().chain(numbers));
        let few = n.div_ceil(2 * variants::rows_of_few(form));
        let forms = self.forms(&draft, form, rows, few, n.div_ceil(variants::GATED_TILE as usize));
        let grid = [simdgroups_of(n, form), per_row(rows), Extent::Is(1)];
        self.push_with(draft.define("TILED", 0).define("COLUMNS", 1).form(form).grid(grid), forms);
    }

    pub(super) fn gated_act(&mut self, gate: (Place, Use), up: (Place, Use), act: Gate, out: Buf) {
        let (kind, numbers) = activation(act);
        let draft = Draft::new(sources::GATED_ACT, "gated_act").define("ACT", kind);
        let draft = draft.bind(0, gate).bind(1, up).bind(2, self.buf_as(out, Use::Write));
        self.elementwise(draft, 3, self.rows(out), self.width(out), &numbers);
    }

    /// A matrix a head. With `pairs`, each head of `x` has numbers behind those that are multiplied, of which so many
    /// pairs are rotated, and each head of `out` has room for them: `turned` is their number and the rotary embedding.
    pub(super) fn head_linear(&mut self, x: Buf, w: Weight, transposed: bool, out: Buf, turned: Option<(usize, Rope)>) {
        let (first, second) = self.shape(w);
        let (n, k) = if transposed { (second, first) } else { (first, second) };
        let more = turned.map_or(0, |turned| turned.0);
        let n_head = self.width(out) / (n + more);
        let kernel = if transposed { "head_linear_t" } else { "head_linear" };
        // Units have 16 numbers or more, and a threadgroup takes 16 of them.
        let groups = if transposed { n.div_ceil(256) } else { n.div_ceil(2) } + usize::from(more > 0);
        let mut draft = self
            .typed(sources::HEAD_LINEAR, kernel, w)
            .define("TRANSPOSED", usize::from(transposed))
            .define("TURNED", more)
            .planes(0, self.planes(w))
            .bind(3, self.buf_as(x, Use::Read))
            .bind(4, self.buf_as(out, Use::Write))
            .grid([Extent::Is(groups as u32), Extent::Is(n_head as u32), per_row(self.rows(x))]);
        let mut words = [n, k, n_head, 0, 0];
        if let Some((_, rope)) = turned {
            let decl = self.plan.rope(rope);
            words[3] = decl.inv_freq.len();
            words[4] = usize::from(decl.pairing == RopePairing::Interleaved);
            draft = draft.table(6, Table::Angles(rope.0 as usize));
        }
        self.push(draft.params(5, words.map(is)));
    }

    /// All that experts do; their sum instead of their outputs where `sum` is the op behind them. Few tokens take each
    /// pair of a token and an expert by itself, many sort them by expert.
    pub(super) fn experts(&mut self, op: &Experts, sum: Option<&fuse::Sum>) {
        let n_expert = self.plan.weight(op.gate).shape[0];
        let from = variants::least_grouped(n_expert, self.width(op.ids));
        let count = Count::Rows(self.rows(op.ids));
        if let Some(groups) = self.sorted() {
            self.when = Some(When { count, from, to: usize::MAX });
            self.experts_grouped(op, sum, groups);
            self.when = Some(When { count, from: 0, to: from });
        }
        self.experts_by_pair(op, sum, None);
        self.when = None;
    }

    /// Scratch for experts in tiles, where those are used.
    fn sorted(&self) -> Option<[Span; 2]> {
        self.at.groups.filter(|_| !self.at.tuning.is_plain && !self.at.tuning.off.experts)
    }

    /// Experts with their sum, and with one beside them that every token takes. For one row that is computed with them;
    /// for more its matrices are read once for all rows.
    pub(super) fn mixture(&mut self, mixture: &fuse::Mixture, ops: &[Op]) {
        let Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } = ops[0] else {
            unreachable!("a mixture begins with its experts");
        };
        let op = Experts { x, ids, gate, up, down, biases, act, hidden, out };
        let Some(shared) = mixture.shared else { return self.experts(&op, Some(&mixture.sum)) };
        let fuse::Sum { x: sum, norm, .. } = mixture.sum;
        let types = |weights: [Weight; 3]| weights.map(|w| self.plan.weight(w).dtype);
        let is_wide = |w: Weight| self.shape(w).1.is_multiple_of(16);
        let is_alike = types([gate, up, down]) == types([shared.gate, shared.up, shared.down])
            && types([gate; 3])[0] == types([up; 3])[0]
            && is_wide(down) == is_wide(shared.down)
            && biases.is_none()
            && act == shared.act;
        let count = Count::Rows(self.rows(ids));
        let from = if is_alike { 2 } else { 0 };
        if is_alike {
            self.when = Some(When { count, from: 0, to: 2 });
            self.experts_by_pair(&op, Some(&mixture.sum), Some(&shared));
            self.when = Some(When { count, from: 2, to: usize::MAX });
        }
        self.op = "shared expert";
        self.uses.insert(shared.hidden, Use::Write);
        self.gated_linear(x, shared.gate, shared.up, shared.act, shared.hidden);
        self.uses.insert(shared.out, Use::Write);
        self.products(shared.hidden, &[(shared.down, None, self.buf_as(shared.out, Use::Write))]);
        if let Some(share) = shared.share {
            self.gate_by(shared.out, share, GateFactor::Sigmoid);
        }
        if shared.is_first {
            self.add(sum, shared.out);
        }
        self.op = ops[0].name();
        let least = variants::least_grouped(self.plan.weight(gate).shape[0], self.width(ids)).max(from);
        let sum_alone = fuse::Sum { norm: norm.filter(|_| shared.is_first), ..mixture.sum };
        self.when = Some(When { count, from, to: usize::MAX });
        if let Some(groups) = self.sorted() {
            self.when = Some(When { count, from: least, to: usize::MAX });
            self.experts_grouped(&op, Some(&sum_alone), groups);
            self.when = Some(When { count, from, to: least });
        }
        self.experts_by_pair(&op, Some(&sum_alone), None);
        self.when = (from > 0).then_some(When { count, from, to: usize::MAX });
        if let (false, Some(Norm { w, eps, out })) = (shared.is_first, norm) {
            self.uses.insert(sum, Use::Update);
            self.uses.insert(out, Use::Write);
            self.uses.insert(shared.out, Use::Read);
            self.rms_norm(sum, Some(shared.out), w, eps, out);
        }
        self.when = None;
    }

    /// The chosen experts of many tokens: pairs sorted by expert, products in tiles of one expert's pairs, the sum.
    fn experts_grouped(&mut self, op: &Experts, sum: Option<&fuse::Sum>, [order, tiles]: [Span; 2]) {
        let Experts { x, ids, gate, up, down, biases, act, hidden, out } = *op;
        let (rows, n_used, n_expert) = (self.rows(ids), self.width(ids), self.plan.weight(gate).shape[0]);
        let slots = Extent::Tiles { rows, each: n_used as u32, kinds: n_expert as u32 };
        let order = Place::Rows(order, rows, 4 * n_used as u64);
        let groups = Groups { order, tiles: Place::Sized(tiles, slots, 12), slots, n_used };
        self.push(
            Draft::new(sources::EXPERT_GROUPS, "expert_groups")
                .bind(0, self.buf_as(ids, Use::Read))
                .bind(1, (groups.order, Use::Write))
                .bind(2, (groups.tiles, Use::Write))
                .params(3, [Word::Each(rows, n_used as u32)])
                .grid([Extent::Is(n_expert as u32), Extent::Is(1), Extent::Is(1)]),
        );
        let [gate_bias, up_bias, down_bias] = biases.map_or([None; 3], |b| [Some(b.gate), Some(b.up), Some(b.down)]);
        let x = self.buf_as(x, Use::Read);
        if self.plan.weight(gate).dtype == self.plan.weight(up).dtype {
            let pair = [(gate, gate_bias), (up, up_bias)];
            self.expert_tiles(&groups, x, false, &pair, Some(act), self.buf_as(hidden, Use::Write));
        } else {
            self.expert_tiles(&groups, x, false, &[(gate, gate_bias)], None, self.scratch(0, hidden, Use::Write));
            self.expert_tiles(&groups, x, false, &[(up, up_bias)], None, self.scratch(1, hidden, Use::Write));
            self.gated_act(self.scratch(0, hidden, Use::Read), self.scratch(1, hidden, Use::Read), act, hidden);
        }
        let from = self.buf_as(hidden, Use::Read);
        self.expert_tiles(&groups, from, true, &[(down, down_bias)], None, self.buf_as(out, Use::Write));
        if let Some(&fuse::Sum { x, add, weights, norm }) = sum {
            self.uses.extend([(x, if add { Use::Update } else { Use::Write }), (out, Use::Read), (weights, Use::Read)]);
            self.uses.extend(norm.map(|norm| (norm.out, Use::Write)));
            self.combine(x, add, out, weights, norm);
        }
    }

    /// Products of sorted pairs with one matrix of each expert, or with two that an activation joins.
    fn expert_tiles(
        &mut self,
        groups: &Groups,
        x: (Place, Use),
        x_per_slot: bool,
        parts: &[(Weight, Option<Weight>)],
        act: Option<Gate>,
        out: (Place, Use),
    ) {
        let (n, k) = self.shape(parts[0].0);
        let (kind, numbers) = activation(act.unwrap_or(Gate::Silu));
        let per = if act.is_some() { variants::GATED_TILE } else { variants::TILE[0] };
        let mut draft = self
            .typed(sources::EXPERT_TILES, "expert_tiles", parts[0].0)
            .define("GATED", usize::from(act.is_some()))
            .define("ACT", kind)
            .define("BIAS", usize::from(parts[0].1.is_some()))
            .bind(6, x)
            .bind(7, (groups.order, Use::Read))
            .bind(8, (groups.tiles, Use::Read))
            .bind(9, out)
            .params(10, [n, k, groups.n_used, usize::from(x_per_slot)].into_iter().map(is).chain(numbers))
            .grid([Extent::Is((n as u32).div_ceil(per)), groups.slots, Extent::Is(1)])
            .threads(variants::TILE_THREADS);
        for (i, &(w, bias)) in (0..).zip(parts) {
            draft = draft.planes(3 * i, self.planes(w));
            if let Some(bias) = bias {
                draft = draft.bind(11 + i, self.vector(bias));
            }
        }
        let draft = draft.share(groups.n_used, self.plan.weight(parts[0].0).shape[0]);
        self.push(draft);
    }

    /// The chosen experts of few tokens, a pair at a time.
    fn experts_by_pair(&mut self, op: &Experts, sum: Option<&fuse::Sum>, shared: Option<&fuse::Shared>) {
        let Experts { x, ids, gate, up, down, biases, act, hidden, out } = *op;
        let x_place = self.buf_as(x, Use::Read);
        let [gate_bias, up_bias, down_bias] = biases.map_or([None; 3], |b| [Some(b.gate), Some(b.up), Some(b.down)]);
        if self.plan.weight(gate).dtype == self.plan.weight(up).dtype {
            let ((n, k), form) = (self.shape(gate), self.form(gate));
            let (kind, numbers) = activation(act);
            let mut draft = self
                .typed(sources::EXPERTS, "experts_gated", gate)
                .form(form)
                .define("FORM", 1)
                .define("SHARED", usize::from(shared.is_some()))
                .define("ACT", kind)
                .define("BIAS", usize::from(gate_bias.is_some()))
                .planes(0, self.planes(gate))
                .planes(3, self.planes(up))
                .share(self.width(ids), self.plan.weight(gate).shape[0])
                .bind(6, x_place)
                .bind(7, self.buf_as(ids, Use::Read))
                .bind(8, self.buf_as(hidden, Use::Write))
                .grid([simdgroups_of(n, form), Extent::Is(self.width(ids) as u32), per_row(self.rows(x))]);
            let words = [n, k, self.width(ids), 0].into_iter().map(is).chain(numbers);
            draft = match shared {
                None => draft.params(9, words),
                Some(shared) => {
                    // It takes as many slots more as cover its rows.
                    let (n_shared, _) = self.shape(shared.gate);
                    let slots = self.width(ids) + n_shared.div_ceil(n.next_multiple_of(2 * form.rows));
                    draft
                        .planes(12, self.planes(shared.gate))
                        .planes(15, self.planes(shared.up))
                        .bind(18, self.buf_as(shared.hidden, Use::Write))
                        .params(9, words.chain([is(n_shared)]))
                        .grid([simdgroups_of(n, form), Extent::Is(slots as u32), per_row(self.rows(x))])
                }
            };
            if let (Some(gate_bias), Some(up_bias)) = (gate_bias, up_bias) {
                draft = draft.bind(10, self.vector(gate_bias)).bind(11, self.vector(up_bias));
            }
            self.push(draft);
        } else {
            self.chosen(x_place, false, x, ids, gate, gate_bias, self.scratch(0, hidden, Use::Write));
            self.chosen(x_place, false, x, ids, up, up_bias, self.scratch(1, hidden, Use::Write));
            self.gated_act(self.scratch(0, hidden, Use::Read), self.scratch(1, hidden, Use::Read), act, hidden);
        }
        match sum {
            Some(sum) => self.experts_sum(hidden, ids, down, down_bias, sum, shared),
            None => {
                let out = self.buf_as(out, Use::Write);
                self.chosen(self.buf_as(hidden, Use::Read), true, x, ids, down, down_bias, out);
            }
        }
    }

    /// The last product of the chosen experts, weighted and added up.
    fn experts_sum(
        &mut self,
        hidden: Buf,
        ids: Buf,
        w: Weight,
        bias: Option<Weight>,
        sum: &fuse::Sum,
        shared: Option<&fuse::Shared>,
    ) {
        let ((n, k), n_used, form) = (self.shape(w), self.width(ids), self.form(w));
        let used = if sum.add { Use::Update } else { Use::Write };
        let mut draft = self
            .typed(sources::EXPERTS, "experts_sum", w)
            .form(form)
            .define("FORM", 2)
            .define("SHARED", shared.map_or(0, |shared| if shared.is_first { 1 } else { 2 }))
            .define("SHARE", usize::from(shared.is_some_and(|shared| shared.share.is_some())))
            .define("ADD", usize::from(sum.add))
            .define("BIAS", usize::from(bias.is_some()))
            .planes(0, self.planes(w))
            .share(n_used, self.plan.weight(w).shape[0])
            .bind(3, self.buf_as(hidden, Use::Read))
            .bind(4, self.buf_as(ids, Use::Read))
            .bind(5, self.buf_as(sum.x, used))
            .bind(8, self.buf_as(sum.weights, Use::Read))
            .grid([simdgroups_of(n, form), per_row(self.rows(sum.x)), Extent::Is(1)]);
        let words = [n, k, n_used, 1].into_iter().map(is).chain([float(0.0); 2]);
        draft = match shared {
            None => draft.params(6, words),
            Some(shared) => {
                let (_, k_shared) = self.shape(shared.down);
                let draft = draft.planes(9, self.planes(shared.down)).bind(12, self.buf_as(shared.hidden, Use::Read));
                let draft = draft.params(6, words.chain([is(k_shared)]));
                shared.share.into_iter().fold(draft, |draft, share| draft.bind(13, self.buf_as(share, Use::Read)))
            }
        };
        if let Some(bias) = bias {
            draft = draft.bind(7, self.vector(bias));
        }
        self.push(draft);
        if let Some(Norm { w, eps, out }) = sum.norm {
            self.uses.insert(sum.x, Use::Read);
            self.uses.insert(out, Use::Write);
            self.rms_norm(sum.x, None, w, eps, out);
        }
    }

    /// One matrix of each chosen expert, times its token's row or its slot's own.
    pub(super) fn chosen(
        &mut self,
        from: (Place, Use),
        x_per_slot: bool,
        x: Buf,
        ids: Buf,
        w: Weight,
        bias: Option<Weight>,
        out: (Place, Use),
    ) {
        let ((n, k), form) = (self.shape(w), self.form(w));
        let n_used = self.width(ids);
        let mut draft = self
            .typed(sources::EXPERTS, "experts", w)
            .form(form)
            .define("FORM", 0)
            .define("BIAS", usize::from(bias.is_some()))
            .planes(0, self.planes(w))
            .share(n_used, self.plan.weight(w).shape[0])
            .bind(3, from)
            .bind(4, self.buf_as(ids, Use::Read))
            .bind(5, out)
            .params(6, [n, k, n_used, usize::from(x_per_slot)].into_iter().map(is).chain([float(0.0); 2]))
            .grid([simdgroups_of(n, form), Extent::Is(n_used as u32), per_row(self.rows(x))]);
        if let Some(bias) = bias {
            draft = draft.bind(7, self.vector(bias));
        }
        self.push(draft);
    }

    pub(super) fn combine(&mut self, x: Buf, add: bool, y: Buf, weights: Buf, norm: Option<Norm>) {
        let mut draft = Draft::new(sources::COMBINE, "combine")
            .define("ADD", usize::from(add))
            .define("NORM", usize::from(norm.is_some()))
            .bind(0, self.buf(x))
            .bind(1, self.buf(y))
            .bind(2, self.buf(weights))
            .params(3, [is(self.width(x)), is(self.width(weights)), float(norm.map_or(0.0, |norm| norm.eps))])
            .grid([per_row(self.rows(x)), Extent::Is(1), Extent::Is(1)]);
        if let Some(norm) = norm {
            draft = draft.bind(4, self.vector(norm.w)).bind(5, self.buf(norm.out));
        }
        self.push(draft);
    }
}
