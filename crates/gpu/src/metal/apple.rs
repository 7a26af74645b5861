//! A GPU of a Mac, through Apple's Metal: replays lists as command buffers with one concurrent encoder each.
//!
//! It knows no op and no model. **It has been type-checked only, never run**: what Metal does with it is unknown.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block2::RcBlock;
use objc2::available;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLCreateSystemDefaultDevice, MTLDevice,
    MTLDispatchType, MTLGPUFamily, MTLLanguageVersion, MTLLibrary, MTLMathMode, MTLResidencySet,
    MTLResidencySetDescriptor, MTLResourceOptions, MTLSize,
};

use super::DeviceInfo;
use crate::commands::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit};

type Device = Retained<ProtocolObject<dyn MTLDevice>>;
type Queue = Retained<ProtocolObject<dyn MTLCommandQueue>>;
type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;
type Residency = Retained<ProtocolObject<dyn MTLResidencySet>>;

/// Memory that the GPU and this process share.
struct Memory {
    buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    /// What a buffer without a copy points into.
    _mapped: Option<Mapped>,
}

// SAFETY: Metal's buffers may be used from any thread, one at a time, which `&mut` of the GPU that owns them gives.
unsafe impl Send for Memory {}

/// A residency set, used under the lock that it lies in.
struct Resident(Residency);

// SAFETY: as of `Memory`; the lock gives one thread at a time.
unsafe impl Send for Resident {}

/// What keeps buffers wired between steps: systems let go of what a set has not asked for lately.
struct Beat {
    set: Resident,
    /// Whether buffers were added that the set has not committed.
    is_changed: bool,
    last_step: Instant,
    is_over: bool,
}

