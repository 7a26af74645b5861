//! How long nodes take on the device, those that do the same in several layers together. Events stand between the
//! launches, so a traced step is slower than the sum of its rows.

use std::sync::Arc;
use std::time::Duration;

use super::driver::{Context, DriverError, Event, Stream};
use super::nodes::Node;
use backend::OpTime;

/// Clocks of a program.
pub struct Times {
    context: Arc<Context>,
    is_on: bool,
    /// Row of each node in `rows`, for each list of nodes.
    row_of: [Vec<usize>; 3],
    rows: Vec<OpTime>,
    /// Before the first node, and behind each.
    events: Vec<Event>,
}

impl Times {
    /// For the lists of nodes of a program; a name that several have stands for the same nodes.
    pub fn new(context: &Arc<Context>, nodes: [&[Node]; 3]) -> Times {
        let mut rows: Vec<OpTime> = Vec::new();
        let row_of = nodes.map(|nodes| {
            let n_known = rows.len();
            let row = |node: &Node| {
                let (name, bytes) = node.describe();
                let found = rows.iter().position(|row| row.name == name);
                let at = found.unwrap_or_else(|| {
                    rows.push(OpTime { name, ..OpTime::default() });
                    rows.len() - 1
                });
                if at >= n_known {
                    rows[at].bytes += bytes;
                }
                at
            };
            nodes.iter().map(row).collect()
        });
        Times { context: Arc::clone(context), is_on: false, row_of, rows, events: Vec::new() }
    }

    /// Starts from zero, or stops.
    pub fn turn(&mut self, is_on: bool) -> Result<(), DriverError> {
        self.is_on = is_on;
        if is_on {
            for row in &mut self.rows {
                (row.steps, row.launches, row.time, row.serial) = (0, 0, Duration::ZERO, Duration::ZERO);
            }
            while self.events.len() <= self.row_of.iter().map(Vec::len).max().unwrap_or(0) {
                self.events.push(Event::new(&self.context)?);
            }
        }
        Ok(())
    }

    /// Whether steps are traced.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Marks the place behind `n` nodes.
    pub fn mark(&self, n: usize, stream: &Stream) -> Result<(), DriverError> {
        if self.is_on { stream.record(&self.events[n]) } else { Ok(()) }
    }

    /// Adds up a step of list `list` that has ended.
    pub fn add(&mut self, list: usize) -> Result<(), DriverError> {
        if !self.is_on {
            return Ok(());
        }
        let mut seen = vec![false; self.rows.len()];
        for (i, &at) in self.row_of[list].iter().enumerate() {
            let ms = self.events[i].until(&self.events[i + 1])?;
            let row = &mut self.rows[at];
            row.time += Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3);
            row.launches += 1;
            row.steps += u64::from(!std::mem::replace(&mut seen[at], true));
        }
        Ok(())
    }

    /// What was counted.
    pub fn rows(&self) -> &[OpTime] {
        &self.rows
    }
}
