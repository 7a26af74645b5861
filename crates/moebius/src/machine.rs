//! What the machine has: cores, free memory, peak memory of this process, read bandwidth, a terminal to show progress
//! on.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::Result;
use cpu::numa::{self, Numa};
use cpu::read_bandwidth;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

use crate::args::NumaArg;
use crate::out::note;

/// Open files that this process asks the system for: connections, and the files of some large models.
#[cfg(unix)]
const MAX_DESCRIPTORS: u64 = 8192;

/// Cores this process may use.
pub fn cores() -> usize {
    sys::cores::count()
}

/// Returns the threads that a user wants, all cores by default.
///
/// # Errors
/// They are none, or too many.
pub fn threads(wanted: Option<usize>) -> Result<usize> {
    let threads = wanted.unwrap_or_else(cores);
    anyhow::ensure!((1..=1024).contains(&threads), "--threads must be between 1 and 1024");
    static TOLD: std::sync::Once = std::sync::Once::new();
    if threads > cores() {
        TOLD.call_once(|| note!("warning: {threads} threads on {} cores are slower than one a core", cores()));
    }
    Ok(threads)
}

/// Returns this machine's address in its network, as other machines reach it. Nothing is sent: the system is asked which
/// of its addresses it would send from, to an address that is for documents alone.
pub fn lan_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

/// Bytes of memory that can be had without swapping, of the machine or of the container that the process runs in, where
/// the system says so.
pub fn free_memory() -> Option<usize> {
    let mut system = System::new();
    system.refresh_memory();
    // Where /proc cannot be read, as when no file can be opened, the library knows nothing and would panic.
    if system.total_memory() == 0 {
        return None;
    }
    let machine = system.available_memory();
    let container = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
    let free = usize::try_from(machine.min(container)).ok().filter(|&free| free > 0);
    #[cfg(windows)]
    let free = free.map(|free| sys::windows::job_memory().map_or(free, |left| free.min(left)));
    free
}

/// Bytes that models may take where nobody says: what is free less an eighth, which is left to others.
pub fn usable_memory() -> Option<usize> {
    free_memory().map(|free| free - free / 8)
}

/// Bytes of memory that this process has resident, where the system says so.
pub fn resident_memory() -> Option<usize> {
    #[cfg(windows)]
    if let Ok((now, _)) = sys::windows::resident() {
        return Some(now);
    }
    let pid = sysinfo::get_current_pid().ok()?;
    let mut system = System::new();
    let wanted = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, wanted);
    usize::try_from(system.process(pid)?.memory()).ok()
}

/// Raises the number of files that this process may have open as far as it may, up to [`MAX_DESCRIPTORS`]. Returns the
/// number and how many are open, where the system tells.
pub fn raise_descriptors() -> Option<(usize, usize)> {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let wanted = maximum.map_or(MAX_DESCRIPTORS, |most| most.min(MAX_DESCRIPTORS));
        let limit = match current {
            Some(now) if now < wanted => {
                let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok();
                if raised { wanted } else { now }
            }
            Some(now) => now,
            None => MAX_DESCRIPTORS,
        };
        let used = std::fs::read_dir("/dev/fd").map_or(0, |open| open.count());
        Some((usize::try_from(limit).unwrap_or(usize::MAX), used))
    }
    #[cfg(not(unix))]
    None
}

/// Whether the end of the terminal means nothing to this process, as `nohup` has it. True where the system does not
/// tell: then nothing is changed.
#[cfg(unix)]
pub fn ignores_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Its number is 1.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_none_or(|mask| mask & 1 == 1)
}

/// Peak resident memory of this process, in bytes, where the system says so.
fn peak_resident() -> Option<usize> {
    #[cfg(windows)]
    if let Ok((_, peak)) = sys::windows::resident() {
        return Some(peak);
    }
    kilobytes("/proc/self/status", "VmHWM:")
}

fn kilobytes(file: &str, field: &str) -> Option<usize> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|l| l.starts_with(field))?;
    line[field.len()..].trim().trim_end_matches(" kB").trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Name of the processor, where the system says so.
