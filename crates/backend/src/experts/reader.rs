//! Threads that read units into slabs, in the order in which they were requested, urgent ones first.
//!
//! It knows where the planes of units lie and where they go, and nothing of who wants them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::{Extent, Extents};

use super::layout::Room;
use super::source::Source;
use crate::{Cause, CompileError};
use sys::arena::Arena;

/// Threads. They wait for the disk and take no core.
const THREADS: usize = 8;
/// How long the end of a program waits for reads that are under way. A disk that stalls holds them up for longer; the
/// threads then end by themselves, and the memory that they write to with the last of them.
const PATIENCE: Duration = Duration::from_millis(500);

/// Where the units of a layer lie.
pub struct LayerFiles {
    /// Of gate, up and down, `[n_expert]` each.
    pub extents: [Vec<Extents>; 3],
    /// Where they go.
    pub rooms: [[Room; 3]; 3],
}

impl LayerFiles {
    /// The planes of an expert that are there, and where each goes.
    fn parts(&self, expert: usize) -> impl Iterator<Item = (&Extent, &Room)> {
        self.extents.iter().zip(&self.rooms).flat_map(move |(extents, rooms)| {
            let Extents { q, scales, biases } = &extents[expert];
            let planes = [Some(q), scales.as_ref(), biases.as_ref()];
            planes.into_iter().zip(rooms).filter_map(|(plane, room)| Some((plane?, room)))
        })
    }
}

/// The memory of slabs.
pub struct Slabs {
    arena: Arena,
    /// First byte of each slab behind `base`.
    offsets: Vec<usize>,
    /// Bytes of the arena before the first slab.
    base: usize,
}

impl Slabs {
    /// Slabs of these sizes, which are multiples of `align`.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(sizes: impl Iterator<Item = usize>, align: usize) -> Result<Slabs, CompileError> {
        let mut total = 0usize;
        let offsets = sizes.map(|size| {
            total = total.saturating_add(size);
            total - size
        });
        let offsets = offsets.collect();
        let arena = Arena::new("slabs of experts", total.saturating_add(align))?;
        let base = arena.ptr().addr().next_multiple_of(align) - arena.ptr().addr();
        Ok(Slabs { arena, offsets, base })
    }

    /// Byte `at` of a slab.
    pub fn ptr(&self, slab: u32, at: usize) -> *mut u8 {
        self.arena.ptr().wrapping_add(self.base + self.offsets[slab as usize] + at)
    }
}

/// A unit that was read, or was not.
pub struct Done {
    /// Its slab.
    pub slab: u32,
    /// Why not.
    pub error: Option<Cause>,
}

/// A unit in the queue.
struct Wanted {
    slab: u32,
    layer: u32,
    expert: u32,
    /// Parts that threads have taken, from the first on.
    taken: u32,
}

#[derive(Default)]
struct Queue {
    urgent: VecDeque<Wanted>,
    later: VecDeque<Wanted>,
    done: Vec<Done>,
    /// Parts of each slab that are not read yet, and what went wrong.
    left: Vec<(u32, Option<Cause>)>,
    bytes: u64,
    stop: bool,
}

struct Shared {
    source: Arc<dyn Source>,
    /// Names of the files, for errors.
    names: Vec<String>,
    layers: Arc<Vec<LayerFiles>>,
    slabs: Arc<Slabs>,
    queue: Mutex<Queue>,
    work: Condvar,
    finished: Condvar,
}

