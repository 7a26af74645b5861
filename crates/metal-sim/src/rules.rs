//! What a list must keep to before anything runs: Metal's limits and the project's own rules.

use gpu::commands::{Cmd, List, Pipe, Span, Use};

use crate::protocol::Message;

/// Slots of a kernel.
const N_SLOTS: usize = 31;
/// Maximum number of bytes that a list may bind as parameters at once.
const MAX_BYTES: u32 = 4096;
/// Offsets that a GPU accepts for what a pointer points to.
const MAX_ALIGN: u64 = 16;

/// A parameter of a kernel that is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    pub slot: u32,
    /// Size of what it points to.
    pub size: u32,
    pub is_const: bool,
    /// A reference to parameters, rather than a pointer to many.
    pub is_ref: bool,
}

/// A built kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub name: String,
    pub module: u32,
    pub index: u32,
    pub params: Vec<Param>,
    pub threads: u32,
}

/// What is bound to a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    Span(Span, Use),
    Bytes(u32, u32),
}

/// A dispatch with everything it has bound.
#[derive(Clone, Debug)]
struct Dispatch {
    pipe: Pipe,
    bound: Vec<(u8, Bound)>,
    grid: [u32; 3],
    threads: u32,
}

/// What a list is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub dispatches: usize,
    pub barriers: usize,
    /// Barriers behind which no dispatch up to the next one meets one before it.
    pub needless: usize,
}

/// A checked list, for the runner.
pub struct Checked {
    epochs: Vec<Vec<Dispatch>>,
    pub counts: Counts,
}

impl Checked {
    /// Spans that the list binds.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.epochs.iter().flatten().flat_map(|d| &d.bound).filter_map(|(_, bound)| match bound {
            Bound::Span(span, _) => Some(*span),
            Bound::Bytes(..) => None,
        })
    }

    /// Writes it for the runner.
    pub fn encode(&self, kernels: &[Kernel], bytes: &[u8], message: &mut Message) {
        message.word(self.epochs.len() as u32);
        for epoch in &self.epochs {
            message.word(epoch.len() as u32);
            for dispatch in epoch {
                let kernel = &kernels[dispatch.pipe.0 as usize];
                message.word(kernel.module);
                message.word(kernel.index);
                dispatch.grid.into_iter().chain([dispatch.threads]).for_each(|x| message.word(x));
                message.word(dispatch.bound.len() as u32);
                for &(slot, bound) in &dispatch.bound {
                    match bound {
                        Bound::Span(span, used) => {
                            message.word(0);
                            message.word(u32::from(slot));
                            message.word(span.buf.0);
                            message.long(span.at);
                            message.long(span.len);
                            message.word(match used {
                                Use::Read => 0,
                                Use::Write => 1,
                                Use::Update => 2,
                            });
                        }
                        Bound::Bytes(at, len) => {
                            message.word(1);
                            message.word(u32::from(slot));
                            message.word(len);
                            message.bytes(&bytes[at as usize..(at + len) as usize]);
                        }
                    }
                }
            }
        }
    }
}

/// Checks a list against the kernels and the sizes of the buffers.
pub fn check(list: &List, kernels: &[Kernel], sizes: &[u64]) -> Result<Checked, String> {
    let mut epochs = vec![Vec::new()];
    let mut open: Option<(Pipe, Vec<(u8, Bound)>)> = None;
    for (i, cmd) in list.cmds.iter().enumerate() {
        let at = |why: String| format!("command {i}: {why}");
        match *cmd {
            Cmd::Pipe(pipe) => {
                if open.is_some() {
                    return Err(at("a kernel is chosen, and the one before was not dispatched".into()));
                }
                if pipe.0 as usize >= kernels.len() {
                    return Err(at(format!("pipe {} of {}", pipe.0, kernels.len())));
                }
                open = Some((pipe, Vec::new()));
            }
            Cmd::Bind { slot, span, used } => {
                check_span(span, sizes).map_err(at)?;
                // The runner keeps its history by words.
                if !span.at.is_multiple_of(4) {
                    return Err(at(format!("a span that begins at byte {}", span.at)));
                }
                bind(&mut open, slot, Bound::Span(span, used)).map_err(at)?;
            }
            Cmd::Bytes { slot, at: first, len } => {
                if len == 0 || len > MAX_BYTES || first as usize + len as usize > list.bytes.len() {
                    return Err(at(format!("{len} bytes from {first} of {} as parameters", list.bytes.len())));
                }
                bind(&mut open, slot, Bound::Bytes(first, len)).map_err(at)?;
            }
            Cmd::Groups { grid, threads } => {
                let Some((pipe, bound)) = open.take() else { return Err(at("no kernel to dispatch".into())) };
                let dispatch = Dispatch { pipe, bound, grid, threads };
                let kernel = &kernels[pipe.0 as usize];
                check_dispatch(&dispatch, kernel).map_err(|why| at(format!("{}: {why}", kernel.name)))?;
                if let Some(epoch) = epochs.last_mut() {
                    epoch.push(dispatch);
                }
            }
            Cmd::Barrier => {
                if open.is_some() {
                    return Err(at("a barrier between a kernel and its dispatch".into()));
                }
                epochs.push(Vec::new());
            }
        }
    }
    if open.is_some() {
        return Err("the last kernel was not dispatched".into());
    }
    let counts = Counts {
        dispatches: epochs.iter().map(Vec::len).sum(),
        barriers: epochs.len() - 1,
        needless: epochs.windows(2).filter(|pair| !meet(&pair[0], &pair[1])).count(),
    };
    Ok(Checked { epochs, counts })
}

