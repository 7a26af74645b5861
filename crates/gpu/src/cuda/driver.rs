//! The CUDA driver: the few calls the backend makes, each checked. Knows no op and no plan.
//!
//! Everything here belongs to one context, the device's primary one. A context is current on a thread after
//! [`Context::enter`]; every other call wants that.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::gate::Gate;
use super::launch::Launch;

/// The oldest driver that has every call used here: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12000;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// What was tried, e.g. `cuMemAlloc_v2 of 1024 bytes`.
    pub call: String,
    /// What the driver says.
    pub why: String,
    /// Whether it was memory that ran out.
    pub is_memory: bool,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.why)
    }
}

type Result<T> = std::result::Result<T, DriverError>;

fn status(call: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a string of its own that is never freed, or null for a code it does not
    // know.
    let why = unsafe {
        sys::cuGetErrorString(code, &mut text);
        if text.is_null() { format!("{code:?}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(DriverError { call: call.into(), why, is_memory: code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY })
}

/// Calls the driver; arguments are evaluated inside `unsafe`, each use says why they are right.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => { status(stringify!($name), sys::$name($($arg),*)) };
}

/// Loads and initialises the driver; the version it speaks, e.g. 13000.
///
/// # Errors
/// There is no driver, it sees no device, or it is too old.
pub fn init() -> std::result::Result<i32, NoDevice> {
    // SAFETY: looks for the library by name, and initialises it as any program does.
    unsafe {
        if !sys::is_culib_present() {
            return Err(NoDevice::None("the NVIDIA driver (libcuda) is not installed".into()));
        }
        let mut version = 0;
        call!(cuDriverGetVersion(&mut version)).map_err(|e| NoDevice::Unusable(e.to_string()))?;
        if version < OLDEST_DRIVER {
            let version = cuda_version(version);
            return Err(NoDevice::Unusable(format!(
                "the NVIDIA driver speaks CUDA {version}, 12.0 is needed: update it"
            )));
        }
        match sys::cuInit(0) {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(NoDevice::None("the NVIDIA driver sees no device".into())),
            code => status("cuInit", code).map(|()| version).map_err(|e| NoDevice::Unusable(e.to_string())),
        }
    }
}

/// Why there is no device to compute with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoDevice {
    /// This machine has none.
    None(String),
    /// It has some, but none of this number.
    Number(String),
    /// There is one that cannot be used.
    Unusable(String),
}

impl fmt::Display for NoDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (NoDevice::None(why) | NoDevice::Number(why) | NoDevice::Unusable(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for NoDevice {}

/// `13.0` for 13000.
pub fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Number of devices.
pub fn device_count() -> Result<usize> {
    let mut n = 0;
    // SAFETY: the driver is initialised and writes one number.
    unsafe { call!(cuDeviceGetCount(&mut n))? };
    Ok(n.max(0) as usize)
}

/// What a device says of itself; no context is needed for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    device: sys::CUdevice,
    /// Name of the card.
    pub name: String,
    /// Compute capability, e.g. 90.
    pub arch: u32,
    /// Multiprocessors.
    pub sms: usize,
    /// Maximum shared memory of a block, in bytes.
    pub max_shared: usize,
}

impl Properties {
    /// Of a device by its number. [`init`] has succeeded.
    pub fn of(ordinal: usize) -> Result<Properties> {
        use sys::CUdevice_attribute as A;
        let mut device = 0;
        let mut name = [0; 256];
        // SAFETY: the driver is initialised, fills what the pointers name, and ends the name with a zero.
        let name = unsafe {
            call!(cuDeviceGet(&mut device, ordinal as i32))?;
            call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the driver writes one number.
            unsafe { call!(cuDeviceGetAttribute(&mut value, which, device))? };
            Ok::<_, DriverError>(value.max(0) as usize)
        };
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let max_shared = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let arch = (10 * major + minor) as u32;
        let (arch, max_shared) = match older_arch() {
            Some(older) if older < arch => (older, max_shared.min(shared_of(older))),
            _ => (arch, max_shared),
        };
        Ok(Properties { device, name, arch, sms, max_shared })
    }
}

static OLDER_ARCH: OnceLock<u32> = OnceLock::new();

/// Runs the kernels of an older compute capability (80 for 8.0) in place of the device's own, once for the process:
/// how forms for cards that are not there are tested and timed.
pub fn use_older_arch(arch: u32) {
    // Only the first call counts, as programs may have been compiled since.
    let _ = OLDER_ARCH.set(arch);
}

/// The compute capability that was named.
pub fn older_arch() -> Option<u32> {
    OLDER_ARCH.get().copied()
}

/// Maximum shared memory of a block on cards of a compute capability, in bytes (CUDA C++ Programming Guide, technical
/// specifications).
fn shared_of(arch: u32) -> usize {
    1024 * match arch {
        80 | 87 => 163,
        86 | 89 | 120 => 99,
        _ => 227,
    }
}

/// Bytes per second of a device's memory: two transfers a clock over its width.
pub fn memory_bandwidth(ordinal: usize) -> Result<f64> {
    use sys::CUdevice_attribute as A;
    let (mut device, mut clock, mut width) = (0, 0, 0);
    // SAFETY: the driver is initialised and writes one number each.
    unsafe {
        call!(cuDeviceGet(&mut device, ordinal as i32))?;
        call!(cuDeviceGetAttribute(&mut clock, A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device))?;
        call!(cuDeviceGetAttribute(&mut width, A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device))?;
    }
    Ok(2e3 * f64::from(clock) * f64::from(width) / 8.0)
}

/// A device and its primary context.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// Name of the card.
    pub name: String,
    /// Compute capability, e.g. 90.
    pub arch: u32,
    /// Multiprocessors.
    pub sms: usize,
    /// Maximum shared memory of a block, in bytes.
    pub max_shared: usize,
    /// The turns of all programs at the device. Calls that may wait until it is idle are made alone.
    pub gate: Arc<Gate>,
    /// Of a device that is not there ([`Context::blank`]), the next address that it gives out.
    blank: Option<AtomicU64>,
}

// SAFETY: the driver's contexts may be used from any thread; `enter` makes this one current where it is used.
unsafe impl Send for Context {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device by its number and makes it current on this thread. [`init`] has succeeded.
    pub fn new(ordinal: usize) -> Result<Arc<Context>> {
        let Properties { device, name, arch, sms, max_shared } = Properties::of(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut raw, device))? };
        let context = Context { device, raw, name, arch, sms, max_shared, gate: gate(device), blank: None };
        context.enter()?;
        Ok(Arc::new(context))
    }

    /// A device that is not there: memory is addresses, streams keep a list of what is launched, and nothing happens.
    /// To see what a step would queue.
    pub fn blank(arch: u32, sms: usize, max_shared: usize) -> Arc<Context> {
        let name = format!("compute capability {}.{}", arch / 10, arch % 10);
        let (device, raw, blank) = (0, std::ptr::null_mut(), Some(AtomicU64::new(1 << 20)));
        Arc::new(Context { device, raw, name, arch, sms, max_shared, gate: Arc::default(), blank })
    }

    /// Makes it current on this thread.
    pub fn enter(&self) -> Result<()> {
        if self.blank.is_some() {
            return Ok(());
        }
        // SAFETY: the context is retained until drop.
        unsafe { call!(cuCtxSetCurrent(self.raw)) }
    }

    /// Lets kernels on this device read and write the memory of another; false where the machine cannot.
    pub fn reach(&self, other: &Context) -> Result<bool> {
        let mut can = 0;
        // SAFETY: the driver writes one number.
        unsafe { call!(cuDeviceCanAccessPeer(&mut can, self.device, other.device))? };
        if can == 0 {
            return Ok(false);
        }
        self.enter()?;
        // SAFETY: both contexts are retained.
        match unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            code => status("cuCtxEnablePeerAccess", code).map(|()| true),
        }
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.blank.is_some() {
            return;
        }
        // SAFETY: retained once in `new`; all that lives in it holds an `Arc` of it and is gone.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The gate of a device: the primary context is one for all programs of the process.
