//! Launches of sums over the parts of a plan.

use super::super::args;
use super::super::driver::DriverError;
use super::super::launch::Launch;
use super::super::nodes::{AddedNorm, MOST_BLOCKS, ReduceNode};
use super::Encoder;

impl Encoder<'_> {
    /// Adds rows up over the parts.
    pub(super) fn all_reduce(&mut self, node: &ReduceNode) -> Result<(), DriverError> {
        let &ReduceNode { module, x, link, norm, is_added } = node;
        let rows = x.rows.count(self.counts.tokens, self.counts.rows);
        let n = rows * x.width;
        let args = args::AllReduce {
            x: x.ptr,
            parts: link.rooms,
            n: n as u64,
            part: link.part as u32,
            n_parts: link.n_parts as u32,
            rooms: link.numbers.map(|n| n as u32),
            d: x.width as u32,
            ..Default::default()
        };
        let args = match norm {
            Some(AddedNorm { x, w, eps, out }) => {
                let keeps_x = u32::from(!is_added);
                args::AllReduce { residual: x.ptr, norm_w: w, norm_out: out.ptr, eps, keeps_x, ..args }
            }
            None => args,
        };
        // All blocks have to be resident.
        let launch = match n <= link.numbers[0] && rows <= 2 * self.sms {
            true => {
                let block = (x.width / 4).next_multiple_of(32).min(1024) as u32;
                Launch { entry: "all_reduce_rows", grid: [rows as u32, 1, 1], block, shared: 0 }
            }
            false => {
                let blocks = self.sms.min(MOST_BLOCKS).min(rows);
                // Half of a multiprocessor, where that is enough: blocks of the next kernel fit too.
                let block = if rows <= 4 * blocks { 512 } else { 1024 };
                Launch { entry: "all_reduce_many", grid: [blocks as u32, 1, 1], block, shared: 0 }
            }
        };
        self.run(module, launch, &args)
    }
}