pub fn processor() -> String {
    if !cfg!(target_os = "linux") {
        let mut system = System::new();
        system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
        let name = system.cpus().first().map(|cpu| cpu.brand().trim()).filter(|name| !name.is_empty());
        return name.unwrap_or(std::env::consts::ARCH).to_string();
    }
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// Places the memory and the threads of this process on the machine's NUMA nodes. Returns what the user should know.
pub fn settle_on_nodes(numa: NumaArg) -> Option<String> {
    let (numa, name) = match numa {
        NumaArg::Distribute => (Numa::Distribute, "distribute"),
        NumaArg::Isolate => (Numa::Isolate, "isolate"),
        NumaArg::Numactl => return None,
    };
    match numa::apply(numa) {
        Ok(0 | 1) => Some(format!("--numa {name} has no effect: this machine has one NUMA node")),
        Ok(_) => None,
        Err(why) => Some(format!("--numa {name} has no effect: {why}")),
    }
}

/// The read bandwidth of the machine, measured again and again, as it changes on shared machines.
pub struct Bandwidth {
    threads: usize,
    samples: Vec<f64>,
    /// Peak resident memory outside the measurements.
    peak_resident: Option<usize>,
}

impl Bandwidth {
    /// For this number of threads.
    pub fn new(threads: usize) -> Bandwidth {
        Bandwidth { threads, samples: Vec::new(), peak_resident: None }
    }

    /// Measures it once: a tenth of a second.
    pub fn measure(&mut self) -> Result<()> {
        self.peak_resident = self.peak_resident();
        self.samples.push(read_bandwidth(self.threads)?);
        // The buffer is no part of what the model takes: the peak starts anew where the system lets it.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Ok(())
    }

    /// Takes the mean of what was measured, in bytes a second, and keeps the last measurement for the next mean.
    pub fn take(&mut self) -> f64 {
        let mean = self.samples.iter().sum::<f64>() / self.samples.len().max(1) as f64;
        self.samples.drain(..self.samples.len().saturating_sub(1));
        mean
    }

    /// Peak resident memory of this process, in bytes, where the system says so, without what measuring takes.
    pub fn peak_resident(&self) -> Option<usize> {
        let now = peak_resident();
        if self.samples.is_empty() { now } else { now.max(self.peak_resident) }
    }
}

/// Folders with kernels for GPUs that the command line names: sources, and kernels compiled ahead.
static KERNELS: OnceLock<[Option<PathBuf>; 2]> = OnceLock::new();

/// Sets the folders with kernels, once for the process.
pub fn use_kernels(sources: Option<PathBuf>, compiled: Option<PathBuf>) {
    // Only the first call of a process counts, as for what it compiles.
    let _ = KERNELS.set([sources, compiled]);
}

/// Returns the folder of kernel sources that replace the embedded ones, for work on kernels.
pub fn kernel_sources() -> Option<PathBuf> {
    KERNELS.get()?[0].clone()
}

/// Returns the folder of kernels that were compiled ahead: the one that was named, or `cuda` next to the program.
pub fn kernels_folder() -> Option<PathBuf> {
    let named = KERNELS.get().and_then(|[_, compiled]| compiled.clone());
    let default = || Some(std::env::current_exe().ok()?.canonicalize().ok()?.parent()?.join("cuda"));
    named.or_else(default).filter(|folder| folder.is_dir())
}

/// Shows on a terminal how far the compiling of kernels is.
pub fn show_compiling(done: usize, all: usize) {
    static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);
    let mut shown = BAR.lock().unwrap_or_else(PoisonError::into_inner);
    let bar = shown.get_or_insert_with(|| {
        let bar = progress(Some(all as u64));
        if let Ok(style) =
            ProgressStyle::with_template("{spinner} compiling kernels for this GPU, once: {pos} of {len}")
        {
            bar.set_style(style);
        }
        bar
    });
    bar.set_position(done as u64);
    bar.tick();
    if done == all {
        bar.finish_and_clear();
        *shown = None;
    }
}