fn gate(device: sys::CUdevice) -> Arc<Gate> {
    static GATES: Mutex<Option<HashMap<sys::CUdevice, Arc<Gate>>>> = Mutex::new(None);
    let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(gates.get_or_insert_default().entry(device).or_default())
}

/// An address in device memory.
pub type Ptr = u64;

/// A piece of device memory.
#[derive(Debug)]
pub struct Memory {
    ptr: Ptr,
    bytes: usize,
    context: Arc<Context>,
}

impl Memory {
    /// Allocates it, at a multiple of 256; no bytes are a null pointer.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Memory> {
        let mut ptr = 0;
        if let Some(next) = &context.blank {
            ptr = if bytes > 0 { next.fetch_add((bytes as u64 + 511) & !255, Ordering::Relaxed) } else { 0 };
        } else if bytes > 0 {
            let _alone = context.gate.alone();
            // SAFETY: the driver writes one address.
            unsafe { call!(cuMemAlloc_v2(&mut ptr, bytes)) }
                .map_err(|e| DriverError { call: format!("{} of {bytes} bytes", e.call), ..e })?;
        }
        Ok(Memory { ptr, bytes, context: Arc::clone(context) })
    }

    /// Its address.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.ptr != 0 && self.context.blank.is_none() && self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: allocated by `new`; programs wait for their stream before they drop memory.
            unsafe { sys::cuMemFree_v2(self.ptr) };
        }
    }
}

