//! Several GPUs as one: each computes a part of a plan ([`model::plan::partition`]) and adds its sums to the others' by
//! writing into their memory (`kernels/cuda/all_reduce.cu`).

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::partition::{self, MAX_PARTS, Part};
use model::plan::{Op, Plan, ValidPlan};

use super::compile::{self, Failed, allocate};
use super::driver::{self, Context, Memory, Stream};
use super::nodes::{Link, MOST_BLOCKS, MOST_SMALL};
use super::{Cuda, MEMORY};
use backend::parts;
use backend::{Backend, CompileError, Footprint, Limits, Program};

/// Bytes of a room before its rows: words of control and flags, as `all_reduce.cu` has them.
const HEAD: usize = 4 * (64 + MAX_PARTS * MOST_BLOCKS);

/// NVIDIA GPUs of this machine that compute a model together.
#[derive(Clone, Debug)]
pub struct CudaParts {
    /// What they have in common; its device is the first.
    pub cuda: Cuda,
    /// Numbers of the devices, in the order of the parts.
    pub devices: Vec<usize>,
}

/// Numbers of each sum over the parts, in a step of these tokens and rows.
fn sums(plan: &Plan, n_tokens: usize, n_outputs: usize) -> impl Iterator<Item = usize> {
    plan.ops.iter().filter_map(move |op| match *op {
        Op::AllReduce { x } => {
            let x = plan.buf(x);
            Some(x.rows.count(n_tokens, n_outputs).saturating_mul(x.width))
        }
        _ => None,
    })
}

/// Numbers of the most rows that are added up, few and many.
fn numbers(plan: &Plan, limits: Limits) -> [usize; 2] {
    let n_outputs = limits.max_outputs.min(limits.max_tokens);
    let most = sums(plan, limits.max_tokens, n_outputs).max().unwrap_or(0).next_multiple_of(8);
    [most.min(MOST_SMALL), most]
}

/// Bytes of a part's room.
fn room_bytes([few, many]: [usize; 2], n_parts: usize) -> usize {
    HEAD.saturating_add(2 * n_parts * few * 8).saturating_add((2 * n_parts * 2).saturating_mul(many))
}

/// What travels between the devices in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Sums over the devices.
    pub sums: usize,
    /// Bytes that each device writes to each other one.
    pub bytes: usize,
}

/// What a step of these tokens and rows sends, by a part's plan.
pub fn traffic(plan: &Plan, n_tokens: usize, n_outputs: usize) -> Traffic {
    let bytes = |n: usize| n * if n <= MOST_SMALL { 8 } else { 2 };
    let all = sums(plan, n_tokens, n_outputs);
    all.fold(Traffic { sums: 0, bytes: 0 }, |all, n| Traffic { sums: all.sums + 1, bytes: all.bytes + bytes(n) })
}

impl CudaParts {
    /// The first part of a plan as its device runs it, with the checkpoint that has its tensors.
    ///
    /// # Errors
    /// As [`Backend::compile`], but for what needs a device.
    pub fn first(
        &self,
        plan: &ValidPlan,
        checkpoint: &Arc<Checkpoint>,
    ) -> Result<(ValidPlan, Arc<Checkpoint>), CompileError> {
        let (plan, checkpoint) = parts::with_tensors(self.parts(plan)?.swap_remove(0), checkpoint)?;
        Ok((self.cuda.lower(plan)?, checkpoint))
    }

    fn parts(&self, plan: &Plan) -> Result<Vec<Part>, CompileError> {
        Ok(partition::partition(plan, self.devices.len())?)
    }

    /// The devices, each able to write to all others, with a room on each.
    fn open(&self, plan: &Plan, limits: Limits) -> Result<Vec<(Arc<Context>, Link, Memory)>, CompileError> {
        let start = |what: String, why: String| CompileError::Start { what, why };
        driver::init().map_err(|e| start("CUDA".into(), e.to_string()))?;
        let context =
            |&device: &usize| Context::new(device).map_err(|e| start(format!("CUDA device {device}"), e.to_string()));
        let contexts = self.devices.iter().map(context).collect::<Result<Vec<_>, _>>()?;
        let (first, n_parts, numbers) = (&contexts[0], contexts.len(), numbers(plan, limits));
        for (i, a) in contexts.iter().enumerate() {
            if (a.arch, a.sms) != (first.arch, first.sms) {
                let why =
                    format!("is a {}, device {} a {}: they have to be alike", a.name, self.devices[0], first.name);
                return Err(start(format!("CUDA device {}", self.devices[i]), why));
            }
            for (j, b) in contexts.iter().enumerate().filter(|&(j, _)| j != i) {
                if !a.reach(b).failed("a way between devices")? {
                    let why = format!("it cannot reach the memory of device {}", self.devices[j]);
                    return Err(start(format!("CUDA device {}", self.devices[i]), why));
                }
            }
        }
        let room = |context: &Arc<Context>| {
            context.enter().failed("the device")?;
            let stream = Stream::new(context).failed("a stream")?;
            let memory = allocate(context, "rows of other devices", room_bytes(numbers, n_parts))?;
            // SAFETY: just allocated with this length.
            unsafe { stream.fill(memory.ptr(), 0, memory.bytes()) }.failed("rows of other devices")?;
            stream.wait().failed("rows of other devices")?;
            Ok(memory)
        };
        let memories = contexts.iter().map(room).collect::<Result<Vec<_>, CompileError>>()?;
        let mut rooms = [0; MAX_PARTS];
        rooms.iter_mut().zip(&memories).for_each(|(room, memory)| *room = memory.ptr());
        let link = |(part, (context, memory))| (context, Link { part, n_parts, rooms, numbers }, memory);
        Ok(contexts.into_iter().zip(memories).enumerate().map(link).collect())
    }
}

impl Backend for CudaParts {
    fn name(&self) -> &'static str {
        self.cuda.name()
    }

    /// The plan as it is: its parts are lowered when they are compiled.
    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        if plan.whole {
            let what = "encode whole texts on several devices".into();
            return Err(CompileError::Unsupported { backend: self.name(), what });
        }
        self.parts(&plan)?;
        Ok(plan)
    }

    /// Of the device that holds most.
    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        let Ok(parts) = self.parts(plan) else { return Footprint::new(MEMORY) };
        let footprint = |part: Part| {
            let plan = ValidPlan::new(part.plan).ok().and_then(|plan| self.cuda.lower(plan).ok())?;
            let mut sum = self.cuda.footprint(&plan, limits);
            sum.add(backend::Part::Scratch, room_bytes(numbers(&plan, limits), self.devices.len()));
            Some(sum)
        };
        let all = parts.into_iter().filter_map(footprint);
        all.max_by_key(Footprint::total).unwrap_or_else(|| Footprint::new(MEMORY))
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        checkpoint: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        let parts = self.parts(plan)?;
        let mut opened = self.open(&parts[0].plan, limits)?.into_iter();
        let program = parts::compile(parts, &checkpoint, |i, plan, checkpoint| {
            let (context, link, room) = opened.next().expect("every part has a device");
            let cuda = Cuda { device: self.devices[i], ..self.cuda.clone() };
            let program = compile::compile(&cuda, &cuda.lower(plan)?, &checkpoint, limits, Some((link, room)))?;
            Ok((format!("CUDA device {} ({})", self.devices[i], context.name), Box::new(program)))
        })?;
        Ok(Box::new(program))
    }
}