/// Progress of long work, on a terminal only; a bar of `len` steps, or a spinner.
pub fn progress(len: Option<u64>) -> ProgressBar {
    let terminal = std::io::stderr().is_terminal();
    ProgressBar::with_draw_target(
        len,
        if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
    )
}

/// Progress through the weights of a model, of which there are `n_values`.
///
/// # Errors
/// None that is known: the form is fixed.
pub fn weights_progress(n_values: u64) -> Result<ProgressBar> {
    let bar = progress(Some(n_values));
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent}% of the weights, {eta} left")?);
    Ok(bar)
}

/// `1.9 GB`-like text for a number of bytes (powers of ten, as bandwidth and disks are counted).
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// `30.5 B`-like text for a number of parameters.
pub fn count(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.1} B", n as f64 / 1e9),
        1_000_000.. => format!("{:.1} M", n as f64 / 1e6),
        _ => n.to_string(),
    }
}

/// Returns where the program may keep what it can make again: `$XDG_CACHE_HOME/moebius` or `~/.cache/moebius`, and the
/// like on other systems; `None` where there is no home.
pub fn cache_folder() -> Option<PathBuf> {
    Folder::Cache.path()
}

/// Folders of this program that belong to its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folder {
    /// What can be made again.
    Cache,
    /// Settings.
    Config,
    /// What is remembered.
    State,
}

impl Folder {
    /// Returns its path, by the system's custom; `None` where no variable names the user's folders. Nothing is made.
    pub fn path(self) -> Option<PathBuf> {
        self.path_of(|name| std::env::var_os(name))
    }

    fn path_of(self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let (windows, xdg, usual) = match self {
            Folder::Cache if cfg!(target_os = "macos") => return Some(folder("HOME")?.join("Library/Caches/moebius")),
            Folder::Cache => ("LOCALAPPDATA", "XDG_CACHE_HOME", ".cache"),
            Folder::Config => ("APPDATA", "XDG_CONFIG_HOME", ".config"),
            Folder::State => ("LOCALAPPDATA", "XDG_STATE_HOME", ".local/state"),
        };
        let parent = match cfg!(windows) {
            true => folder(windows)?,
            // A relative path is to be ignored, says the XDG Base Directory Specification.
            false => folder(xdg).filter(|path| path.is_absolute()).or_else(|| Some(folder("HOME")?.join(usual)))?,
        };
        Some(parent.join("moebius"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(unix, not(target_os = "macos")))]
    #[test]
    fn folders_are_the_users() {
        let with = |set: &'static [(&str, &str)]| {
            move |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        let cases: [(Folder, &'static [(&str, &str)], Option<&str>); 6] = [
            (Folder::Cache, &[("HOME", "/h")], Some("/h/.cache/moebius")),
            (Folder::Config, &[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")], Some("/x/moebius")),
            (Folder::State, &[("HOME", "/h"), ("XDG_STATE_HOME", "x")], Some("/h/.local/state/moebius")),
            (Folder::State, &[("HOME", "/h"), ("XDG_STATE_HOME", "")], Some("/h/.local/state/moebius")),
            (Folder::Config, &[("XDG_CACHE_HOME", "/x")], None),
            (Folder::Cache, &[("HOME", "")], None),
        ];
        for (folder, set, expected) in cases {
            assert_eq!(folder.path_of(with(set)), expected.map(PathBuf::from), "{folder:?} {set:?}");
        }
    }

    #[test]
    fn bytes_read_well() {
        for (n, text) in
            [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (18_309_536, "18.3 MB"), (1_940_000_000, "1.94 GB")]
        {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn bandwidth_is_the_mean_since_it_was_taken() {
        let mut bandwidth = Bandwidth { samples: vec![1.0, 3.0, 5.0], ..Bandwidth::new(1) };
        assert_eq!([bandwidth.take(), bandwidth.take()], [3.0, 5.0]);
    }
}