/// Whether a span lies inside its buffer.
pub fn check_span(span: Span, sizes: &[u64]) -> Result<(), String> {
    let Some(&size) = sizes.get(span.buf.0 as usize) else { return Err(format!("buffer {} of none", span.buf.0)) };
    if span.len == 0 || span.at > size || span.len > size - span.at {
        return Err(format!("bytes {}..+{} of a buffer of {size}", span.at, span.len));
    }
    Ok(())
}

fn bind(open: &mut Option<(Pipe, Vec<(u8, Bound)>)>, slot: u8, bound: Bound) -> Result<(), String> {
    let Some((_, all)) = open else { return Err(format!("slot {slot} is bound before a kernel is chosen")) };
    if slot as usize >= N_SLOTS || all.iter().any(|(other, _)| *other == slot) {
        return Err(format!("slot {slot} is bound twice, or is not one of {N_SLOTS}"));
    }
    all.push((slot, bound));
    Ok(())
}

fn check_dispatch(dispatch: &Dispatch, kernel: &Kernel) -> Result<(), String> {
    let Dispatch { ref bound, grid, threads, .. } = *dispatch;
    if grid.contains(&0) {
        return Err(format!("a grid of {grid:?} threadgroups"));
    }
    // A threadgroup of one simdgroup loses its barriers in some compilers.
    if threads < 64 || !threads.is_multiple_of(32) || threads > kernel.threads {
        return Err(format!("threadgroups of {threads} threads, of 64 to {} in steps of 32", kernel.threads));
    }
    for param in &kernel.params {
        let Some(&(_, bound)) = bound.iter().find(|(slot, _)| u32::from(*slot) == param.slot) else {
            return Err(format!("slot {} is not bound", param.slot));
        };
        match bound {
            Bound::Bytes(_, len) if !param.is_const || (param.is_ref && len != param.size) => {
                return Err(format!("slot {} gets {len} bytes of parameters, {} wanted", param.slot, param.size));
            }
            Bound::Bytes(..) => {}
            Bound::Span(_, used) if param.is_const != (used == Use::Read) => {
                return Err(format!("slot {} is bound as {used:?}, const is {}", param.slot, param.is_const));
            }
            Bound::Span(span, _) if !span.at.is_multiple_of(u64::from(param.size.max(1)).min(MAX_ALIGN)) => {
                return Err(format!("slot {} begins at byte {}, numbers have {}", param.slot, span.at, param.size));
            }
            Bound::Span(span, _) if param.is_ref && span.len < u64::from(param.size) => {
                return Err(format!("slot {} has {} bytes, {} wanted", param.slot, span.len, param.size));
            }
            Bound::Span(..) => {}
        }
    }
    for (i, (slot, bound)) in bound.iter().enumerate() {
        if !kernel.params.iter().any(|param| param.slot == u32::from(*slot)) {
            return Err(format!("slot {slot} is bound, and the kernel has none"));
        }
        for (other_slot, other) in &bound_spans(&dispatch.bound[..i]) {
            let Bound::Span(span, used) = *bound else { continue };
            let (other, other_used) = *other;
            if span.overlaps(other) && (used, other_used) != (Use::Read, Use::Read) {
                return Err(format!("slots {other_slot} and {slot} share bytes, and one is written"));
            }
        }
    }
    Ok(())
}

fn bound_spans(bound: &[(u8, Bound)]) -> Vec<(u8, (Span, Use))> {
    let spans = bound.iter().filter_map(|&(slot, bound)| match bound {
        Bound::Span(span, used) => Some((slot, (span, used))),
        Bound::Bytes(..) => None,
    });
    spans.collect()
}

/// Whether a dispatch of one epoch must come behind one of the epoch before.
fn meet(before: &[Dispatch], after: &[Dispatch]) -> bool {
    let spans = |epoch: &[Dispatch]| epoch.iter().flat_map(|d| bound_spans(&d.bound)).collect::<Vec<_>>();
    let (before, after) = (spans(before), spans(after));
    before.iter().any(|&(_, (a, a_used))| {
        after.iter().any(|&(_, (b, b_used))| a.overlaps(b) && (a_used, b_used) != (Use::Read, Use::Read))
    })
}