/// Host memory that the device copies from and to without a detour.
#[derive(Debug)]
pub struct Pinned {
    ptr: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeros.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned> {
        let mut ptr = std::ptr::null_mut();
        let len = bytes.max(1);
        let _alone = context.gate.alone();
        // SAFETY: the driver writes one address, of memory of that length.
        unsafe {
            call!(cuMemHostAlloc(&mut ptr, len, 0))
                .map_err(|e| DriverError { call: format!("{} of {len} bytes", e.call), ..e })?;
            std::ptr::write_bytes(ptr.cast::<u8>(), 0, len);
        }
        Ok(Pinned { ptr: ptr.cast(), bytes, context: Arc::clone(context) })
    }

    /// As numbers. The owner reads what the device wrote only after it has waited for the stream.
    pub fn words<T: Word>(&self) -> &[T] {
        // SAFETY: the allocation is aligned to a page, initialised, and every bit pattern is a number.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }

    /// To be written. The owner writes only when no copy is under way.
    pub fn words_mut<T: Word>(&mut self) -> &mut [T] {
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }
}

impl Pinned {
    /// Its address on the device.
    pub fn device_ptr(&self) -> Result<Ptr> {
        let mut ptr = 0;
        // SAFETY: allocated by `new`; the driver writes one address.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&mut ptr, self.ptr.cast(), 0))? };
        Ok(ptr)
    }

