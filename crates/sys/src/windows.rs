//! What Windows is asked for and std has no call for. Other crates call these functions where `cfg(windows)` holds.

use std::ffi::c_void;
use std::fs::File;
use std::io::{Error, Result};
use std::os::windows::ffi::OsStrExt;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::Duration;

use windows_sys::Win32::Foundation::{ERROR_HANDLE_EOF, ERROR_IO_PENDING, FILETIME, HANDLE, INVALID_HANDLE_VALUE};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_FLAG_NO_BUFFERING, FILE_FLAG_OVERLAPPED, FILE_GENERIC_READ, FILE_SHARE_DELETE,
    FILE_SHARE_READ, FILE_SHARE_WRITE, FILE_TYPE_DISK, FILE_TYPE_PIPE, GetDiskFreeSpaceExW, GetFileInformationByHandle,
    GetFileType, ReOpenFile, ReadFile,
};
use windows_sys::Win32::System::Console::{
    ENABLE_VIRTUAL_TERMINAL_PROCESSING, GetConsoleMode, GetStdHandle, STD_ERROR_HANDLE, STD_OUTPUT_HANDLE,
    SetConsoleMode,
};
use windows_sys::Win32::System::IO::{GetOverlappedResult, OVERLAPPED};
use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION,
    JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOB_OBJECT_LIMIT_PROCESS_TIME,
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, QueryInformationJobObject,
    SetInformationJobObject,
};
use windows_sys::Win32::System::LibraryLoader::SetDllDirectoryW;
use windows_sys::Win32::System::ProcessStatus::{GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::SystemInformation::GROUP_AFFINITY;
use windows_sys::Win32::System::Threading::{
    CreateEventW, GetActiveProcessorCount, GetActiveProcessorGroupCount, GetCurrentProcess, GetCurrentThread,
    GetCurrentThreadId, GetProcessAffinityMask, GetThreadTimes, OpenThread, SetThreadGroupAffinity, SetThreadPriority,
    THREAD_PRIORITY_IDLE, THREAD_QUERY_LIMITED_INFORMATION, THREAD_SET_INFORMATION,
};

/// Sets the process up, first of all: a console understands colors, and libraries are not looked for in the current
/// folder, where a stranger's files may lie.
pub fn set_up() {
    for stream in [STD_OUTPUT_HANDLE, STD_ERROR_HANDLE] {
        // SAFETY: the handle is the process's own, or none, which the calls refuse; one writes a number that is there.
        unsafe {
            let (console, mut mode) = (GetStdHandle(stream), 0);
            if GetConsoleMode(console, &mut mode) != 0 {
                SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
            }
        }
    }
    // SAFETY: an empty text that ends with a zero.
    unsafe { SetDllDirectoryW([0].as_ptr()) };
}

/// From now on libraries are looked for in this folder, too, and still not in the current one.
///
/// # Errors
/// The system refuses.
pub fn find_libraries_in(folder: &Path) -> Result<()> {
    // SAFETY: the name ends with a zero.
    checked(unsafe { SetDllDirectoryW(name_of(folder).as_ptr()) })
}

/// A path as the system reads it.
fn name_of(path: &Path) -> Vec<u16> {
    path.as_os_str().encode_wide().chain([0]).collect()
}

/// The error of the last call, where it returned 0.
fn checked(result: i32) -> Result<()> {
    if result == 0 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// The number of a file's volume, and that of the file there.
///
/// # Errors
/// The system does not say.
pub fn identity(file: &File) -> Result<(u64, u64)> {
    let mut info = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: the file is open, and the call writes one struct, which is there.
    checked(unsafe { GetFileInformationByHandle(file.as_raw_handle(), &mut info) })?;
    let number = u64::from(info.nFileIndexHigh) << 32 | u64::from(info.nFileIndexLow);
    Ok((u64::from(info.dwVolumeSerialNumber), number))
}

/// Bytes that this user may still write where a folder is.
///
/// # Errors
/// There is no such folder.
pub fn free_on_disk(folder: &Path) -> Result<u64> {
    let mut free = 0;
    // SAFETY: the name ends with a zero, and the call writes one number; null says that the others are not wanted.
    checked(unsafe { GetDiskFreeSpaceExW(name_of(folder).as_ptr(), &mut free, null_mut(), null_mut()) })?;
    Ok(free)
}

/// Whether an open file is on a disk or a pipe: it has an end, unlike a console.
pub fn is_file_or_pipe(file: &impl AsRawHandle) -> bool {
    // SAFETY: the handle is open, or none, whose type is unknown.
    matches!(unsafe { GetFileType(file.as_raw_handle()) }, FILE_TYPE_DISK | FILE_TYPE_PIPE)
}

/// A file that is read past the system's cache, by several threads at a time: reads through a handle of std wait for
/// each other.
#[derive(Debug)]
pub struct Unbuffered(File);

impl Unbuffered {
    /// Opens the file that is open once more, whatever its name stands for by now.
    ///
    /// # Errors
    /// The file system has no such reads.
    pub fn open(file: &File) -> Result<Unbuffered> {
        let share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
        let flags = FILE_FLAG_NO_BUFFERING | FILE_FLAG_OVERLAPPED;
        // SAFETY: the file is open.
        let handle = unsafe { ReOpenFile(file.as_raw_handle(), FILE_GENERIC_READ, share, flags) };
        match handle {
            INVALID_HANDLE_VALUE => Err(Error::last_os_error()),
            // SAFETY: a new handle, which no other owner closes.
            _ => Ok(Unbuffered(unsafe { File::from_raw_handle(handle) })),
        }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Reads to `out` from byte `offset` on, fewer bytes at the end of the file. Offset, length and address are
    /// multiples of a disk's block, which the system checks.
    ///
    /// # Errors
    /// They are not, or the disk fails.
    pub fn read_at(&self, out: &mut [u8], offset: u64) -> Result<usize> {
        let event = event()?;
        let mut request = OVERLAPPED { hEvent: event.as_raw_handle(), ..OVERLAPPED::default() };
        request.Anonymous.Anonymous.Offset = offset as u32;
        request.Anonymous.Anonymous.OffsetHigh = (offset >> 32) as u32;
        let len = u32::try_from(out.len()).unwrap_or(1 << 30);
        let mut n = 0;
        // SAFETY: the file is open; `out` and `request` stay where they are until the second call has waited for the
        // end of the read, which it also does after an error.
        let result = unsafe {
            let begun = checked(ReadFile(self.0.as_raw_handle(), out.as_mut_ptr(), len, null_mut(), &mut request));
            match begun {
                Err(error) if error.raw_os_error() != Some(ERROR_IO_PENDING as i32) => Err(error),
                _ => checked(GetOverlappedResult(self.0.as_raw_handle(), &request, &mut n, 1)),
            }
        };
        match result {
            Err(error) if error.raw_os_error() == Some(ERROR_HANDLE_EOF as i32) => Ok(0),
            result => result.map(|()| n as usize),
        }
    }
}

/// What a read of this thread is waited for by.
fn event() -> Result<OwnedHandle> {
    // SAFETY: without attributes and name; it is reset by hand, as overlapped reads require, and new.
    let handle = unsafe { CreateEventW(null(), 1, 0, null()) };
    // SAFETY: a new handle, which no other owner closes.
    if handle.is_null() { Err(Error::last_os_error()) } else { Ok(unsafe { OwnedHandle::from_raw_handle(handle) }) }
}

/// Resident memory of this process, in bytes: now, and the most that there was.
///
/// # Errors
/// The system does not say.
pub fn resident() -> Result<(usize, usize)> {
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    // SAFETY: the call writes one struct of this size, which is there.
    checked(unsafe { GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, size_of_val(&counters) as u32) })?;
    Ok((counters.WorkingSetSize, counters.PeakWorkingSetSize))
}

/// Bytes that the job of this process, such as a container, still allows it to commit; none where no job limits it.
pub fn job_memory() -> Option<usize> {
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
    // SAFETY: the calls write one struct each, of these sizes; no job is the one that the process is in.
    unsafe {
        checked(GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, size_of_val(&counters) as u32)).ok()?;
        let (to, size) = ((&raw mut limits).cast::<c_void>(), size_of_val(&limits) as u32);
        let kind = JobObjectExtendedLimitInformation;
        checked(QueryInformationJobObject(null_mut(), kind, to, size, null_mut())).ok()?;
    }
    let is_set = |flag| limits.BasicLimitInformation.LimitFlags & flag != 0;
    let of_process = is_set(JOB_OBJECT_LIMIT_PROCESS_MEMORY).then_some(limits.ProcessMemoryLimit);
    // What others in the job hold is not told.
    let of_job = is_set(JOB_OBJECT_LIMIT_JOB_MEMORY).then_some(limits.JobMemoryLimit);
    let limit = of_process.into_iter().chain(of_job).min()?;
    Some(limit.saturating_sub(counters.PagefileUsage))
}

/// Limits this process, for good: bytes that it commits, and its time in user mode. One that goes beyond either fails
/// to allocate, or ends.
///
/// # Errors
/// The system refuses.
pub fn limit_process(bytes: usize, time: Duration) -> Result<()> {
    let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION { ProcessMemoryLimit: bytes, ..Default::default() };
    limits.BasicLimitInformation.LimitFlags =
        JOB_OBJECT_LIMIT_PROCESS_MEMORY | JOB_OBJECT_LIMIT_PROCESS_TIME | JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION;
    limits.BasicLimitInformation.PerProcessUserTimeLimit = i64::try_from(time.as_nanos() / 100).unwrap_or(i64::MAX);
    // SAFETY: a job without attributes and name, whose handle stays open until the process ends; the second call reads
    // one struct of this size.
    unsafe {
        let job = CreateJobObjectW(null(), null());
        checked(i32::from(!job.is_null()))?;
        let (from, size) = ((&raw const limits).cast::<c_void>(), size_of_val(&limits) as u32);
        checked(SetInformationJobObject(job, JobObjectExtendedLimitInformation, from, size))?;
        checked(AssignProcessToJobObject(job, GetCurrentProcess()))
    }
}

/// Processors in each group that threads of this process may run in. A thread runs in one group of at most 64.
pub fn processor_groups() -> Vec<usize> {
    // SAFETY: the calls take numbers; those that write do so to numbers which are there.
    unsafe {
        let n_groups = GetActiveProcessorGroupCount();
        if n_groups > 1 {
            return (0..n_groups).map(|group| GetActiveProcessorCount(group) as usize).collect();
        }
        // A user may have chosen some.
        let (mut of_process, mut of_system) = (0, 0);
        match checked(GetProcessAffinityMask(GetCurrentProcess(), &mut of_process, &mut of_system)) {
            Ok(()) => vec![of_process.count_ones() as usize],
            Err(_) => vec![GetActiveProcessorCount(0) as usize],
        }
    }
}

/// Lets the calling thread run on all processors of a group, and on no others.
///
/// # Errors
/// There is no such group.
pub fn run_in_group(group: u16) -> Result<()> {
    // SAFETY: the first call takes a number; the second reads one struct.
    unsafe {
        let n = GetActiveProcessorCount(group);
        let mask = usize::MAX.checked_shr(usize::BITS.saturating_sub(n)).unwrap_or(0);
        let affinity = GROUP_AFFINITY { Mask: mask, Group: group, Reserved: [0; 3] };
        checked(SetThreadGroupAffinity(GetCurrentThread(), &affinity, null_mut()))
    }
}

/// A thread of this process, whether it is alive or not.
#[derive(Debug)]
pub struct Thread(OwnedHandle);

impl Thread {
    /// The thread that calls.
    ///
    /// # Errors
    /// The system gives no handle.
    pub fn current() -> Result<Thread> {
        let rights = THREAD_QUERY_LIMITED_INFORMATION | THREAD_SET_INFORMATION;
        // SAFETY: takes numbers; the thread is alive, as it calls.
        let handle = unsafe { OpenThread(rights, 0, GetCurrentThreadId()) };
        // SAFETY: a new handle, which no other owner closes.
        if handle.is_null() {
            Err(Error::last_os_error())
        } else {
            Ok(Thread(unsafe { OwnedHandle::from_raw_handle(handle) }))
        }
    }

    /// The time of the processor that it has taken.
    ///
    /// # Errors
    /// The system does not say.
    pub fn time(&self) -> Result<Duration> {
        let [mut begin, mut end, mut kernel, mut user] = [FILETIME::default(); 4];
        let handle: HANDLE = self.0.as_raw_handle();
        // SAFETY: the handle is open, and the call writes four structs, which are there.
        checked(unsafe { GetThreadTimes(handle, &mut begin, &mut end, &mut kernel, &mut user) })?;
        let ticks = |time: FILETIME| u64::from(time.dwHighDateTime) << 32 | u64::from(time.dwLowDateTime);
        Ok(Duration::from_nanos((ticks(kernel) + ticks(user)).saturating_mul(100)))
    }

    /// Gives it the lowest rank.
    ///
    /// # Errors
    /// The system refuses.
    pub fn give_way(&self) -> Result<()> {
        // SAFETY: the handle is open.
        checked(unsafe { SetThreadPriority(self.0.as_raw_handle(), THREAD_PRIORITY_IDLE) })
    }

    /// Its rank.
    #[cfg(test)]
    pub fn rank(&self) -> i32 {
        // SAFETY: the handle is open.
        unsafe { windows_sys::Win32::System::Threading::GetThreadPriority(self.0.as_raw_handle()) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use super::*;

    const BLOCK: usize = 4096;

    /// Memory that begins with a block.
    fn blocks(room: &mut Vec<u8>, n: usize) -> &mut [u8] {
        room.resize((n + 1) * BLOCK, 0xee);
        let at = room.as_ptr().align_offset(BLOCK);
        &mut room[at..at + n * BLOCK]
    }

    #[test]
    fn reads_past_the_cache_by_many_threads() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..40 * BLOCK + 100).map(|i| (i * 7 % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        let direct = Unbuffered::open(file.as_file()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (direct, bytes) = (&direct, &bytes);
                scope.spawn(move || {
                    let mut room = Vec::new();
                    let out = blocks(&mut room, 3);
                    for i in 0..200 {
                        let from = (thread * 5 + i) % 42 * BLOCK;
                        let n = direct.read_at(out, from as u64).unwrap();
                        let expected = bytes.get(from..).unwrap_or_default();
                        assert_eq!(out[..n], expected[..expected.len().min(3 * BLOCK)], "from {from}");
                    }
                });
            }
        });
        assert_eq!(identity(direct.file()).unwrap(), identity(file.as_file()).unwrap());
    }

    #[test]
    fn files_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| File::create(folder.path().join(name)).unwrap());
        assert_ne!(identity(&a).unwrap(), identity(&b).unwrap());
        assert_eq!(identity(&a).unwrap(), identity(&a.try_clone().unwrap()).unwrap());
        assert!(is_file_or_pipe(&a) && !is_file_or_pipe(&File::open("NUL").unwrap()));
        assert!(free_on_disk(folder.path()).unwrap() > 0);
        free_on_disk(&folder.path().join("none")).unwrap_err();
    }

    #[test]
    fn resident_memory_follows_what_is_written() {
        const BYTES: usize = 64 << 20;
        let (before, _) = resident().unwrap();
        let held = std::hint::black_box(vec![1u8; BYTES]);
        let (with, _) = resident().unwrap();
        drop(held);
        let (after, peak) = resident().unwrap();
        assert!(with >= before + BYTES / 2 && peak >= before + BYTES / 2, "{before} {with} {after} {peak}");
    }

    #[test]
    fn a_thread_runs_in_its_group() {
        let groups = processor_groups();
        assert!(!groups.is_empty() && groups.iter().all(|&n| (1..=64).contains(&n)), "{groups:?}");
        std::thread::spawn(|| run_in_group(0).unwrap()).join().unwrap();
        run_in_group(groups.len() as u16).unwrap_err();
    }

    /// In a separate process: the limits are for good.
    #[test]
    fn a_process_keeps_to_its_limits() {
        const TASK: &str = "MOEBIUS_TEST_LIMITED";
        const LIMIT: usize = 256 << 20;
        if std::env::var_os(TASK).is_none() {
            assert_eq!(job_memory().filter(|&left| left <= LIMIT), None);
            let name = "windows::tests::a_process_keeps_to_its_limits";
            let child = std::process::Command::new(std::env::current_exe().unwrap()).arg(name).env(TASK, "1").status();
            assert!(child.unwrap().success());
            return;
        }
        limit_process(LIMIT, Duration::from_secs(60)).unwrap();
        // Wine takes the limit, and neither tells nor keeps it.
        if std::env::var_os("WINEPREFIX").is_none() {
            let left = job_memory().unwrap();
            assert!(left > 0 && left < LIMIT, "{left}");
            assert!(Vec::<u8>::new().try_reserve_exact(2 * LIMIT).is_err());
        }
    }
}
