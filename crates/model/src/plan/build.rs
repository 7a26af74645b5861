//! Writes plans: ops in order, weights looked up in a checkpoint and checked, buffers named by layer.
//!
//! Knows the checkpoint's header, but no architecture.

use std::collections::{HashMap, HashSet};

use quant::act::ActKind;

use super::{
    Buf, BufDecl, Cache, CacheDecl, DraftHead, Elem, LinearPart, LongRopes, Op, Plan, Read, Rope, RopeDecl, Rows, Slab,
    Source, State, StateDecl, Weight, WeightDecl,
};
use crate::Error;
use crate::names::{Found, Names};

/// A plan under construction.
pub struct Builder<'a> {
    names: Names<'a>,
    plan: Plan,
    layer: Option<u32>,
    n_layer: Option<usize>,
    by_name: HashMap<String, Weight>,
    skipped: HashSet<String>,
}

impl<'a> Builder<'a> {
    /// Returns an empty plan over the tensors of a checkpoint.
    pub fn new(names: Names<'a>, arch: &str, n_vocab: usize, d_model: usize, n_ctx_train: usize) -> Self {
        let plan = Plan::new(arch, n_vocab, d_model, n_ctx_train);
        Self { names, plan, layer: None, n_layer: None, by_name: HashMap::new(), skipped: HashSet::new() }
    }

    /// Sets the layer of the next ops; `None` is before the first or after the last.
    pub fn layer(&mut self, layer: Option<u32>) -> &mut Self {
        self.layer = layer;
        self
    }

    /// Steps have whole texts, and the plan's rows are what it makes of them ([`Plan::whole`]).
    pub fn whole(&mut self) -> &mut Self {
        self.plan.whole = true;
        self
    }

    /// Tensors from this layer on may be unused: files keep layers there that predict further tokens.
    pub fn skip_layers_from(&mut self, n_layer: usize) -> &mut Self {
        self.n_layer = Some(n_layer);
        self
    }

    /// This tensor may be unused, by its GGUF name: other tensors hold its numbers, or nothing depends on them.
    pub fn skip(&mut self, name: &str) -> &mut Self {
        self.skipped.insert(self.names.tensor(name).map_or(name, |info| &info.name).into());
        self
    }

    /// Returns whether the checkpoint has a tensor for this GGUF name.
    pub fn has(&self, name: &str) -> bool {
        self.names.has(name)
    }

    /// Returns an error about a tensor, by its GGUF name.
    pub fn error(&self, name: &str, what: String) -> Error {
        self.names.error(name, what)
    }

    /// Returns the rows of the one tensor of this name, where there is such.
    pub fn n_rows(&self, name: &str) -> Option<usize> {
        self.names.tensor(name)?.shape.first().copied()
    }

