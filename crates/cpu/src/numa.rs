//! Machines whose memory belongs to nodes (NUMA): which there are, and where the memory and the threads of this process
//! go. What a thread allocates, and what it is the first to read of a file, lies in memory where its policy says; the
//! threads that it starts have the same policy.

use std::path::Path;
use std::sync::OnceLock;

use thiserror::Error;

/// Where the system tells of nodes.
const NODES: &str = "/sys/devices/system/node";
/// The highest number of a CPU or a node.
const HIGHEST: usize = 8191;

/// Where memory and threads go on a machine of several nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numa {
    /// Pages go to all nodes in turn, so that the memory of all of them is read at once, and the threads of a pool are
    /// divided among the nodes: each may run on any CPU of its node.
    Distribute,
    /// All threads run on the node that the caller is on, whose memory is used as long as there is some.
    Isolate,
}

/// Why memory and threads could not be placed.
#[derive(Debug, Error)]
pub enum NumaError {
    /// The list of nodes is missing: another system than Linux, or a container that hides it.
    #[error("this system does not say which memory belongs to which CPUs")]
    Unknown,
    /// The system refused, as it may in a container.
    #[error("{what}: {source}")]
    System {
        /// What was asked of the system.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
}

/// A node that has memory and CPUs which this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    id: usize,
    cpus: Vec<usize>,
}

/// The nodes that pools of threads are divided among.
static DIVIDED: OnceLock<Vec<Node>> = OnceLock::new();

/// Places the memory and the threads of this process from now on: of the calling thread, and of those that it or its
/// descendants start. Returns the number of nodes; with fewer than two nothing was to be done.
///
/// # Errors
/// [`NumaError::Unknown`] elsewhere than on Linux, [`NumaError::System`] when the system refuses, as containers may.
pub fn apply(numa: Numa) -> Result<usize, NumaError> {
    let nodes = nodes(Path::new(NODES), &system::allowed()?).ok_or(NumaError::Unknown)?;
    if nodes.len() < 2 {
        return Ok(nodes.len());
    }
    let n_nodes = nodes.len();
    // Memory first: where the system refuses that, nothing is done.
    match numa {
        Numa::Distribute => {
            system::interleave(&nodes.iter().map(|node| node.id).collect::<Vec<_>>())?;
            DIVIDED.get_or_init(|| nodes);
        }
        Numa::Isolate => {
            let here = system::current_cpu()?;
            let node = nodes.iter().find(|node| node.cpus.contains(&here)).ok_or(NumaError::Unknown)?;
            system::prefer(node.id)?;
            system::run_on(&node.cpus)?;
        }
    }
    Ok(n_nodes)
}

/// Keeps the calling thread, the worker of this number of a pool, on its node, where pools are divided among nodes, or
/// in its group of processors, where the system has several.
pub(super) fn settle(worker: usize, threads: usize) {
    if let Some(nodes) = DIVIDED.get() {
        // A thread that may run anywhere is slower, not wrong.
        let _ = system::run_on(&nodes[node_of(worker, threads, nodes.len())].cpus);
    } else {
        sys::cores::settle(worker, threads);
    }
}

/// The node of a worker: neighbours share one.
fn node_of(worker: usize, threads: usize, nodes: usize) -> usize {
    worker * nodes / threads
}

/// The nodes below a folder with memory and some of the CPUs `allowed`, in order; `None` where there is no such folder.
fn nodes(folder: &Path, allowed: &[usize]) -> Option<Vec<Node>> {
    let list = |path: &str| std::fs::read_to_string(folder.join(path)).ok().and_then(|text| list(&text));
    let with_memory = list("has_memory")?;
    let node = |id: usize| {
        let cpus = list(&format!("node{id}/cpulist"))?.into_iter().filter(|cpu| allowed.contains(cpu));
        Some(Node { id, cpus: cpus.collect() }).filter(|node| !node.cpus.is_empty())
    };
    Some(with_memory.into_iter().filter_map(node).collect())
}

/// Reads the kernel's form of a list of numbers: `0-3,8`. `None` where it is another.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last > HIGHEST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(target_os = "linux")]
mod system {
    use std::io::Error;

    use super::{HIGHEST, NumaError};

    const WORD: usize = std::ffi::c_ulong::BITS as usize;
    /// A set of CPUs or nodes, as the kernel takes it.
    type Mask = [std::ffi::c_ulong; (HIGHEST + 1) / WORD];

    /// The set of these numbers, none above [`HIGHEST`].
    fn mask(numbers: &[usize]) -> Mask {
        let mut mask: Mask = [0; (HIGHEST + 1) / WORD];
        numbers.iter().for_each(|&n| mask[n / WORD] |= 1 << (n % WORD));
        mask
    }

    fn checked(what: &'static str, result: impl Into<i64>) -> Result<i64, NumaError> {
        let result = result.into();
        if result < 0 { Err(NumaError::System { what, source: Error::last_os_error() }) } else { Ok(result) }
    }

