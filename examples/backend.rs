//! A backend of three ops, all that the contract requires: `cargo run --release --example backend`.
//!
//! A [`Backend`] compiles a plan into a [`Program`], which computes one step at a time. This one decodes the weights to
//! f32 when it compiles, computes each op with plain loops, and refuses by name the ops that it does not know. The tests
//! of every backend (`crates/conformance`) include this file and compare it with the reference.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use backend::footprint::{Footprint, Part};
use backend::reference::Reference;
use backend::residency::Residency;
use backend::{
    Backend, Batch, CompileError, Drafts, Kinds, Limits, Output, Picks, Profile, Program, RouterInfo, Save, StepError,
    StreamStats, SumInputs, Tables,
};
use checkpoint::Checkpoint;
use checkpoint::gguf::Writer;
use model::plan::{Buf, BufDecl, Elem, LinearPart, Op, Plan, Read, Rows, Source, ValidPlan, Weight, WeightDecl};
use quant::WeightType;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (plan, weights) = small_model(false);
    let mut batch = Batch::default();
    batch.push(&[3, 49, 0], 0, Tables { pages: &[2], ..Tables::default() }, [2]);

    let mut rows = Vec::new();
    for backend in [&Lookup as &dyn Backend, &Reference] {
        let plan = backend.lower(plan.clone())?;
        println!("{} requires {} bytes", backend.name(), backend.footprint(&plan, LIMITS).total());
        let mut program = backend.compile(&plan, weights.clone(), LIMITS)?;
        rows.push(program.step(&batch)?.logits.to_vec());
    }
    if rows[0] != rows[1] {
        return Err("the logits differ from those of the reference".into());
    }
    println!("{} logits equal those of the reference", rows[0].len());

    let (plan, weights) = small_model(true);
    match Lookup.compile(&plan, weights, LIMITS) {
        Err(error @ CompileError::Unsupported { .. }) => println!("another model is refused: {error}"),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("a model with an unknown op was compiled".into()),
    }
    Ok(())
}

/// Embeddings, the asked rows, and products without a bias.
pub struct Lookup;

/// A step of the compiled plan, its weights decoded.
enum Step {
    Embed { table: Vec<f32>, out: Buf },
    Select { x: Buf, out: Buf },
    Linear { x: Buf, w: Vec<f32>, out: Buf },
}

struct Compiled {
    plan: ValidPlan,
    limits: Limits,
    steps: Vec<Step>,
    bufs: Vec<Vec<f32>>,
    batch: Batch,
    picks: Picks,
}

impl Backend for Lookup {
    fn name(&self) -> &'static str {
        "lookup"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        let mut sum = Footprint::new("host memory");
        for (decl, kind) in plan.weights.iter().zip(plan.kinds()) {
            sum.add(Part::Weights(kind, Residency::Copied), 4 * decl.n_values());
        }
        for decl in &plan.bufs {
            sum.add(Part::Activations, 4 * decl.width * decl.rows.count(limits.max_tokens, limits.max_outputs));
        }
        sum
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        let decode = |w: Weight| {
            let WeightDecl { name, dtype, shape, source, .. } = plan.weight(w);
            let error = |why: &str| CompileError::Tensor { name: name.clone(), why: why.into() };
            let Source::Tensor(tensor) = source else { return Err(error("is in pieces")) };
            let info = weights.tensor(tensor).ok_or_else(|| error("is not in the file"))?;
            let mut values = vec![0.0; shape.iter().product()];
            let row_bytes = dtype.plane_bytes(shape[1]).ok_or_else(|| error("has broken rows"))?;
            for (i, row) in values.chunks_exact_mut(shape[1]).enumerate() {
                quant::decode_row(*dtype, weights.planes(info).row(row_bytes, i), row);
            }
            Ok(values)
        };
        let step = |op: &Op| match *op {
            Op::Embed { table, scale: 1.0, out } => Ok(Step::Embed { table: decode(table)?, out }),
            Op::Select { x, out } => Ok(Step::Select { x, out }),
            Op::Linear { x, ref parts } if parts.len() == 1 && parts[0].bias.is_none() => {
                Ok(Step::Linear { x, w: decode(parts[0].w)?, out: parts[0].out })
            }
            ref other => Err(CompileError::Unsupported { backend: "lookup", what: format!("run {}", other.name()) }),
        };
        Ok(Box::new(Compiled {
            steps: plan.ops.iter().map(step).collect::<Result<_, _>>()?,
            bufs: vec![Vec::new(); plan.bufs.len()],
            plan: plan.clone(),
            limits,
            batch: Batch::with_room(limits),
            picks: Picks::default(),
        }))
    }
}

impl Program for Compiled {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn kinds(&self) -> Kinds {
        Kinds::of(&self.plan)
    }

