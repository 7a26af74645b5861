//! A case: one op in a plan of its own, its inputs and the steps that are run.
//!
//! A plan needs no other entry than its embedding: the rows of an f32 table are random inputs side by side, one token
//! id a row, and `split_heads` takes them apart. The op follows, and `join_heads` and `select` make its outputs the
//! logits.

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::*;
use quant::WeightType;

use conformance::{Maker, Random};

/// One op in one shape.
pub struct Case {
    /// Name of the op.
    pub op: &'static str,
    /// What differs from other cases of the op.
    pub shape: String,
    /// Type of the matrices that the op multiplies with; F32 where it has none.
    pub dtype: WeightType,
    /// Its matrices are only read, or meet activations in f32: the tolerance is that of ops without matrices.
    pub plain: bool,
    pub model: (Plan, Arc<Checkpoint>),
    /// Outputs and their widths, in the order in which they lie in a row of logits.
    pub outs: Vec<(String, usize)>,
    pub script: Vec<Step>,
    /// How often the tolerance of the type is taken: more than 1 where products follow each other.
    pub slack: f64,
}

/// One step of a case.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Copies the recurrent state between slots before the step.
    pub copies: Vec<(u32, u32)>,
    /// Moves a sequence to a position before the step.
    pub jump: Vec<(usize, usize)>,
    /// Gives a sequence another slot before the step.
    pub slots: Vec<(usize, u32)>,
    /// Sequence and tokens of each chunk.
    pub parts: Vec<(usize, Vec<u32>)>,
    /// Asks for the logits of each token whose distance from the last one is a multiple of this.
    pub every: usize,
    /// Run by backends too that have time for the first steps alone; it needs no step before it.
    pub is_chosen: bool,
}

/// How the numbers of an input are drawn.
#[derive(Clone, Copy)]
pub enum Fill {
    /// Uniform in -s..s.
    Uniform(f32),
    /// In 0..1, some of them 0 and some 1: gates.
    Gate,
    /// Keys: every so many numbers have length 1.
    Unit(usize),
    /// Multiples of a half in -2..2: routers with ties.
    Ties,
}

/// Rows at the end of the table that hold more than numbers of common size.
pub const N_SPECIAL: usize = 6;

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    AllNan,
    OneNan,
    Infinities,
    Zero,
    /// 1e5 times the common size: past the largest f16.
    Huge,
    /// 1e-7 times the common size.
    Tiny,
}

impl Special {
    const ALL: [Special; N_SPECIAL] =
        [Self::AllNan, Self::OneNan, Self::Infinities, Self::Zero, Self::Huge, Self::Tiny];

    fn apply(self, row: &mut [f32]) {
        let at = row.len() / 2;
        match self {
            Special::AllNan => row.fill(f32::NAN),
            Special::OneNan => row[at] = f32::NAN,
            Special::Infinities => {
                row.iter_mut().step_by(5).for_each(|x| *x = f32::INFINITY);
                row.iter_mut().skip(2).step_by(5).for_each(|x| *x = f32::NEG_INFINITY);
            }
            Special::Zero => row.fill(0.0),
            Special::Huge => row.iter_mut().for_each(|x| *x *= 1e5),
            Special::Tiny => row.iter_mut().for_each(|x| *x *= 1e-7),
        }
    }
}

/// Writes a case.
pub struct Build {
    pub m: Maker,
    inputs: Vec<(usize, Fill, Buf)>,
}

/// Width of the input that only fills rows up.
const PAD: usize = 5;
/// Least rows of the table.
const LEAST_VOCAB: usize = 48;

impl Build {
    pub fn new(seed: u64) -> Build {
        let plan = Plan::new("one op", 1, 1, 1 << 20);
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut build = Build { m: Maker { plan, tensors: Vec::new(), random }, inputs: Vec::new() };
        build.input(PAD, Fill::Uniform(1.0));
        build
    }

    /// A case of `embed`: the table itself is of the type under test, and its rows are all that the plan reads.
    pub fn table(seed: u64, t: WeightType, d: usize, scale: f32) -> Case {
        let mut b = Build::new(seed);
        b.m.plan.ops.clear();
        let n = LEAST_VOCAB.div_ceil(d);
        let out = b.m.buf(Rows::Tokens, d);
        let joined = b.m.buf(Rows::Tokens, n * d);
        let logits = b.m.buf(Rows::Outputs, n * d);
        let table = b.m.weight(&[n * d, d], t);
        b.op(Op::Embed { table, scale, out });
        b.op(Op::JoinHeads { parts: vec![(d, out); n], n_head: 1, out: joined });
        b.op(Op::Select { x: joined, out: logits });
        (b.m.plan.n_vocab, b.m.plan.d_model, b.m.plan.logits) = (n * d, d, logits);
        let script = Tokens { random: Random(seed), n_vocab: n * d + N_SPECIAL }.counts();
        let shape = format!("d {d}, scale {scale}");
        Case {
            op: "embed",
            shape,
            dtype: t,
            plain: true,
            model: b.m.finish(false),
            outs: vec![("out".into(), n * d)],
            script,
            slack: 1.0,
        }
    }