/// A residency set and the thread that asks for it again and again.
struct Heart {
    beat: Arc<(Mutex<Beat>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

/// How long after the last step buffers stay wired.
const AWAKE: Duration = Duration::from_secs(180);

impl Heart {
    fn new(set: Residency) -> Heart {
        let beat = Beat { set: Resident(set), is_changed: false, last_step: Instant::now(), is_over: false };
        let beat = Arc::new((Mutex::new(beat), Condvar::new()));
        // Idle memory goes after about a second, from macOS 26 on at once (llama.cpp, issues 10119 and 24074).
        let period = if available!(macos = 26.0) { Duration::from_millis(5) } else { Duration::from_millis(500) };
        let shared = Arc::clone(&beat);
        // Without the thread a pause costs the first step after it time, and nothing else.
        let thread =
            std::thread::Builder::new().name("metal residency".into()).spawn(move || run_heart(&shared, period));
        Heart { beat, thread: thread.ok() }
    }

    fn lock(&self) -> MutexGuard<'_, Beat> {
        self.beat.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step begins: its buffers are to be wired.
    fn step(&self) {
        let mut beat = self.lock();
        let was_asleep = beat.last_step.elapsed() >= AWAKE;
        if beat.is_changed {
            beat.set.0.commit();
        }
        if beat.is_changed || was_asleep {
            beat.set.0.requestResidency();
        }
        beat.is_changed = false;
        beat.last_step = Instant::now();
        if was_asleep {
            self.beat.1.notify_all();
        }
    }
}

fn run_heart((beat, woken): &(Mutex<Beat>, Condvar), period: Duration) {
    let mut beat = beat.lock().unwrap_or_else(PoisonError::into_inner);
    while !beat.is_over {
        if beat.last_step.elapsed() >= AWAKE {
            beat = woken.wait(beat).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        autoreleasepool(|_| beat.set.0.requestResidency());
        beat = woken.wait_timeout(beat, period).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// A list that has finished: its time on the GPU, or why it failed.
type Outcome = Result<Duration, String>;

/// What completion handlers write and `wait` reads.
#[derive(Default)]
struct Done {
    /// Number of finished lists: they finish in order.
    last: u64,
    /// Outcomes of lists that were not waited for.
    outcomes: VecDeque<(u64, Outcome)>,
}

/// The default GPU of the machine.
pub struct Apple {
    device: Device,
    queue: Queue,
    caps: Caps,
    memory: Vec<Memory>,
    pipelines: Vec<Pipeline>,
    /// Buffers that stay wired while lists run; systems before macOS 15 have none.
    resident: Option<Heart>,
    submitted: u64,
    done: Arc<(Mutex<Done>, Condvar)>,
    /// The first error: nothing runs after it.
    broken: Option<GpuError>,
}

/// Apple's families, newest first.
const FAMILIES: [(MTLGPUFamily, u32); 4] =
    [(MTLGPUFamily::Apple10, 10), (MTLGPUFamily::Apple9, 9), (MTLGPUFamily::Apple8, 8), (MTLGPUFamily::Apple7, 7)];

// MTLCreateSystemDefaultDevice finds nothing without it.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

fn family(device: &ProtocolObject<dyn MTLDevice>) -> u32 {
    FAMILIES.iter().find(|(family, _)| device.supportsFamily(*family)).map_or(0, |(_, number)| *number)
}

fn default_device() -> Result<Device, GpuError> {
    MTLCreateSystemDefaultDevice().ok_or_else(|| GpuError::Lost("this Mac shows no Metal device".into()))
}

/// The default GPU.
///
/// # Errors
/// [`GpuError::Lost`] where there is none.
pub fn device() -> Result<DeviceInfo, GpuError> {
    autoreleasepool(|_| {
        let device = default_device()?;
        let family = family(&device);
        Ok(DeviceInfo {
            name: device.name().to_string(),
            family,
            budget_bytes: device.recommendedMaxWorkingSetSize() as usize,
            unusable: super::compile::check_family(family).err(),
        })
    })
}

impl Apple {
    /// Opens the default GPU.
    ///
    /// # Errors
    /// [`GpuError::Lost`] where there is none, or it has no queue.
    pub fn open() -> Result<Apple, GpuError> {
        autoreleasepool(|_| {
            let device = default_device()?;
            let queue = device.newCommandQueue().ok_or_else(|| GpuError::Lost("the GPU gives no queue".into()))?;
            let caps = Caps {
                name: device.name().to_string(),
                family: family(&device),
                max_buffer: device.maxBufferLength() as u64,
            };
            let resident = if available!(macos = 15.0) {
                let set = device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).ok();
                set.inspect(|set| queue.addResidencySet(set)).map(Heart::new)
            } else {
                None
            };
            Ok(Apple {
                device,
                queue,
                caps,
                memory: Vec::new(),
                pipelines: Vec::new(),
                resident,
                submitted: 0,
                done: Arc::default(),
                broken: None,
            })
        })
    }

    fn check(&self) -> Result<(), GpuError> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, e: GpuError) -> GpuError {
        self.broken.get_or_insert(e).clone()
    }

    fn keep(&mut self, memory: Memory) -> Buf {
        if let Some(heart) = &self.resident {
            let mut beat = heart.lock();
            beat.set.0.addAllocation(ProtocolObject::from_ref(&*memory.buffer));
            beat.is_changed = true;
        }
        self.memory.push(memory);
        Buf(self.memory.len() as u32 - 1)
    }

    /// First byte of a span.
    fn bytes(&self, span: Span) -> Result<NonNull<u8>, GpuError> {
        self.check()?;
        let buffer = self.memory.get(span.buf.0 as usize).map(|memory| &memory.buffer);
        match buffer {
            Some(buffer) if span.at.checked_add(span.len).is_some_and(|end| end <= buffer.length() as u64) => {
                // SAFETY: the first byte of the span, or its end where it is empty, lies in the buffer.
                Ok(unsafe { buffer.contents().cast::<u8>().add(span.at as usize) })
            }
            _ => Err(GpuError::Rule(format!("{span:?} is in no buffer"))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        self.lock().last == self.submitted
    }

    fn encode(&self, encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, list: &List) -> Result<(), GpuError> {
        let rule = |why: &str| GpuError::Rule(why.into());
        for cmd in &list.cmds {
            match *cmd {
                Cmd::Pipe(pipe) => {
                    let pipeline = self.pipelines.get(pipe.0 as usize).ok_or_else(|| rule("no such kernel"))?;
                    encoder.setComputePipelineState(pipeline);
                }
                Cmd::Bind { slot, span, .. } => {
                    self.bytes(span)?;
                    let buffer = &self.memory[span.buf.0 as usize].buffer;
                    // SAFETY: the span was found to lie in the buffer, which lives as long as the GPU; kernels stay in
                    // the spans that are bound, which the simulator checks.
                    unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), span.at as usize, slot.into()) };
                }
                Cmd::Bytes { slot, at, len } => {
                    let bytes = list.bytes.get(at as usize..).and_then(|rest| rest.get(..len as usize));
                    let bytes = bytes.ok_or_else(|| rule("parameters past the list's bytes"))?;
                    // SAFETY: Metal copies the bytes before the call returns.
                    unsafe {
                        encoder.setBytes_length_atIndex(
                            NonNull::from(bytes).cast::<c_void>(),
                            bytes.len(),
                            slot.into(),
                        );
                    }
                }
                Cmd::Groups { grid, threads } => {
                    let [width, height, depth] = grid.map(|n| n as usize);
                    let of_group = MTLSize { width: threads as usize, height: 1, depth: 1 };
                    encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, of_group);
                }
                Cmd::Barrier => encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers),
            }
        }
        Ok(())
    }

