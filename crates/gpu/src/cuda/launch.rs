//! The geometry of a launch, as plain numbers: what [`super::matmul`] decides and a program queues. Knows no driver.

/// Entry point, blocks, threads of a block, and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Name of the kernel in its module.
    pub entry: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

impl Launch {
    /// A thread for each of `n` numbers.
    pub fn each(entry: &'static str, n: usize, block: u32) -> Launch {
        Launch { entry, grid: [n.div_ceil(block as usize) as u32, 1, 1], block, shared: 0 }
    }

    /// A block for each of `n` rows of `width`, of a thread for each number up to 1024.
    pub fn rows(entry: &'static str, n: usize, width: usize) -> Launch {
        let block = width.next_multiple_of(32).clamp(32, 1024) as u32;
        Launch { entry, grid: [n as u32, 1, 1], block, shared: 0 }
    }

    /// As [`Launch::rows`], but where rows fill a device several times a thread has the `kept` numbers that it keeps in
    /// registers: blocks that wait for memory and for each other's warps are then many.
    pub fn many_rows(entry: &'static str, n: usize, width: usize, kept: usize) -> Launch {
        const MANY: usize = 512;
        let launch = Launch::rows(entry, n, width);
        let block = width.div_ceil(kept).next_multiple_of(32) as u32;
        Launch { block: if n >= MANY { launch.block.min(block) } else { launch.block }, ..launch }
    }
}