    /// A random input `[T, width]`.
    pub fn input(&mut self, width: usize, fill: Fill) -> Buf {
        let buf = self.m.buf(Rows::Tokens, width);
        self.inputs.push((width, fill, buf));
        buf
    }

    /// An input with a row for each token or each asked row.
    pub fn rows(&mut self, rows: Rows, width: usize, fill: Fill) -> Buf {
        let x = self.input(width, fill);
        if rows == Rows::Tokens {
            return x;
        }
        let out = self.m.buf(rows, width);
        self.m.op(Op::Select { x, out });
        out
    }

    pub fn op(&mut self, op: Op) {
        self.m.op(op);
    }

    pub fn weight(&mut self, shape: &[usize], dtype: WeightType) -> Weight {
        self.m.weight(shape, dtype)
    }

    /// A small vector whose type goes round with its place in the plan: f32, f16, bf16.
    pub fn vector(&mut self, n: usize) -> Weight {
        self.numbers(&[n])
    }

    pub fn numbers(&mut self, shape: &[usize]) -> Weight {
        let types = [WeightType::F32, WeightType::BF16, WeightType::F16];
        self.weight(shape, types[self.m.plan.weights.len() % 3])
    }

    pub fn buf(&mut self, rows: Rows, width: usize) -> Buf {
        self.m.buf(rows, width)
    }

    pub fn cache(&mut self, decl: CacheDecl) -> Cache {
        self.m.plan.caches.push(decl);
        Cache(self.m.plan.caches.len() as u32 - 1)
    }

    pub fn state(&mut self, what: &'static str, n: usize) -> State {
        self.m.plan.states.push(StateDecl { what, n });
        State(self.m.plan.states.len() as u32 - 1)
    }

    pub fn rope(&mut self, decl: RopeDecl) -> Rope {
        self.m.plan.ropes.push(decl);
        Rope(self.m.plan.ropes.len() as u32 - 1)
    }

    /// The case whose logits are these buffers, named, and as much of the filling input as the table needs rows.
    pub fn finish(
        mut self,
        op: &'static str,
        shape: impl Into<String>,
        dtype: WeightType,
        outs: &[(&str, Buf)],
        script: impl FnOnce(&mut Tokens) -> Vec<Step>,
    ) -> Case {
        let m = &mut self.m;
        let width = |m: &Maker, outs: &[(&str, Buf)]| outs.iter().map(|&(_, out)| m.plan.buf(out).width).sum::<usize>();
        let missing = LEAST_VOCAB.saturating_sub(width(m, outs)).div_ceil(PAD).max(1);
        let pads = vec![("filling", self.inputs[0].2); missing];
        let outs = [outs, &pads].concat();
        let of = |rows| -> Vec<(&str, Buf)> {
            outs.iter().copied().filter(|&(_, out)| m.plan.buf(out).rows == rows).collect()
        };
        let (tokens, mut asked) = (of(Rows::Tokens), of(Rows::Outputs));
        assert_eq!(tokens.len() + asked.len(), outs.len(), "outputs have rows of tokens or asked rows");
        let order: Vec<(&str, Buf)> = asked.iter().chain(&tokens).copied().collect();
        let joined = join(m, Rows::Tokens, &tokens);
        let selected = m.buf(Rows::Outputs, width(m, &tokens));
        m.op(Op::Select { x: joined, out: selected });
        asked.push(("", selected));
        m.plan.logits = join(m, Rows::Outputs, &asked);
        let n_vocab = m.plan.buf(m.plan.logits).width;
        let outs = order.iter().map(|&(name, out)| (name.to_string(), m.plan.buf(out).width)).collect();
        self.embed(n_vocab);
        let mut tokens = Tokens { random: Random(self.m.random.0 ^ 0x5555), n_vocab };
        let script = script(&mut tokens);
        Case { op, shape: shape.into(), dtype, plain: false, model: self.m.finish(false), outs, script, slack: 1.0 }
    }

    /// Puts the table and what takes its rows apart in front.
    fn embed(&mut self, n_vocab: usize) {
        let (m, inputs) = (&mut self.m, &self.inputs);
        let d_model = inputs.iter().map(|input| input.0).sum();
        (m.plan.n_vocab, m.plan.d_model) = (n_vocab, d_model);
        let table = m.weight_of(&[n_vocab, d_model], WeightType::F32, |random, i| {
            let mut row: Vec<f32> = inputs.iter().flat_map(|&(width, fill, _)| draw(random, width, fill)).collect();
            if let Some(special) = (i + N_SPECIAL).checked_sub(n_vocab) {
                let mut at = 0;
                for &(width, ..) in inputs {
                    Special::ALL[special].apply(&mut row[at..at + width]);
                    at += width;
                }
            }
            row
        });
        let out = m.buf(Rows::Tokens, d_model);
        let parts = inputs.iter().map(|&(width, _, buf)| (width, buf)).collect();
        m.plan.ops.splice(0..0, [Op::Embed { table, scale: 1.0, out }, Op::SplitHeads { x: out, n_head: 1, parts }]);
        m.plan.layers.splice(0..0, [None, None]);
    }
}

