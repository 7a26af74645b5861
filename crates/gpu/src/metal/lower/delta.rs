//! Dispatches of gated delta rules: the convolution and the gates before them, the rule, the norm behind it.

use model::plan::{Buf, DeltaHeads, DeltaRule, Op, Sharing, State, Weight};

use super::super::{fuse, sources, variants};
use super::{Draft, Lower, float, is, unsupported};
use crate::commands::Use;
use crate::commands::node::{Count, Extent, Form, Place, THREADS, When};
use crate::commands::tables::Table;
use backend::CompileError;

/// As TILE of `causal_conv.metal` and `delta_in.metal`: also the maximum width of a convolution less one.
const CONV_TILE: u32 = 32;
/// Simdgroups that take a head with its norm: 256 threads, and four times as many columns for each `fours`.
const NORM_SIMDGROUPS: usize = 8;
/// Numbers of a state that a thread keeps at most, when it takes a head with its norm.
const MAX_KEPT: usize = 64;
/// Numbers of a state that a thread keeps at most, when it takes a head that is one number wide.
const MAX_SCANNED: usize = 64;
/// Numbers of a head that a lane convolves at most.
const MAX_CONVOLVED: usize = 8;

impl Lower<'_> {
    fn state(&self, state: State) -> (Place, Use) {
        (Place::Fixed(self.at.states[state.0 as usize].span), Use::Update)
    }

    /// Numbers of a slot of a state.
    fn slot(&self, state: State) -> usize {
        self.slot_len(self.at.states[state.0 as usize])
    }

    pub(super) fn causal_conv(
        &mut self,
        (x, out): (Buf, Buf),
        (w, bias): (Weight, Option<Weight>),
        silu: bool,
        state: State,
    ) -> Result<(), CompileError> {
        let (d, width) = self.shape(w);
        if !(2..=CONV_TILE as usize + 1).contains(&width) {
            return Err(unsupported(format!("run causal_conv over {width} positions, 2 to {}", CONV_TILE + 1)));
        }
        let draft = Draft::new(sources::CAUSAL_CONV, "causal_conv");
        let draft = bias.into_iter().fold(draft, |draft, bias| draft.bind(6, self.vector(bias)));
        self.push(
            draft
                .define("WIDTH", width)
                .define("BIAS", usize::from(bias.is_some()))
                .define("SILU", usize::from(silu))
                .bind(0, self.buf(x))
                .bind(1, self.vector(w))
                .bind(2, self.state(state))
                .bind(3, self.buf(out))
                .params(4, [d, self.slot(state)].map(is))
                .table(5, Table::Chunks)
                .grid([
                    Extent::Is((d as u32).div_ceil(THREADS)),
                    Extent::Longest { each: 1, per: CONV_TILE },
                    Extent::Chunks,
                ]),
        );
        Ok(())
    }

    pub(super) fn decay_beta(
        &mut self,
        (a, b): (Buf, Option<Buf>),
        (a_log, dt_bias): (Weight, Weight),
        bound: Option<f32>,
        (g, beta): (Buf, Buf),
    ) {
        let draft = Draft::new(sources::DECAY_BETA, "decay_beta");
        let draft = b.into_iter().fold(draft, |draft, b| draft.bind(1, self.buf(b)));
        let draft = draft
            .define("STEP", usize::from(b.is_none()))
            .define("BOUNDED", usize::from(bound.is_some()))
            .bind(0, self.buf(a))
            .bind(2, self.vector(a_log))
            .bind(3, self.vector(dt_bias))
            .bind(4, self.buf(g))
            .bind(5, self.buf(beta));
        let width = self.width(g);
        let words = [is(width), is(width / self.width(beta)), float(bound.unwrap_or(0.0))];
        self.elementwise(draft, 6, self.rows(g), width, &words);
    }

    pub(super) fn delta_net(
        &mut self,
        inputs: [Buf; 5],
        skip: Option<Weight>,
        state: State,
        heads: DeltaHeads,
        out: Buf,
    ) {
        self.delta((inputs, out), state, heads, skip, None);
    }

    /// With the norm of its heads where it has one.
    fn delta(
        &mut self,
        (inputs, out): ([Buf; 5], Buf),
        state: State,
        heads: DeltaHeads,
        skip: Option<Weight>,
        norm: Option<&fuse::DeltaNorm>,
    ) {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule } = heads;
        let by_row = self.width(inputs[3]) != n_v_head;
        let is_scan = (rule, d_v, by_row) == (DeltaRule::Sum, 1, true) && d_k <= MAX_SCANNED;
        // Four columns to a simdgroup, or with a norm all columns to a threadgroup.
        let fours = norm.map_or(1, |_| d_v.div_ceil(4 * NORM_SIMDGROUPS));
        let simdgroups = norm.map_or(2, |_| d_v.div_ceil(4 * fours).max(2));
        let mut draft = match is_scan && !self.at.tuning.is_plain && !self.at.tuning.off.delta {
            true => Draft::new(sources::SCAN, "scan").grid([
                Extent::Is((n_v_head as u32).div_ceil(THREADS)),
                Extent::Is(1),
                Extent::Chunks,
            ]),
            false => Draft::new(sources::DELTA_NET, "delta_net")
                .define("FOURS", fours)
                .define("SIMDGROUPS", simdgroups)
                .define("NORM", usize::from(norm.is_some()))
                .define("SUM", usize::from(rule == DeltaRule::Sum))
                .define("BY_ROW", usize::from(by_row))
                .threads(32 * simdgroups as u32)
                .grid([
                    Extent::Is(d_v.div_ceil(4 * fours * simdgroups) as u32),
                    Extent::Is(n_v_head as u32),
                    Extent::Chunks,
                ]),
        };
        draft = draft.define("D_K", d_k).define("SKIP", usize::from(skip.is_some()));
        for (slot, buf) in (0..).zip(inputs) {
            draft = draft.bind(slot, self.buf_as(buf, Use::Read));
        }
        if let Some(skip) = skip {
            draft = draft.bind(11, self.vector(skip));
        }
        let chunks = if by_row || skip.is_some() { None } else { self.delta_chunks(heads, norm.is_some()) };
        let words = [n_k_head, n_v_head, d_v, usize::from(sharing == Sharing::Tiled), self.slot(state)].map(is);
        let draft = draft.bind(5, self.state(state)).bind(6, self.buf_as(out, Use::Write)).table(8, Table::Chunks);
        let draft = match norm {
            None => draft.params(7, words),
            Some(norm) => draft
                .bind(9, self.buf_as(norm.gate, Use::Read))
                .bind(10, self.vector(norm.w))
                .params(7, words.into_iter().chain([float(norm.eps)])),
        };
        // With drafts a state has to stop amid a tile.
        let has_drafts = |count| When { count, from: 1, to: usize::MAX };
        let by_token =
            Form { when: has_drafts(Count::Drafts), unit: self.unit(&draft), grid: draft.grid, threads: draft.threads };
        let forms = chunks.into_iter().flat_map(|chunks| [by_token, chunks]).collect();
        if self.at.max_draft == 0 {
            return self.push_with(draft, forms);
        }
        self.when = Some(has_drafts(Count::Replays));
        self.push(
            Draft::new(sources::DELTA_REPLAY, "delta_replay")
                .define("D_K", d_k)
                .define("SUM", usize::from(rule == DeltaRule::Sum))
                .define("BY_ROW", usize::from(by_row))
                .bind(0, self.state(state))
                .params(1, words)
                .table(2, Table::Chunks)
                .grid([Extent::Is(d_v.div_ceil(8) as u32), Extent::Is(n_v_head as u32), Extent::Chunks]),
        );
        self.when = None;
        self.push_with(draft, forms);
        self.when = Some(has_drafts(Count::Drafts));
        let mut keep = Draft::new(sources::KEEP_DRAFTS, "keep_drafts").bind(4, self.state(state));
        for (slot, &buf) in (0..).zip(&inputs[1..]) {
            keep = keep.bind(slot, self.buf_as(buf, Use::Read));
        }
        let widths = [1, 2, 3, 4].map(|i| self.width(inputs[i]));
        let view = self.at.states[state.0 as usize];
        self.push(
            keep.params(5, widths.into_iter().chain([self.slot(state), view.n]).map(is)).table(6, Table::Chunks).grid(
                [
                    Extent::Is((view.kept as u32).div_ceil(THREADS)),
                    Extent::Is(self.at.max_draft as u32),
                    Extent::Chunks,
                ],
            ),
        );
        self.when = None;
    }

    /// The form for prompts: many positions at a time.
    fn delta_chunks(&mut self, heads: DeltaHeads, has_norm: bool) -> Option<Form> {
        let tuning = self.at.tuning;
        if heads.rule != DeltaRule::Delta {
            return None;
        }
        let variants::DeltaTile { blocks, simdgroups } =
            variants::delta_tile(heads.d_k, heads.d_v, has_norm).filter(|_| !tuning.is_plain && !tuning.off.delta)?;
        let draft = Draft::new(sources::DELTA_CHUNKS, "delta_chunks")
            .define("D_K", heads.d_k)
            .define("BLOCKS", blocks)
            .define("SIMDGROUPS", simdgroups)
            .define("NORM", usize::from(has_norm));
        let groups = heads.d_v.div_ceil(8 * blocks * simdgroups);
        Some(Form {
            when: When { count: Count::Longest, from: variants::LEAST_ROWS, to: usize::MAX },
            unit: self.unit(&draft),
            grid: [Extent::Is(groups as u32), Extent::Is(heads.n_v_head as u32), Extent::Chunks],
            threads: 32 * simdgroups as u32,
        })
    }

    /// Convolution, heads, their norms and scales, and gates; by themselves where a head is too wide.
    pub(super) fn delta_in(&mut self, run: &fuse::DeltaIn, ops: &[Op]) -> Result<(), CompileError> {
        let (d, width) = self.shape(run.w);
        let [_, _, v] = run.outs.map(|out| self.width(out));
        let n_v_head = self.width(run.g);
        let d_v = v / n_v_head;
        let each = run.d_k.max(d_v).div_ceil(32);
        let is_fit = (2..=CONV_TILE as usize + 1).contains(&width) && v == n_v_head * d_v;
        if !is_fit || each > MAX_CONVOLVED || self.at.tuning.is_plain {
            return self.apart(ops);
        }
        let [(q_eps, q_scale), (k_eps, k_scale)] = run.norms;
        let counts = [d, run.n_k_head, run.d_k, n_v_head, d_v];
        let gates = [self.width(run.a.0), self.width(run.b.0), run.group[0], run.group[1], run.a.1, run.b.1];
        let numbers = [q_eps, q_scale, k_eps, k_scale].map(float).into_iter().chain([is(self.slot(run.state))]);
        let n_heads = 2 * run.n_k_head + n_v_head;
        let mut draft = Draft::new(sources::DELTA_IN, "delta_in")
            .define("WIDTH", width)
            .define("EACH", each)
            .bind(0, self.buf_as(run.x, Use::Read))
            .bind(1, self.vector(run.w))
            .bind(2, self.state(run.state))
            .params(3, counts.into_iter().chain(gates).map(is).chain(numbers))
            .table(4, Table::Chunks);
        for (slot, out) in (5..).zip(run.outs) {
            draft = draft.bind(slot, self.buf_as(out, Use::Write));
        }
        self.push(
            draft
                .bind(8, self.buf_as(run.a.0, Use::Read))
                .bind(9, self.buf_as(run.b.0, Use::Read))
                .bind(10, self.vector(run.a_log))
                .bind(11, self.vector(run.dt_bias))
                .bind(12, self.buf_as(run.g, Use::Write))
                .bind(13, self.buf_as(run.beta, Use::Write))
                // Two heads to a threadgroup, and one threadgroup for the gates.
                .grid([
                    Extent::Is(n_heads.div_ceil(2) as u32 + 1),
                    Extent::Longest { each: 1, per: CONV_TILE },
                    Extent::Chunks,
                ]),
        );
        Ok(())
    }

    /// A delta rule with the norm of its heads; by themselves where a thread would keep too much of a state.
    pub(super) fn delta_norm(&mut self, norm: &fuse::DeltaNorm, ops: &[Op]) -> Result<(), CompileError> {
        let &Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out } = &ops[0] else {
            unreachable!("a norm of a delta rule stands behind it");
        };
        let kept = 4 * heads.d_v.div_ceil(4 * NORM_SIMDGROUPS) * heads.d_k.div_ceil(32);
        if kept > MAX_KEPT || self.at.tuning.is_plain {
            return self.apart(ops);
        }
        self.delta(([q, k, v, g, beta], out), state, heads, skip, Some(norm));
        Ok(())
    }

    /// Ops of a run, each by itself.
    fn apart(&mut self, ops: &[Op]) -> Result<(), CompileError> {
        for op in ops {
            self.op = op.name();
            self.uses_of(std::slice::from_ref(op));
            self.op(op)?;
        }
        Ok(())
    }
}
