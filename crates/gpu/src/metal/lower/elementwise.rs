//! Dispatches of ops that go number by number, and of those that copy rows.

use model::plan::{Buf, GateFactor, Gelu, InputMode, Rows, Weight};

use super::super::sources::{self, Source};
use super::{Draft, Lower, float, is, threads};
use crate::commands::Use;
use crate::commands::node::{Extent, Place, THREADS, Word};
use crate::commands::tables::Table;

impl Lower<'_> {
    /// A thread a number; the number of numbers is the first parameter.
    pub(super) fn elementwise(&mut self, draft: Draft, params_slot: u8, rows: Rows, each: usize, words: &[Word]) {
        let words = [Word::Each(rows, each as u32)].into_iter().chain(words.iter().copied());
        let grid = [threads(rows, each), Extent::Is(1), Extent::Is(1)];
        self.push(draft.params(params_slot, words).grid(grid));
    }

    /// An op on all numbers of a buffer, in place.
    fn in_place(&mut self, draft: Draft, x: Buf, params_slot: u8, words: &[Word]) {
        let draft = draft.bind(0, self.buf_as(x, Use::Update));
        self.elementwise(draft, params_slot, self.rows(x), self.width(x), words);
    }

    pub(super) fn add(&mut self, x: Buf, y: Buf) {
        let draft = Draft::new(sources::ADD, "add").bind(1, self.buf_as(y, Use::Read));
        self.in_place(draft, x, 2, &[]);
    }

    /// Each row and a vector as long as it, or of one number.
    pub(super) fn by_vector(&mut self, source: Source, kernel: &'static str, x: Buf, w: Weight) {
        let d = self.plan.weight(w).n_values();
        let draft = Draft::new(source, kernel).bind(1, self.vector(w));
        self.in_place(draft, x, 2, &[is(d)]);
    }

    pub(super) fn scale(&mut self, x: Buf, scale: f32) {
        self.in_place(Draft::new(sources::SCALE, "scale"), x, 1, &[float(scale)]);
    }

    pub(super) fn softcap(&mut self, x: Buf, cap: f32) {
        self.in_place(Draft::new(sources::SOFTCAP, "softcap"), x, 1, &[float(cap)]);
    }

    pub(super) fn gelu(&mut self, x: Buf, form: Gelu) {
        let draft = Draft::new(sources::GELU, "gelu").define("TANH", usize::from(form == Gelu::Tanh));
        self.in_place(draft, x, 1, &[]);
    }

    pub(super) fn clamp(&mut self, x: Buf, [low, high]: [Weight; 2]) {
        let draft = Draft::new(sources::CLAMP, "clamp_rows").bind(1, self.vector(low)).bind(2, self.vector(high));
        self.in_place(draft, x, 3, &[]);
    }

    pub(super) fn gate_by(&mut self, x: Buf, gate: Buf, factor: GateFactor) {
        let width = self.width(x) / self.width(gate);
        let factor = match factor {
            GateFactor::Sigmoid => 0,
            GateFactor::Softplus => 1,
            GateFactor::Plain => 2,
        };
        let draft = Draft::new(sources::GATE_BY, "gate_by").bind(1, self.buf_as(gate, Use::Read));
        self.in_place(draft, x, 2, &[is(width), is(factor)]);
    }

    pub(super) fn constant(&mut self, d: usize, out: Buf) {
        let known = self.at.constants.iter().find(|(op, _)| *op == self.n_before + self.first);
        let Some(&(_, values)) = known else { unreachable!("memory has a place for the values of each such op") };
        let draft = Draft::new(sources::CONSTANT, "fill_rows").bind(0, (Place::Fixed(values), Use::Read));
        let draft = draft.bind(1, self.buf(out));
        self.elementwise(draft, 2, self.rows(out), d, &[is(d)]);
    }

    /// Rows that the step is given.
    pub(super) fn input(&mut self, x: Buf, first: usize, mode: InputMode) {
        let (d, d_input) = (self.width(x), self.plan.d_input().unwrap_or(0));
        let words = [d, d_input, first, usize::from(mode == InputMode::Add)].map(is);
        self.push(
            Draft::new(sources::INPUT, "input_rows")
                .bind(0, self.buf(x))
                .table(1, Table::GivenRows)
                .table(2, Table::GivenTokens)
                .params(3, [Word::Given(d as u32)].into_iter().chain(words))
                .grid([Extent::Given { each: d as u32, per: THREADS }, Extent::Is(1), Extent::Is(1)]),
        );
    }

    /// Rows that the step returns, each with those that follow it as far as `out` is wider.
    pub(super) fn select(&mut self, x: Buf, out: Buf) {
        let (d, width) = (self.width(x), self.width(out));
        let draft = Draft::new(sources::SELECT, "select_rows").bind(0, self.buf(x)).table(1, Table::Rows);
        let draft = draft.bind(2, self.buf(out));
        self.elementwise(draft, 3, self.rows(out), width, &[is(d), is(width)]);
    }
}
