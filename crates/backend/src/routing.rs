//! Records the routers' choices while tracing is on: copies the ids from the ops' buffers before they are reused. Knows
//! no backend.

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
pub(crate) struct RoutingTrace {
    routers: Vec<RouterInfo>,
    width: usize,
    is_on: bool,
    n_rows: usize,
    router: usize, // the next one to record
    at: usize,     // first column of its ids
    ids: Vec<u16>,
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

    /// Records steps with up to `max_outputs` rows from now on, or stops.
    pub fn turn(&mut self, is_on: bool, max_outputs: usize) {
        self.is_on = is_on;
        self.n_rows = 0;
        if is_on {
            self.ids.resize(max_outputs * self.width, 0);
        }
    }

    /// A step begins: the routers are recorded in their order.
    pub fn start(&mut self, batch: &Batch) {
        (self.n_rows, self.router, self.at) = (batch.rows.len(), 0, 0);
    }

    /// Records the ids that the next router wrote, `[rows, n_used]`.
    pub fn record(&mut self, rows: Rows, ids: &[u32], batch: &Batch) {
        if !self.is_on {
            return;
        }
        let n_used = self.routers[self.router].n_used;
        for (r, &token) in batch.rows.iter().enumerate() {
            let row = if rows == Rows::Outputs { r } else { token as usize };
            let out = &mut self.ids[r * self.width + self.at..][..n_used];
            out.iter_mut().zip(&ids[row * n_used..][..n_used]).for_each(|(out, &id)| *out = id as u16);
        }
        self.router += 1;
        self.at += n_used;
    }

    /// The recorded ids; `None` while recording is off.
    pub fn ids(&self) -> Option<&[u16]> {
        self.is_on.then(|| &self.ids[..self.n_rows * self.width])
    }
}
