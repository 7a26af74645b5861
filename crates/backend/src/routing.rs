//! Records the routers' choices while tracing is on: copies the ids, and the weights where a backend has them at hand,
//! from the ops' buffers before they are reused. Knows no backend.

use model::plan::{Op, Plan, Rows};

use crate::Batch;

/// A router of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterInfo {
    /// Its layer.
    pub layer: u32,
    /// Number of experts it chooses from.
    pub n_expert: usize,
    /// Number of experts it chooses per token.
    pub n_used: usize,
}

/// The choices of a step, `[R, width]`: for every output row, the ids of every router in order of layers, best first.
/// `width` is the sum of all `n_used`.
#[derive(Debug, Default)]
pub struct RoutingTrace {
    routers: Vec<RouterInfo>,
    width: usize,
    is_on: bool,
    /// The step is one of the draft head, whose routers are not recorded.
    is_draft: bool,
    n_rows: usize,
    router: usize, // the next one to record
    at: usize,     // first column of its ids
    ids: Vec<u16>,
    weights: Vec<f32>, // as many, or none
}

impl RoutingTrace {
    /// For the routers of a plan.
    pub fn new(plan: &Plan) -> Self {
        let routers = plan.ops.iter().zip(&plan.layers).filter_map(|(op, layer)| match *op {
            Op::Route { logits, n_used, .. } => {
                Some(RouterInfo { layer: layer.unwrap_or(0), n_expert: plan.buf(logits).width, n_used })
            }
            _ => None,
        });
        let routers: Vec<RouterInfo> = routers.collect();
        let width = routers.iter().map(|router| router.n_used).sum();
        Self { routers, width, ..Self::default() }
    }

    /// The routers.
    pub fn routers(&self) -> &[RouterInfo] {
        &self.routers
    }

    /// Returns the same, with room for the weights of the experts.
    pub fn with_weights(mut self) -> Self {
        self.weights = vec![0.0; 1];
        self
    }

    /// Records steps with up to `max_outputs` rows from now on, or stops.
    pub fn turn(&mut self, is_on: bool, max_outputs: usize) {
        self.is_on = is_on;
        self.n_rows = 0;
        if is_on {
            self.ids.resize(max_outputs * self.width, 0);
            if !self.weights.is_empty() {
                self.weights.resize((max_outputs * self.width).max(1), 0.0);
            }
        }
    }

    fn records(&self) -> bool {
        self.is_on && !self.is_draft
    }

    /// A step begins: the routers are recorded in their order.
    pub fn start(&mut self, batch: &Batch) {
        (self.n_rows, self.router, self.at) = (batch.rows.len(), 0, 0);
        self.is_draft = batch.is_draft();
    }

    /// Records the ids that the next router wrote, `[rows, n_used]`.
    pub fn record(&mut self, rows: Rows, ids: &[u32], batch: &Batch) {
        if !self.records() {
            return;
        }
        let n_used = self.routers[self.router].n_used;
        copy((&mut self.ids, self.width, self.at), (ids, n_used), rows, batch, |&id| id as u16);
        self.router += 1;
        self.at += n_used;
    }

    /// Records the weights of the experts whose ids are recorded next, `[rows, n_used]`, where there is room for them.
    pub fn record_weights(&mut self, rows: Rows, weights: &[f32], batch: &Batch) {
        if self.records() && !self.weights.is_empty() {
            let n_used = self.routers[self.router].n_used;
            copy((&mut self.weights, self.width, self.at), (weights, n_used), rows, batch, |&weight| weight);
        }
    }

    /// The recorded ids; `None` while recording is off.
    pub fn ids(&self) -> Option<&[u16]> {
        self.records().then(|| &self.ids[..self.n_rows * self.width])
    }

    /// The recorded weights, in the order of the ids; `None` while recording is off, and without room for them.
    pub fn weights(&self) -> Option<&[f32]> {
        (self.records() && !self.weights.is_empty()).then(|| &self.weights[..self.n_rows * self.width])
    }
}

/// Copies what a router wrote for the output rows of a batch, `[rows, n_used]`, to a column of `[R, width]`.
fn copy<T, U>(
    (out, width, at): (&mut [U], usize, usize),
    (values, n_used): (&[T], usize),
    rows: Rows,
    batch: &Batch,
    convert: impl Fn(&T) -> U,
) {
    for (r, &token) in batch.rows.iter().enumerate() {
        let row = if rows == Rows::Outputs { r } else { token as usize };
        let out = &mut out[r * width + at..][..n_used];
        out.iter_mut().zip(&values[row * n_used..][..n_used]).for_each(|(out, value)| *out = convert(value));
    }
}