    /// The CPUs that the calling thread may use.
    pub fn allowed() -> Result<Vec<usize>, NumaError> {
        let mut mask = mask(&[]);
        // SAFETY: the kernel writes no more than the size that it is told.
        let result = unsafe { libc::sched_getaffinity(0, size_of::<Mask>(), mask.as_mut_ptr().cast()) };
        checked("ask for the CPUs of this process", result)?;
        Ok((0..=HIGHEST).filter(|n| mask[n / WORD] >> (n % WORD) & 1 == 1).collect())
    }

    /// Lets the calling thread run on these CPUs only.
    pub fn run_on(cpus: &[usize]) -> Result<(), NumaError> {
        // SAFETY: the kernel reads the size that it is told.
        let result = unsafe { libc::sched_setaffinity(0, size_of::<Mask>(), mask(cpus).as_ptr().cast()) };
        checked("choose the CPUs of a thread", result).map(drop)
    }

    pub fn current_cpu() -> Result<usize, NumaError> {
        // SAFETY: a call without arguments.
        checked("ask which CPU this is", unsafe { libc::sched_getcpu() }).map(|cpu| cpu as usize)
    }

    pub fn interleave(nodes: &[usize]) -> Result<(), NumaError> {
        policy(libc::MPOL_INTERLEAVE, nodes)
    }

    pub fn prefer(node: usize) -> Result<(), NumaError> {
        policy(libc::MPOL_PREFERRED, &[node])
    }

    /// Sets the policy of the calling thread's memory.
    fn policy(mode: i32, nodes: &[usize]) -> Result<(), NumaError> {
        let mask = mask(nodes);
        // The kernel takes one bit less than it is told.
        let bits = HIGHEST + 2;
        // SAFETY: the kernel reads so many bits less one, which the mask has.
        let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), bits) };
        checked("choose the nodes of memory (set_mempolicy)", result).map(drop)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::NumaError;

    pub fn allowed() -> Result<Vec<usize>, NumaError> {
        Err(NumaError::Unknown)
    }

    pub fn run_on(_: &[usize]) -> Result<(), NumaError> {
        Err(NumaError::Unknown)
    }

    pub fn current_cpu() -> Result<usize, NumaError> {
        Err(NumaError::Unknown)
    }

    pub fn interleave(_: &[usize]) -> Result<(), NumaError> {
        Err(NumaError::Unknown)
    }

    pub fn prefer(_: usize) -> Result<(), NumaError> {
        Err(NumaError::Unknown)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(list("\n"), Some(vec![]));
        assert_eq!(list("0"), Some(vec![0]));
        for bad in ["3-1", "a", "0-", "1-999999999999", "0 1"] {
            assert_eq!(list(bad), None, "{bad}");
        }
    }

    /// Two nodes of four CPUs, one of memory alone, as of CXL, and one of CPUs alone.
    #[test]
    fn nodes_have_memory_and_cpus_of_this_process() {
        let folder = std::env::temp_dir().join(format!("moebius-nodes-{}", std::process::id()));
        for (id, cpus) in [(0, "0-3\n"), (1, "4-7\n"), (2, "\n"), (3, "8\n")] {
            std::fs::create_dir_all(folder.join(format!("node{id}"))).unwrap();
            std::fs::write(folder.join(format!("node{id}/cpulist")), cpus).unwrap();
        }
        std::fs::write(folder.join("has_memory"), "0-2\n").unwrap();
        let node = |id, cpus: &[usize]| Node { id, cpus: cpus.to_vec() };
        let all: Vec<usize> = (0..9).collect();
        let found = [&all[..], &[1, 2, 6], &[5], &[8]].map(|allowed| nodes(&folder, allowed).unwrap());
        let expected = [
            vec![node(0, &[0, 1, 2, 3]), node(1, &[4, 5, 6, 7])],
            vec![node(0, &[1, 2]), node(1, &[6])],
            vec![node(1, &[5])],
            vec![],
        ];
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, expected);
        assert_eq!(nodes(&folder, &all), None);
    }

    #[test]
    fn workers_are_divided_evenly() {
        for (threads, nodes) in [(1, 2), (2, 2), (7, 2), (16, 2), (96, 8), (5, 4), (3, 8)] {
            let mut counts = vec![0; nodes];
            (0..threads).for_each(|worker| counts[node_of(worker, threads, nodes)] += 1);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1, "{threads} threads on {nodes} nodes: {counts:?}");
        }
    }

    /// The system takes what it is told: asked again, a thread has these CPUs.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_stays_where_it_is_put() {
        for cpu in system::allowed().unwrap() {
            let put = move || {
                system::run_on(&[cpu]).unwrap();
                (system::allowed().unwrap(), system::current_cpu().unwrap())
            };
            assert_eq!(std::thread::spawn(put).join().unwrap(), (vec![cpu], cpu));
        }
    }
}