    /// Returns a tensor of any type with this shape, by its GGUF name. The same name gives the same weight again.
    ///
    /// Axes of length 1 are ignored: some writers drop them.
    ///
    /// # Errors
    /// When the tensor is missing or has another shape.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<Weight, Error> {
        let Found { dtype, source, is_repacked } = self.names.find(name, shape)?;
        Ok(self.declare_weight(WeightDecl {
            name: name.into(),
            dtype,
            shape: shape.into(),
            source,
            read: Read::Plain,
            is_repacked,
        }))
    }

    /// One of the matrices that a tensor stores per head, stacked by rows: `[n_head, rows[part], k]`.
    ///
    /// The tensor's shape is `[n_head · Σ rows, k]`.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or consists of several tensors.
    pub fn head_rows(
        &mut self,
        name: &str,
        n_head: usize,
        rows: &[usize],
        part: usize,
        k: usize,
    ) -> Result<Weight, Error> {
        let (each, before) = (rows.iter().sum::<usize>(), rows[..part].iter().sum::<usize>());
        let Found { dtype, source, is_repacked } = self.names.find(name, &[n_head * each, k])?;
        let Source::Tensor(tensor) = source else {
            return Err(self.names.error(name, "is made of several tensors, expected one".into()));
        };
        let slab = |head| Slab { tensor: tensor.clone(), first_row: head * each + before };
        let source = Source::Slabs((0..n_head).map(slab).collect());
        let (name, shape) = (format!("{name}[{part}/{}]", rows.len()), vec![n_head, rows[part], k]);
        Ok(self.declare_weight(WeightDecl { name, dtype, shape, source, read: Read::Plain, is_repacked }))
    }

    /// One of the matrices that a tensor stores one above the other: `[rows[part], k]` of `[Σ rows, k]`.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or consists of several tensors.
    pub fn part(&mut self, name: &str, rows: &[usize], part: usize, k: usize) -> Result<Weight, Error> {
        let Found { dtype, source, is_repacked } = self.names.find(name, &[rows.iter().sum(), k])?;
        let Source::Tensor(tensor) = source else {
            return Err(self.names.error(name, "is made of several tensors, expected one".into()));
        };
        let source = Source::Slabs(vec![Slab { tensor, first_row: rows[..part].iter().sum() }]);
        let (name, shape) = (format!("{name}[{part}/{}]", rows.len()), vec![rows[part], k]);
        Ok(self.declare_weight(WeightDecl { name, dtype, shape, source, read: Read::Plain, is_repacked }))
    }

    /// Returns a tensor of more axes as the matrix `[n, k]` of its first axis and all others: a convolution whose
    /// windows do not overlap.
    ///
    /// # Errors
    /// When the tensor is missing, is no such matrix, or is quantized.
    pub fn flat(&mut self, name: &str, [n, k]: [usize; 2]) -> Result<Weight, Error> {
        let Some(info) = self.names.tensor(name) else { return self.weight(name, &[n, k]) };
        let is_flat = info.shape.first() == Some(&n) && info.shape.iter().skip(1).product::<usize>() == k;
        if !is_flat || info.dtype.act() != ActKind::F32 {
            let what = format!("is {} {:?}, expected plain numbers [{n}, {k}]", info.dtype, info.shape);
            return Err(self.names.error(&info.name, what));
        }
        let Found { dtype, source, is_repacked } = self.names.find(name, &info.shape)?;
        let shape = vec![n, k];
        Ok(self.declare_weight(WeightDecl { name: name.into(), dtype, shape, source, read: Read::Plain, is_repacked }))
    }

    fn declare_weight(&mut self, decl: WeightDecl) -> Weight {
        if let Some(&weight) = self.by_name.get(&decl.name) {
            return weight;
        }
        let weight = Weight(self.plan.weights.len() as u32);
        self.by_name.insert(decl.name.clone(), weight);
        self.plan.weights.push(decl);
        weight
    }

    /// Returns a vector `[n]` of plain numbers: norms and biases are never quantized.
    ///
    /// # Errors
    /// When it is missing, or has another length or a quantized type.
    pub fn vector(&mut self, name: &str, n: usize) -> Result<Weight, Error> {
        self.vector_read(name, n, Read::Plain)
    }

    /// Returns a vector `[n]` that is transformed when read.
    ///
    /// # Errors
    /// As [`Builder::vector`].
    pub fn vector_read(&mut self, name: &str, n: usize, read: Read) -> Result<Weight, Error> {
        let Found { dtype, source, is_repacked } = self.names.find(name, &[n])?;
        if dtype.act() != ActKind::F32 {
            return Err(self.names.error(name, format!("has type {dtype}, expected f32, f16 or bf16")));
        }
        Ok(self.declare_weight(WeightDecl { name: name.into(), dtype, shape: vec![n], source, read, is_repacked }))
    }

    /// Returns some decay rates of each step size, transformed when read.
    ///
    /// # Errors
    /// As [`Builder::vector`].
    pub fn rates(&mut self, name: &str, shape: [usize; 2], read: Read) -> Result<Weight, Error> {
        let Found { dtype, source, is_repacked } = self.names.find(name, &shape)?;
        if dtype.act() != ActKind::F32 {
            return Err(self.names.error(name, format!("has type {dtype}, expected f32, f16 or bf16")));
        }
        let shape = shape.to_vec();
        Ok(self.declare_weight(WeightDecl { name: name.into(), dtype, shape, source, read, is_repacked }))
    }

    /// Returns a vector as rows of equal length: what a file keeps in one piece.
    ///
    /// # Errors
    /// As [`Builder::vector`].
    pub fn rows_of_vector(&mut self, name: &str, [n, k]: [usize; 2]) -> Result<Weight, Error> {
        let Found { dtype, source, is_repacked } = self.names.find(name, &[n.saturating_mul(k)])?;
        if dtype.act() != ActKind::F32 {
            return Err(self.names.error(name, format!("has type {dtype}, expected f32, f16 or bf16")));
        }
        let shape = vec![n, k];
        Ok(self.declare_weight(WeightDecl { name: name.into(), dtype, shape, source, read: Read::Plain, is_repacked }))
    }

    /// Returns a vector that the checkpoint may lack.
    ///
    /// # Errors
    /// As [`Builder::vector`], for a vector that is there.
    pub fn opt_vector(&mut self, name: &str, n: usize) -> Result<Option<Weight>, Error> {
        self.has(name).then(|| self.vector(name, n)).transpose()
    }

    /// Returns a buffer of activations; inside a layer `.LAYER` is appended to its name.
    pub fn buf(&mut self, name: &str, rows: Rows, width: usize) -> Buf {
        self.declare(name, rows, width, Elem::F32)
    }

    /// Returns rows and width of a buffer.
    pub fn shape(&self, x: Buf) -> (Rows, usize) {
        let BufDecl { rows, width, .. } = *self.plan.buf(x);
        (rows, width)
    }

    /// Returns a buffer of expert ids.
    pub fn ids(&mut self, name: &str, rows: Rows, width: usize) -> Buf {
        self.declare(name, rows, width, Elem::U32)
    }

    fn declare(&mut self, name: &str, rows: Rows, width: usize, elem: Elem) -> Buf {
        let name = match self.layer {
            Some(layer) => format!("{name}.{layer}"),
            None => name.into(),
        };
        self.plan.bufs.push(BufDecl { name, rows, width, elem });
        Buf(self.plan.bufs.len() as u32 - 1)
    }

    /// Returns a cache for one attention layer.
    pub fn cache(&mut self, cache: CacheDecl) -> Cache {
        self.plan.caches.push(cache);
        Cache(self.plan.caches.len() as u32 - 1)
    }

    /// Recurrent state for one op.
    pub fn state(&mut self, state: StateDecl) -> State {
        self.plan.states.push(state);
        State(self.plan.states.len() as u32 - 1)
    }

    /// Returns a rotary embedding, which layers may share.
    pub fn rope(&mut self, rope: RopeDecl) -> Rope {
        self.plan.ropes.push(rope);
        Rope(self.plan.ropes.len() as u32 - 1)
    }

    /// Returns the model's one rotary embedding, and notes the one that contexts beyond a length have in its place.
    pub fn long_rope(&mut self, rope: RopeDecl, long: Option<(usize, RopeDecl)>) -> Rope {
        let n_ctx_max = self.plan.n_ctx_train;
        self.plan.long_ropes = long.map(|(n_ctx, rope)| LongRopes { n_ctx, n_ctx_max, ropes: vec![rope] });
        self.rope(rope)
    }

    /// Appends an op, of the draft head once that is started.
    pub fn push(&mut self, op: Op) {
        let (ops, layers) = match &mut self.plan.draft {
            Some(draft) => (&mut draft.ops, &mut draft.layers),
            None => (&mut self.plan.ops, &mut self.plan.layers),
        };
        ops.push(op);
        layers.push(self.layer);
    }

    /// Ends the model's ops with its logits, and starts those of the draft head, which is given rows of `source`.
    /// Returns the buffer of what it is given.
    pub fn start_draft(&mut self, logits: Buf, source: Buf) -> Buf {
        self.plan.logits = logits;
        let input = self.buf("given", Rows::Tokens, self.plan.d_model);
        self.plan.draft = Some(DraftHead { source, input, ops: Vec::new(), layers: Vec::new(), logits });
        input
    }

    /// Appends `out = x·wᵀ (+ bias)` and returns the buffer `out`, which has the rows of `x`.
    pub fn linear(&mut self, x: Buf, w: Weight, bias: Option<Weight>, out: &str) -> Buf {
        let n = self.plan.weight(w).shape[0];
        let out = self.buf(out, self.plan.buf(x).rows, n);
        self.push(Op::Linear { x, parts: vec![LinearPart { w, bias, out }] });
        out
    }

    /// Appends `out = norm(x)` and returns the buffer `out`, which has the shape of `x`.
    pub fn rms_norm(&mut self, x: Buf, w: Weight, eps: f32, out: &str) -> Buf {
        let BufDecl { rows, width, .. } = *self.plan.buf(x);
        let out = self.buf(out, rows, width);
        self.push(Op::RmsNorm { x, residual: None, w, eps, out });
        out
    }

    /// Appends the layer norm `out = (x - mean(x)) · rsqrt(var(x) + eps) ⊙ w + bias` with the tensors `NAME.weight` and
    /// `NAME.bias` and returns the buffer `out`, which has the shape of `x`.
    ///
    /// # Errors
    /// When a tensor is missing or has another length.
    pub fn layer_norm(&mut self, x: Buf, name: &str, eps: f32, out: &str) -> Result<Buf, Error> {
        let out = self.centered_norm(x, name, eps, out)?;
        let bias = self.vector(&format!("{name}.bias"), self.plan.buf(x).width)?;
        self.push(Op::AddBias { x: out, w: bias });
        Ok(out)
    }

    /// The same without a bias.
    ///
    /// # Errors
    /// When the tensor is missing or has another length.
    pub fn centered_norm(&mut self, x: Buf, name: &str, eps: f32, out: &str) -> Result<Buf, Error> {
        let BufDecl { rows, width, .. } = *self.plan.buf(x);
        let w = self.vector(&format!("{name}.weight"), width)?;
        let centered = self.buf("centered", rows, width);
        self.push(Op::Center { x, out: centered });
        Ok(self.rms_norm(centered, w, eps, out))
    }

    /// Appends `out = x·wᵀ + bias` with the tensors `NAME.weight`, of this shape, and `NAME.bias` and returns the buffer
    /// `out`.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn biased_linear(&mut self, x: Buf, name: &str, shape: [usize; 2], out: &str) -> Result<Buf, Error> {
        let w = self.weight(&format!("{name}.weight"), &shape)?;
        let bias = self.vector(&format!("{name}.bias"), shape[0])?;
        Ok(self.linear(x, w, Some(bias), out))
    }

    /// Ends the plan of an image encoder.
    ///
    /// # Errors
    /// When the checkpoint has a tensor of an encoder that the plan does not read, besides those that were skipped.
    pub fn finish_encoder(mut self, features: Buf) -> Result<Plan, Error> {
        self.plan.logits = features;
        let used: HashSet<&str> = self.plan.weights.iter().flat_map(|decl| decl.source.tensors()).collect();
        let mut tensors = self.names.checkpoint().tensors().iter().filter(|info| Names::is_of_encoder(&info.name));
        match tensors.find(|info| !used.contains(info.name.as_str()) && !self.skipped.contains(&info.name)) {
            None => Ok(self.plan),
            Some(info) => {
                let what = format!("{} {:?} is in the file, the encoder has no use for it", info.dtype, info.shape);
                Err(self.names.error(&info.name, what))
            }
        }
    }

    /// Ends the plan, or its draft head.
    ///
    /// # Errors
    /// When the checkpoint has a tensor that the plan does not read and `ignored` does not accept: with an unused
    /// tensor the model computes something else.
    pub fn finish(mut self, logits: Buf, ignored: impl Fn(&str) -> bool) -> Result<Plan, Error> {
        match &mut self.plan.draft {
            Some(draft) => draft.logits = logits,
            None => self.plan.logits = logits,
        }
        let used: HashSet<&str> = self.plan.weights.iter().flat_map(|decl| decl.source.tensors()).collect();
        let skipped = |name: &str| self.n_layer.zip(Names::layer(name)).is_some_and(|(n, layer)| layer >= n);
        let skipped = |name: &str| skipped(name) || self.skipped.contains(name);
        let excused =
            |name: &str| used.contains(name) || Names::is_other_modality(name) || skipped(name) || ignored(name);
        if let Some(info) = self.names.checkpoint().tensors().iter().find(|t| !excused(&t.name)) {
            let what = format!("{} {:?} is in the file, {} has no use for it", info.dtype, info.shape, self.plan.arch);
            return Err(self.names.error(&info.name, what));
        }
        Ok(self.plan)
    }
}