    fn n_vocab(&self) -> usize {
        self.plan.n_vocab
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check(self.limits, self.kinds(), self.plan.n_vocab)?;
        self.batch.copy_from(batch);
        Ok(())
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        for step in &self.steps {
            let width = |buf: Buf| self.plan.buf(buf).width;
            let (out, values) = match step {
                Step::Embed { table, out } => {
                    let rows =
                        self.batch.tokens.iter().flat_map(|&id| &table[id as usize * width(*out)..][..width(*out)]);
                    (out, rows.copied().collect())
                }
                Step::Select { x, out } => {
                    let x = &self.bufs[x.0 as usize];
                    let rows = self.batch.rows.iter().flat_map(|&r| &x[r as usize * width(*out)..][..width(*out)]);
                    (out, rows.copied().collect())
                }
                Step::Linear { x, w, out } => {
                    let k = width(*x);
                    let dot = |(a, b): (&[f32], &[f32])| -> f32 {
                        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
                    };
                    let rows = self.bufs[x.0 as usize].chunks_exact(k);
                    (out, rows.flat_map(|x| w.chunks_exact(k).map(move |w| dot((x, w)))).collect::<Vec<f32>>())
                }
            };
            self.bufs[out.0 as usize] = values;
        }
        let logits = &self.bufs[self.plan.logits.0 as usize];
        self.picks.fill(&self.batch, logits, self.plan.n_vocab);
        let hidden = self.plan.hidden().map_or(&[][..], |buf| &self.bufs[buf.0 as usize]);
        Ok(Output { logits, picks: &self.picks, hidden, all_hidden: &[], faults: &[], routing: None })
    }

    fn copy_state(&mut self, _: u32, _: u32) {
        unreachable!("plans of these ops have no states");
    }

    fn routers(&self) -> &[RouterInfo] {
        &[]
    }

    fn trace_routing(&mut self, _: bool) {}

    fn stream_stats(&self) -> Option<StreamStats> {
        None
    }

    fn set_interrupt(&mut self, _: Arc<AtomicBool>) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        None
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        None
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        None
    }
}

/// Tokens of the vocabulary of [`small_model`].
pub const N_VOCAB: usize = 50;

/// `logits = (select (embed ids)) · wᵀ`, with some ops that the backend does not know when `more`.
pub fn small_model(more: bool) -> (ValidPlan, Arc<Checkpoint>) {
    let (d, types) = (64, [WeightType::F32, WeightType::Q8_0]);
    let mut writer = Writer::new();
    let bytes: Vec<Vec<u8>> = types
        .iter()
        .enumerate()
        .map(|(i, &dtype)| {
            let row_bytes = dtype.plane_bytes(d).expect("valid");
            let mut planes = quant::PlanesBuf::new(row_bytes.times(N_VOCAB).expect("valid"));
            for row in 0..N_VOCAB {
                let x: Vec<f32> = (0..d).map(|j| ((row * 31 + j * 7 + i * 13) % 97) as f32 / 48.0 - 1.0).collect();
                quant::encode_row(dtype, &x, planes.get_mut().row_mut(row_bytes, row));
            }
            planes.q
        })
        .collect();
    let names = ["token_embd.weight", "output.weight"];
    for i in 0..2 {
        writer.tensor(names[i], &[N_VOCAB, d], types[i], &bytes[i]);
    }
    let mut file = Vec::new();
    writer.write(&mut file).expect("valid");
    let weight = |i: usize| WeightDecl {
        name: names[i].into(),
        dtype: types[i],
        shape: vec![N_VOCAB, d],
        source: Source::Tensor(names[i].into()),
        read: Read::Plain,
        is_repacked: false,
    };
    let buf = |name: &str, rows, width| BufDecl { name: name.into(), rows, width, elem: Elem::F32 };
    let [x, asked, logits] = [Buf(0), Buf(1), Buf(2)];
    let mut ops = vec![
        Op::Embed { table: Weight(0), scale: 1.0, out: x },
        Op::Select { x, out: asked },
        Op::Linear { x: asked, parts: vec![LinearPart { w: Weight(1), bias: None, out: logits }] },
    ];
    if more {
        ops.push(Op::Softcap { x: logits, cap: 3.0 });
    }
    let plan = Plan {
        arch: "test".into(),
        n_vocab: N_VOCAB,
        d_model: d,
        n_ctx_train: 64,
        weights: vec![weight(0), weight(1)],
        bufs: vec![buf("x", Rows::Tokens, d), buf("asked", Rows::Outputs, d), buf("logits", Rows::Outputs, N_VOCAB)],
        caches: Vec::new(),
        states: Vec::new(),
        ropes: Vec::new(),
        long_ropes: None,
        layers: vec![None; ops.len()],
        ops,
        logits,
        whole: false,
        draft: None,
    };
    (ValidPlan::new(plan).expect("valid"), Arc::new(checkpoint::from_bytes("two ops", file).expect("valid")))
}

/// Limits that the small model fits.
pub const LIMITS: Limits = Limits {
    max_tokens: 16,
    max_outputs: 16,
    n_pages: 4,
    max_positions: 64,
    n_window_pages: 0,
    n_states: 0,
    max_draft: 0,
};