/// The threads and their queue.
pub struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system refuses one.
    pub fn new(
        source: Arc<dyn Source>,
        names: Vec<String>,
        layers: Arc<Vec<LayerFiles>>,
        slabs: Arc<Slabs>,
    ) -> Result<Readers, CompileError> {
        let n = slabs.offsets.len();
        let queue = Queue {
            urgent: VecDeque::with_capacity(n),
            later: VecDeque::with_capacity(n),
            done: Vec::with_capacity(n),
            left: (0..n).map(|_| (0, None)).collect(),
            ..Queue::default()
        };
        let queue = Mutex::new(queue);
        let shared =
            Arc::new(Shared { source, names, layers, slabs, queue, work: Condvar::new(), finished: Condvar::new() });
        let mut readers = Readers { shared, threads: Vec::with_capacity(THREADS) };
        for i in 0..THREADS {
            let shared = readers.shared.clone();
            let thread = std::thread::Builder::new().name(format!("read-{i}")).stack_size(256 << 10);
            let spawned = thread.spawn(move || shared.serve());
            readers.threads.push(spawned.map_err(|error| CompileError::Start {
                what: format!("{THREADS} threads that read experts"),
                why: format!("the system gave {i}: {error}"),
            })?);
        }
        Ok(readers)
    }

    /// Bytes that [`Readers::new`] allocates for so many slabs.
    pub fn bytes(n_slabs: usize) -> usize {
        n_slabs * (2 * size_of::<Wanted>() + size_of::<Done>() + size_of::<(u32, Option<Cause>)>() + size_of::<usize>())
    }

    /// Requests that an expert is read into a slab, which nobody reads or writes until it is done.
    pub fn request(&self, slab: u32, (layer, expert): (usize, usize), is_urgent: bool) {
        let n_parts = self.shared.layers[layer].parts(expert).count() as u32;
        let mut queue = self.shared.locked();
        queue.left[slab as usize] = (n_parts, None);
        let wanted = Wanted { slab, layer: layer as u32, expert: expert as u32, taken: 0 };
        if is_urgent {
            queue.urgent.push_back(wanted)
        } else {
            queue.later.push_back(wanted)
        }
        drop(queue);
        self.shared.work.notify_all();
    }

    /// Makes those of the later reads urgent for which `is_urgent` holds, and drops the others as far as they have not
    /// begun; `dropped` gets their slabs.
    pub fn sort_out(&self, is_urgent: impl Fn(u32) -> bool, mut dropped: impl FnMut(u32)) {
        let mut queue = self.shared.locked();
        for _ in 0..queue.later.len() {
            let Some(wanted) = queue.later.pop_front() else { break };
            if is_urgent(wanted.slab) {
                queue.urgent.push_back(wanted);
            } else if wanted.taken > 0 {
                queue.later.push_back(wanted);
            } else {
                dropped(wanted.slab);
            }
        }
    }

    /// Takes what was done since the last call; `each` may request more.
    pub fn poll(&self, mut each: impl FnMut(Done)) {
        let next = || self.shared.locked().done.pop();
        while let Some(done) = next() {
            each(done);
        }
    }

    /// Waits until something is done, or for `time`.
    pub fn wait(&self, time: Duration) {
        let queue = self.shared.locked();
        let is_idle = |queue: &mut Queue| queue.done.is_empty();
        drop(self.shared.finished.wait_timeout_while(queue, time, is_idle).unwrap_or_else(PoisonError::into_inner));
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.shared.locked().bytes
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        {
            let mut queue = self.shared.locked();
            queue.stop = true;
            queue.urgent.clear();
            queue.later.clear();
        }
        self.shared.work.notify_all();
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE && self.threads.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            // A thread that panicked has nothing to pass on.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut queue = self.locked();
        while !queue.stop {
            let Some((slab, layer, expert, part)) =
                queue.take(|layer, expert| self.layers[layer].parts(expert).count())
            else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let result = self.read(slab, layer, expert, part);
            queue = self.locked();
            let (left, error) = &mut queue.left[slab as usize];
            *left -= 1;
            let is_last = *left == 0;
            match result {
                Ok(bytes) => queue.bytes += bytes as u64,
                Err(cause) => *error = Some(cause),
            }
            if is_last {
                let error = queue.left[slab as usize].1.take();
                queue.done.push(Done { slab, error });
                self.finished.notify_all();
            }
        }
    }

    /// Reads a part of a unit.
    fn read(&self, slab: u32, layer: usize, expert: usize, part: usize) -> Result<usize, Cause> {
        let Some((from, room)) = self.layers[layer].parts(expert).nth(part) else { return Ok(0) };
        // SAFETY: the room lies inside the slab, which is zeroed memory, and which nobody else reads or writes before
        // all parts are done (`Readers::request`); parts have rooms of their own.
        let out = unsafe { std::slice::from_raw_parts_mut(self.slabs.ptr(slab, room.at), room.len) };
        match self.source.read(from, room.is_direct, out) {
            Ok(()) => Ok(from.len),
            Err(why) => Err(Cause::Io { file: self.names[from.file].clone(), offset: from.offset as u64, why }),
        }
    }
}

impl Queue {
    /// The next part to read; `n_parts` says how many a unit has.
    fn take(&mut self, n_parts: impl Fn(usize, usize) -> usize) -> Option<(u32, usize, usize, usize)> {
        let queue = if self.urgent.is_empty() { &mut self.later } else { &mut self.urgent };
        let wanted = queue.front_mut()?;
        let (slab, layer, expert) = (wanted.slab, wanted.layer as usize, wanted.expert as usize);
        let part = wanted.taken as usize;
        wanted.taken += 1;
        if part + 1 == n_parts(layer, expert) {
            queue.pop_front();
        }
        Some((slab, layer, expert, part))
    }
}
