//! Time per op, summed over steps while tracing is on.
//!
//! It reads the clock between ops and does not know what they compute.

use std::time::{Duration, Instant};

use model::plan::{Op, Plan};

use super::pool::Pool;
use backend::OpTime;
use backend::residency::has_products;

/// Time per op so far; ops that do the same in several layers share a row.
pub struct Times {
    rows: Vec<OpTime>,
    /// Row of each op, `[n_ops]`.
    row_of: Vec<usize>,
    /// End of the last lap while tracing is on.
    last: Option<Lap>,
    is_on: bool,
}

/// A point in time with the pool's counters.
#[derive(Clone, Copy)]
struct Lap {
    at: Instant,
    regions: u64,
    in_regions: Duration,
    in_chunks: Duration,
}

impl Lap {
    fn now(pool: &Pool) -> Lap {
        Lap {
            at: Instant::now(),
            regions: pool.regions(),
            in_regions: pool.time_in_regions(),
            in_chunks: pool.time_in_chunks(),
        }
    }
}

impl Times {
    /// One row per kind of op of a plan, and one for what a step does around its ops.
    pub fn new(plan: &Plan) -> Times {
        let mut rows = vec![OpTime { name: "step".into(), ..OpTime::default() }];
        let row_of = plan.ops.iter().map(|op| {
            let name = name(plan, op);
            let row = rows.iter().position(|row| row.name == name).unwrap_or(rows.len());
            if row == rows.len() {
                rows.push(OpTime { name, ..OpTime::default() });
            }
            rows[row].bytes += plan.bytes_of(op);
            row
        });
        let row_of = row_of.collect();
        Times { rows, row_of, last: None, is_on: false }
    }

    /// Starts from zero, or stops and keeps the counts.
    pub fn turn(&mut self, is_on: bool) {
        self.is_on = is_on;
        for row in self.rows.iter_mut().filter(|_| is_on) {
            *row = OpTime { name: std::mem::take(&mut row.name), bytes: row.bytes, ..OpTime::default() };
        }
    }

    /// A step begins.
    pub fn start(&mut self, pool: &Pool) {
        self.last = self.is_on.then(|| Lap::now(pool));
        self.rows.iter_mut().filter(|_| self.is_on).for_each(|row| row.steps += 1);
    }

    /// Op `i` ended, or with `None` the work before the ops.
    pub fn lap(&mut self, i: Option<usize>, pool: &Pool) {
        let Some(last) = &mut self.last else { return };
        let (before, now) = (*last, Lap::now(pool));
        *last = now;
        let row = &mut self.rows[i.map_or(0, |i| self.row_of[i])];
        let time = now.at - before.at;
        row.time += time;
        row.launches += now.regions - before.regions;
        row.serial += time.saturating_sub(now.in_regions - before.in_regions);
        row.busy += now.in_chunks - before.in_chunks;
    }

    /// The counts.
    pub fn rows(&self) -> &[OpTime] {
        &self.rows
    }
}

/// The op and its matrices, without the layer's number.
fn name(plan: &Plan, op: &Op) -> String {
    let weights = match op {
        Op::Linear { parts, .. } => parts.iter().map(|part| part.w).collect(),
        op if has_products(op) => op.weights(),
        // Ops without matrices are one row each.
        _ => Vec::new(),
    };
    let mut name = op.name().to_string();
    for w in weights {
        let full = plan.weight(w).name.as_str();
        let stem = full.strip_suffix(".weight").unwrap_or(full);
        name.push(' ');
        name.push_str(stem.rsplit('.').next().unwrap_or(stem));
    }
    name
}