    fn start(&mut self, list: &List) -> Result<Ticket, GpuError> {
        let lost = |why: &str| GpuError::Lost(why.into());
        if let Some(heart) = &self.resident {
            heart.step();
        }
        let buffer = self.queue.commandBuffer().ok_or_else(|| lost("the queue gives no command buffer"))?;
        let encoder = buffer
            .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
            .ok_or_else(|| lost("the command buffer gives no encoder"))?;
        let encoded = self.encode(&encoder, list);
        // An encoder must be ended before it is dropped.
        encoder.endEncoding();
        encoded?;
        let ticket = self.submitted + 1;
        let done = Arc::clone(&self.done);
        let handler = RcBlock::new(move |buffer: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
            // SAFETY: Metal hands its handler the command buffer that has finished.
            let buffer = unsafe { buffer.as_ref() };
            let outcome = match buffer.status() {
                MTLCommandBufferStatus::Completed => {
                    Ok(Duration::try_from_secs_f64(buffer.GPUEndTime() - buffer.GPUStartTime()).unwrap_or_default())
                }
                status => Err(buffer.error().map_or_else(
                    || format!("a command buffer ended with status {}", status.0),
                    |e| e.localizedDescription().to_string(),
                )),
            };
            let mut state = done.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.last = ticket;
            state.outcomes.push_back((ticket, outcome));
            done.1.notify_all();
        });
        // SAFETY: the block owns what it uses, and Metal copies it.
        unsafe { buffer.addCompletedHandler(RcBlock::as_ptr(&handler)) };
        buffer.commit();
        self.submitted = ticket;
        Ok(Ticket(ticket))
    }
}

/// Compiles a kernel.
fn pipeline(device: &ProtocolObject<dyn MTLDevice>, unit: &Unit) -> Result<Pipeline, GpuError> {
    let failed = |why: String| GpuError::Build { name: unit.name.clone(), why };
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    if available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Safe);
    } else {
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
    }
    let source = NSString::from_str(&unit.source);
    let library = device.newLibraryWithSource_options_error(&source, Some(&options));
    let library = library.map_err(|e| failed(e.localizedDescription().to_string()))?;
    let function = library.newFunctionWithName(&NSString::from_str(unit.kernel));
    let function = function.ok_or_else(|| failed("the library has no such function".into()))?;
    let pipeline = device.newComputePipelineStateWithFunction_error(&function);
    pipeline.map_err(|e| failed(e.localizedDescription().to_string()))
}