    /// A word that the host and the device change while the other looks at it. Code that uses it takes no references
    /// by [`Pinned::words`].
    pub fn atomic(&self, word: usize) -> &AtomicU32 {
        assert!(4 * (word + 1) <= self.bytes);
        // SAFETY: inside the allocation, which is aligned to a page; the device stores whole words.
        unsafe { AtomicU32::from_ptr(self.ptr.cast::<u32>().add(word)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: allocated by `new`, and nothing copies any more.
            unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
        }
    }
}

/// Numbers for which every bit pattern is a value.
pub trait Word: Copy {}
impl Word for u8 {}
impl Word for u32 {}
impl Word for f32 {}

/// A queue of work.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
    /// What was launched, on a device that is not there.
    launched: RefCell<Vec<Launch>>,
}

// SAFETY: a stream may be used from any thread, one at a time.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        if context.blank.is_some() {
            return Ok(Stream { raw, context: Arc::clone(context), launched: RefCell::default() });
        }
        let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let _alone = context.gate.alone();
        // SAFETY: the driver writes one handle.
        unsafe { call!(cuStreamCreate(&mut raw, flag))? };
        Ok(Stream { raw, context: Arc::clone(context), launched: RefCell::default() })
    }

    /// Waits for everything that was queued.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the stream lives.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }

    /// Takes the list of what was launched on a device that is not there.
    pub fn take_launched(&self) -> Vec<Launch> {
        self.launched.take()
    }

    /// Whether everything that was queued is done.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => status("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Queues a store of `value`, behind everything that was queued before.
    ///
    /// # Safety
    /// `at` is a word of memory that the device reaches.
    pub unsafe fn store(&self, at: Ptr, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { call!(cuStreamWriteValue32_v2(self.raw, at, value, 0)) }
    }

    /// What is queued behind this waits until the word is `value`, or at most 2^31 past it.
    ///
    /// # Safety
    /// As [`Stream::store`], and the word becomes so.
    pub unsafe fn wait_until(&self, at: Ptr, value: u32) -> Result<()> {
        // SAFETY: the caller's promise; no flag means "at least", cyclically.
        unsafe { call!(cuStreamWaitValue32_v2(self.raw, at, value, 0)) }
    }

    /// What is queued behind this waits for what was queued before the mark, on its stream.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both live.
        unsafe { call!(cuStreamWaitEvent(self.raw, event.raw, 0)) }
    }

    /// Queues a copy of the first `bytes` of `from` to the device.
    ///
    /// # Safety
    /// `to` has room for them, and `from` stays as it is until the copy is done.
    pub unsafe fn upload(&self, to: Ptr, from: &Pinned, bytes: usize) -> Result<()> {
        assert!(bytes <= from.bytes);
        // SAFETY: the caller's promise, and the length was checked.
        unsafe { call!(cuMemcpyHtoDAsync_v2(to, from.ptr.cast(), bytes, self.raw)) }
    }

    /// Queues a copy to `to`, from its byte `at` on.
    ///
    /// # Safety
    /// `from` is a piece of device memory of `bytes`, and `to` is not read before the copy is done.
    pub unsafe fn download(&self, to: &mut Pinned, at: usize, from: Ptr, bytes: usize) -> Result<()> {
        assert!(at + bytes <= to.bytes);
        // SAFETY: the caller's promise, and the length was checked.
        unsafe { call!(cuMemcpyDtoHAsync_v2(to.ptr.add(at).cast(), from, bytes, self.raw)) }
    }

    /// Queues a copy inside device memory.
    ///
    /// # Safety
    /// Both are pieces of device memory of `bytes` that do not overlap.
    pub unsafe fn copy(&self, to: Ptr, from: Ptr, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw)) }
    }

    /// Queues a fill with bytes.
    ///
    /// # Safety
    /// `at` is a piece of device memory of `bytes`.
    pub unsafe fn fill(&self, at: Ptr, value: u8, bytes: usize) -> Result<()> {
        if self.context.blank.is_some() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { call!(cuMemsetD8Async(at, value, bytes, self.raw)) }
    }

    /// Queues a kernel with one struct of arguments. With `early` its blocks may start while the kernel before it ends
    /// (programmatic dependent launch); it waits by itself for what it reads.
    ///
    /// # Safety
    /// `args` is the struct the kernel takes, and what it points to is as the kernel wants it.
    pub unsafe fn launch<A>(&self, kernel: &Function, geometry: Geometry, args: &A, early: bool) -> Result<()> {
        if self.context.blank.is_some() {
            let Geometry { grid, block, shared } = geometry;
            self.launched.borrow_mut().push(Launch { entry: kernel.name, grid, block, shared });
            return Ok(());
        }
        // SAFETY: zeros are a value of this plain struct and union.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let Geometry { grid, block, shared } = geometry;
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.raw,
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the arguments before it returns; the rest is the caller's promise.
        unsafe { call!(cuLaunchKernelEx(&config, kernel.raw, params.as_mut_ptr(), std::ptr::null_mut())) }
    }

    /// Queues a mark of the time.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both live.
        unsafe { call!(cuEventRecord(event.raw, self.raw)) }
    }

    /// Records what `queue` queues, and makes a graph of it. The caller is alone at the gate.
    pub fn capture<E: From<DriverError>>(
        &self,
        queue: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and captures nothing yet.
        unsafe { call!(cuStreamBeginCapture_v2(self.raw, mode))? };
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture that began above ends, whatever was queued.
        let ended = unsafe { call!(cuStreamEndCapture(self.raw, &mut graph)) };
        let mut raw = std::ptr::null_mut();
        let made = match (queued, ended) {
            (Err(e), _) => Err(e),
            (_, Err(e)) => Err(e.into()),
            // SAFETY: the graph was just captured.
            (Ok(()), Ok(())) => unsafe { call!(cuGraphInstantiateWithFlags(&mut raw, graph, 0)) }.map_err(E::from),
        };
        if !graph.is_null() {
            // SAFETY: made above; what was instantiated does not need it.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        made.map(|()| Graph { raw, context: Arc::clone(&self.context) })
    }

    /// Queues a graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both live; what the graph's kernels point to belongs to the program that captured it.
        unsafe { call!(cuGraphLaunch(graph.raw, self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.blank.is_none() && self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: created by `new`.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A mark of the time on a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle with one owner.
unsafe impl Send for Event {}

impl Event {
    /// An event that keeps its time.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        let (mut raw, mut version) = (std::ptr::null_mut(), 0);
        let _alone = context.gate.alone();
        // SAFETY: the driver writes one number and one handle.
        unsafe {
            call!(cuDriverGetVersion(&mut version))?;
            if version < 12080 {
                // `until` is missing there.
                return Err(DriverError {
                    call: "time kernels".into(),
                    why: "CUDA 12.8 is needed".into(),
                    is_memory: false,
                });
            }
            call!(cuEventCreate(&mut raw, 0))?;
        }
        Ok(Event { raw, context: Arc::clone(context) })
    }

    /// An event that streams wait for.
    pub fn without_time(context: &Arc<Context>) -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        let flag = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let _alone = context.gate.alone();
        // SAFETY: the driver writes one handle.
        unsafe { call!(cuEventCreate(&mut raw, flag))? };
        Ok(Event { raw, context: Arc::clone(context) })
    }

    /// Milliseconds from this mark to a later one; both were passed.
    pub fn until(&self, later: &Event) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: both live; the driver writes one number.
        unsafe { call!(cuEventElapsedTime_v2(&mut ms, self.raw, later.raw))? };
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: created by `new`.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// Work that was recorded once and is queued by one call.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: a handle with one owner.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: made by `capture`; the program has waited for its stream.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}

/// Blocks, threads of a block, and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub grid: [u32; 3],
    pub block: u32,
    pub shared: u32,
}

/// Code on the device.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: a handle with one owner.
unsafe impl Send for Module {}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Module> {
        let mut raw = std::ptr::null_mut();
        if context.blank.is_some() {
            return Ok(Module { raw, context: Arc::clone(context) });
        }
        let _alone = context.gate.alone();
        // SAFETY: images come from NVRTC, or from the cache that keeps them with their hash.
        unsafe { call!(cuModuleLoadData(&mut raw, image.as_ptr().cast()))? };
        Ok(Module { raw, context: Arc::clone(context) })
    }

    /// An entry point by its name, allowed as much dynamic shared memory as the device has beside its own.
    /// `has_all_shared`: a multiprocessor gives shared memory all it can. One that must divide its memory in another
    /// way waits until it is idle, so launches that share multiprocessors say the same.
    pub fn function(&self, name: &'static str, has_all_shared: bool) -> Result<Function> {
        use sys::CUfunction_attribute as A;
        if self.context.blank.is_some() {
            return Ok(Function { raw: std::ptr::null_mut(), name });
        }
        let c_name = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        let _alone = self.context.gate.alone();
        // SAFETY: the module lives; the driver writes one handle and one number, and reads a string that ends with a
        // zero.
        unsafe {
            call!(cuModuleGetFunction(&mut raw, self.raw, c_name.as_ptr()))
                .map_err(|e| DriverError { call: format!("{} of {name}", e.call), ..e })?;
            let mut fixed = 0;
            call!(cuFuncGetAttribute(&mut fixed, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, raw))?;
            let dynamic = (self.context.max_shared as i32 - fixed).max(0);
            call!(cuFuncSetAttribute(raw, A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic))?;
            if has_all_shared {
                call!(cuFuncSetAttribute(raw, A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))?;
            }
        }
        Ok(Function { raw, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.blank.is_none() && self.context.enter().is_ok() {
            let _alone = self.context.gate.alone();
            // SAFETY: loaded by `load`; the program has waited for its stream.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// An entry point; it keeps its module alive.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    raw: sys::CUfunction,
    name: &'static str,
}

// SAFETY: a handle; functions may be launched from any thread.
unsafe impl Send for Function {}
