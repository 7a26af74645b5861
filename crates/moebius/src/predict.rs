//! What to expect of a model whose routed experts lie partly on a GPU and partly in host memory, from bandwidths: the
//! same arithmetic for `plan` and for who chooses between that and the CPU alone.

use cpu::read_bandwidth;
use gpu::cuda;
use gpu::cuda::split::Split;
use model::plan::Plan;

/// Bytes per second of a GPU's memory where there is no GPU to ask, and of the link to it.
const ASSUMED_GPU: f64 = 1e12;
const ASSUMED_LINK: f64 = 25e9;
/// Seconds that a layer's way to the host and back takes.
const HANDOVER: f64 = 20e-6;

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of the GPU's memory.
    pub gpu: f64,
    /// Whether the driver says so.
    pub is_gpu_known: bool,
    /// Of the host's memory, measured.
    pub host: f64,
    /// Of the link between them.
    pub link: f64,
}

impl Rates {
    /// Of a GPU by its clock and width, and of a memory that gives so many bytes a second, or of this machine's with so
    /// many threads, which is measured: a tenth of a second.
    ///
    /// # Errors
    /// The memory cannot be measured.
    pub fn measure(ordinal: usize, threads: usize, memory: Option<usize>) -> anyhow::Result<Rates> {
        let gpu = cuda::bandwidth(ordinal);
        let (is_gpu_known, gpu) = (gpu.is_some(), gpu.unwrap_or(ASSUMED_GPU));
        let host = memory.map_or_else(|| read_bandwidth(threads), |memory| Ok(memory as f64))?;
        Ok(Rates { gpu, is_gpu_known, host, link: ASSUMED_LINK })
    }

    /// Tokens a second of one sequence on the GPU and the CPU at best, and the bytes that a token reads on each.
    pub fn shared(&self, plan: &Plan, split: &Split) -> (f64, [usize; 2]) {
        let of_host = split.token_bytes()[1];
        let of_gpu = plan.bytes_per_token().saturating_sub(of_host);
        let handovers = self.handovers(split.host().count());
        let seconds = of_gpu as f64 / self.gpu.max(1.0) + of_host as f64 / self.host.max(1.0) + handovers;
        (1.0 / seconds, [of_gpu, of_host])
    }

    /// Seconds that the ways of so many layers to the host and back take.
    pub fn handovers(&self, n_layers: usize) -> f64 {
        HANDOVER * n_layers as f64
    }

    /// Returns the same on the CPU alone.
    pub fn alone(&self, plan: &Plan) -> f64 {
        self.host.max(1.0) / plan.bytes_per_token().max(1) as f64
    }

    /// Tokens a second of a prompt whose steps have so many tokens, at best: experts in host memory cross the link once
    /// a step.
    pub fn prompt(&self, split: &Split, tokens: usize) -> f64 {
        tokens as f64 * self.link / split.bytes()[1].max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_gpu_beats_the_cpu_and_a_slow_one_does_not() {
        let plan = crate::load::open(None).unwrap().plan;
        let all = Split::new(&plan, usize::MAX).bytes()[0];
        let host = 1e9;
        let rates = |gpu| Rates { gpu, is_gpu_known: true, host, link: ASSUMED_LINK };
        let alone = rates(1e12).alone(&plan);
        let mut last = 0.0;
        for percent in [0, 25, 50, 75, 100] {
            let split = Split::new(&plan, all / 100 * percent + 1000 * percent);
            let (fast, [gpu, cpu]) = rates(1e12).shared(&plan, &split);
            assert_eq!(gpu + cpu, plan.bytes_per_token());
            assert!(fast > last && fast > alone, "{percent}: {fast} after {last}, {alone} alone");
            assert!(rates(1e8).shared(&plan, &split).0 < alone, "{percent}");
            last = fast;
        }
        // Where memory is as fast as the GPU's, the handovers decide.
        let even = Rates { host: 1e12, ..rates(1e12) };
        assert!(even.shared(&plan, &Split::new(&plan, 0)).0 < even.alone(&plan));
    }
}