impl Gpu for Apple {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
        let options = MTLResourceOptions::StorageModeShared;
        let buffer = self.device.newBufferWithLength_options(bytes as usize, options);
        let buffer = buffer.ok_or(GpuError::Memory { what, bytes })?;
        Ok(self.keep(Memory { buffer, _mapped: None }))
    }

    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        let Some((base, len)) = mapped.pages() else { return Ok(None) };
        // The GPU only reads weights, so that Metal need not order passes by them.
        let options = MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        // SAFETY: whole pages of a mapping that lives as long as `mapped`, which the memory keeps; nothing writes to
        // them, and no deallocator is given.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(base.cast::<c_void>(), len, options, None)
        };
        Ok(buffer.map(|buffer| self.keep(Memory { buffer, _mapped: Some(mapped.clone()) })))
    }

    fn write(&mut self, to: Span, bytes: &[u8]) -> Result<(), GpuError> {
        if bytes.len() as u64 != to.len || !self.is_idle() {
            return Err(GpuError::Rule(format!("{} bytes for {to:?}, or a list under way", bytes.len())));
        }
        let at = self.bytes(to)?;
        // SAFETY: the span lies in a buffer of shared memory, of this length, and no list is under way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&mut self, from: Span, out: &mut [u8]) -> Result<(), GpuError> {
        if out.len() as u64 != from.len || !self.is_idle() {
            return Err(GpuError::Rule(format!("{} bytes of {from:?}, or a list under way", out.len())));
        }
        let at = self.bytes(from)?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        self.check()?;
        let n_workers = std::thread::available_parallelism().map_or(4, usize::from).min(units.len().max(1));
        let next = std::sync::atomic::AtomicUsize::new(0);
        let device = &*self.device;
        let mut built: Vec<(usize, Result<Pipeline, GpuError>)> = std::thread::scope(|scope| {
            let work = || {
                let mut mine = Vec::new();
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(unit) = units.get(i) else { return mine };
                    mine.push((i, autoreleasepool(|_| pipeline(device, unit))));
                }
            };
            let threads: Vec<_> = (0..n_workers).map(|_| scope.spawn(work)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect()
        });
        built.sort_by_key(|(i, _)| *i);
        let first = self.pipelines.len() as u32;
        for (_, pipeline) in built {
            self.pipelines.push(pipeline?);
        }
        Ok((0..units.len() as u32).map(|i| Pipe(first + i)).collect())
    }

    fn threads(&self, pipe: Pipe) -> u32 {
        let pipeline = self.pipelines.get(pipe.0 as usize);
        pipeline.map_or(0, |pipeline| pipeline.maxTotalThreadsPerThreadgroup() as u32)
    }

    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        self.check()?;
        autoreleasepool(|_| self.start(list)).map_err(|e| self.fail(e))
    }

    fn wait(&mut self, ticket: Ticket, limit: Duration) -> Result<Times, GpuError> {
        self.check()?;
        let end = Instant::now() + limit;
        let done = Arc::clone(&self.done);
        let mut state = done.0.lock().unwrap_or_else(PoisonError::into_inner);
        while state.last < ticket.0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return Err(self.fail(GpuError::Late(limit)));
            }
            state = done.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut gpu = Duration::ZERO;
        let mut failed = None;
        while let Some((_, outcome)) = state.outcomes.pop_front_if(|(done, _)| *done <= ticket.0) {
            match outcome {
                Ok(time) => gpu += time,
                Err(why) => failed = failed.or(Some(why)),
            }
        }
        drop(state);
        match failed {
            Some(why) => Err(self.fail(GpuError::Lost(why))),
            None => Ok(Times { gpu }),
        }
    }
}

impl Drop for Apple {
    fn drop(&mut self) {
        if let Some(heart) = &mut self.resident {
            heart.lock().is_over = true;
            heart.beat.1.notify_all();
            heart.thread.take().map(JoinHandle::join);
        }
        // What runs still reads the memory that goes now. A GPU that does not come back keeps it.
        let done = Arc::clone(&self.done);
        let mut state = done.0.lock().unwrap_or_else(PoisonError::into_inner);
        let end = Instant::now() + Duration::from_secs(5);
        while state.last < self.submitted {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                std::mem::forget(std::mem::take(&mut self.memory));
                return;
            }
            state = done.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        if let Some(heart) = &self.resident {
            let beat = heart.lock();
            self.queue.removeResidencySet(&beat.set.0);
            beat.set.0.endResidency();
        }
    }
}