fn join(m: &mut Maker, rows: Rows, parts: &[(&str, Buf)]) -> Buf {
    let parts: Vec<(usize, Buf)> = parts.iter().map(|&(_, buf)| (m.plan.buf(buf).width, buf)).collect();
    let out = m.buf(rows, parts.iter().map(|part| part.0).sum());
    m.op(Op::JoinHeads { parts, n_head: 1, out });
    out
}

fn draw(random: &mut Random, width: usize, fill: Fill) -> Vec<f32> {
    let mut x: Vec<f32> = (0..width).map(|_| random.float()).collect();
    match fill {
        Fill::Uniform(size) => x.iter_mut().for_each(|x| *x *= size),
        Fill::Gate => x.iter_mut().for_each(|x| {
            *x = match *x {
                x if x < -0.8 => 0.0,
                x if x > 0.8 => 1.0,
                x => 0.5 + 0.5 * x,
            }
        }),
        Fill::Unit(len) => {
            for head in x.chunks_mut(len) {
                let norm = head.iter().map(|x| x * x).sum::<f32>().sqrt();
                head.iter_mut().for_each(|x| *x /= norm);
            }
        }
        Fill::Ties => x.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 2.0),
    }
    x
}

/// Tokens per step in which every op is run; those that are no multiple of any tile, and those around 8 and 32.
pub const COUNTS: [usize; 9] = [1, 2, 3, 7, 8, 9, 31, 33, 127];

/// Draws token ids.
pub struct Tokens {
    random: Random,
    n_vocab: usize,
}

impl Tokens {
    /// Ids of common rows.
    pub fn common(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| (self.random.bits() % (self.n_vocab - N_SPECIAL) as u64) as u32).collect()
    }

    /// The id of a special row.
    pub fn special(&self, special: Special) -> u32 {
        let at = Special::ALL.iter().position(|&s| s == special).unwrap();
        (self.n_vocab - N_SPECIAL + at) as u32
    }

    /// A step of chunks, whose tokens are common.
    pub fn step(&mut self, parts: &[(usize, usize)], every: usize) -> Step {
        let parts = parts.iter().map(|&(s, n)| (s, self.common(n))).collect();
        Step { parts, every, ..Step::default() }
    }

    /// A step of `n` tokens of up to three sequences.
    fn spread(&mut self, n: usize, every: usize) -> Step {
        let (a, b) = (n / 2, n / 3);
        let parts: Vec<(usize, usize)> =
            [(1, n - a - b), (0, a), (2, b)].into_iter().filter(|part| part.1 > 0).collect();
        self.step(&parts, every)
    }

    /// Every count of tokens once, with all, some and one of the rows asked for.
    pub fn counts(&mut self) -> Vec<Step> {
        let every = [1, 2, 1, 3, 1, 200, 1, 2, 4];
        COUNTS.iter().zip(every).map(|(&n, every)| self.spread(n, every)).collect()
    }

    /// Few counts, for ops that take long.
    pub fn few(&mut self) -> Vec<Step> {
        [(1, 1), (9, 1), (2, 1), (33, 2)].map(|(n, every)| self.spread(n, every)).into()
    }

    /// Special rows among common ones, each in a sequence that is not looked at any more; then three to a step, for
    /// backends with little time.
    pub fn specials(&mut self, specials: &[Special]) -> Vec<Step> {
        let mut steps = Vec::new();
        for &special in specials {
            for n in [1, 4, 11] {
                let mut step = self.step(&[(0, n), (1, n), (2, 2)], 1);
                step.parts[1].1[n / 2] = self.special(special);
                step.jump = vec![(0, 0), (1, 0), (2, 0)];
                steps.push(step);
            }
        }
        for some in specials.chunks(3) {
            let lens = [11, 4, 1];
            let parts: Vec<(usize, usize)> = (0..some.len()).map(|i| (i, lens[i])).collect();
            let mut step = self.step(&parts, 1);
            for (i, &special) in some.iter().enumerate() {
                step.parts[i].1[lens[i] / 2] = self.special(special);
            }
            steps.push(Step { jump: vec![(0, 0), (1, 0), (2, 0)], is_chosen: true, ..step });
        }
        steps
    }

    /// Sequences that grow in chunks and token by token beside each other, over several pages.
    pub fn grow(&mut self) -> Vec<Step> {
        let steps: [&[(usize, usize)]; 9] = [
            &[(0, 31), (1, 1)],
            &[(0, 1), (1, 33), (2, 7)],
            &[(2, 1), (0, 2)],
            &[(1, 63), (2, 3)],
            &[(0, 1), (1, 1), (2, 1)],
            &[(0, 9), (2, 8)],
            &[(2, 40), (1, 2)],
            &[(1, 1)],
            &[(0, 1), (1, 1), (2, 1)],
        ];
        steps.iter().enumerate().map(|(i, parts)| self.step(parts, if i % 3 == 1 { 2 } else { 1 })).collect()
    }
}

/// All special rows.
pub const SPECIALS: [Special; N_SPECIAL] = Special::ALL;
