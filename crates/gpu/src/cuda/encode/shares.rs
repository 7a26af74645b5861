//! Sums of shares of k that a wide product leaves to the launch after it, which adds them up as it reads them: a launch
//! less (`kernels/cuda/shares.h`). A launch that does not take them has them added up before it.

use super::super::args::{LinearPart, Shares, WideLinear};
use super::super::driver::{DriverError, Ptr};
use super::super::launch::Launch;
use super::super::nodes::{ModuleId, Node};
use super::Encoder;

/// A product whose shares are in scratch, and the launch that would add them up.
#[derive(Clone, Copy, Debug)]
pub struct Unsummed {
    pub(super) module: ModuleId,
    pub(super) sum: Launch,
    pub(super) args: WideLinear,
}

impl Unsummed {
    /// Numbers of a row of all parts.
    fn width(&self) -> u64 {
        self.parts().iter().map(|part| part.n).sum()
    }

    fn parts(&self) -> &[LinearPart] {
        &self.args.op.parts[..self.args.op.n_parts as usize]
    }

    /// Numbers in scratch.
    fn len(&self) -> usize {
        self.args.n_shares as usize * self.args.op.rows as usize * self.width() as usize
    }

    /// The shares of the part that begins at number `first` of a row.
    fn shares(&self, first: u64) -> Shares {
        let (width, op) = (self.width(), &self.args.op);
        let of = self.args.sums + 4 * first;
        Shares { of, share: u64::from(op.rows) * width, row: width as u32, n: self.args.n_shares }
    }
}

impl Encoder<'_> {
    /// Whether the next node's launches may take shares.
    pub(super) fn next_adds_up(&self) -> bool {
        matches!(self.next.first(), Some(Node::Attend(_)))
    }

    /// Numbers of scratch that hold shares.
    pub(super) fn n_unsummed(&self) -> usize {
        self.unsummed.iter().flatten().map(Unsummed::len).sum()
    }

    /// Adds up what no launch has taken.
    pub(super) fn add_up(&mut self) -> Result<(), DriverError> {
        for of in std::mem::take(&mut self.unsummed).into_iter().flatten() {
            self.launch(of.module, of.sum, &of.args)?;
        }
        Ok(())
    }

    /// Takes the shares of rows at `outs`, of the products all of whose parts are among these.
    pub(super) fn take_shares<const N: usize>(&mut self, outs: [Ptr; N]) -> [Shares; N] {
        let mut shares = [Shares::default(); N];
        for slot in &mut self.unsummed {
            let fits = |of: &mut Unsummed| {
                of.args.op.add == 0 && of.parts().iter().all(|part| part.bias == 0 && outs.contains(&part.out))
            };
            let Some(of) = slot.take_if(fits) else { continue };
            let mut first = 0;
            for part in of.parts() {
                for (shares, _) in shares.iter_mut().zip(outs).filter(|&(_, out)| out == part.out) {
                    *shares = of.shares(first);
                }
                first += part.n;
            }
        }
        shares
    }
}
