//! What steps of a plan launch on a device, without the device: for `moebius plan`.

use std::collections::HashMap;

use checkpoint::Checkpoint;
use model::plan::{Plan, Weight};

use super::driver::{Context, Module, Ptr, Stream};
use super::encode::{Ahead, Encoder, Kernels};
use super::few_launch::Half;
use super::lists::list;
use super::nodes::{ATTEND_PAGES, Link, MAX_SPLITS, Mat, Node};
use super::sources::Key;
use super::tables::{Counts, Given};
use super::{Cuda, args, compile};
use backend::{CompileError, Limits, PAGE};

/// What the choice of kernels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Compute capability, e.g. 90.
    pub arch: u32,
    /// Multiprocessors.
    pub sms: usize,
    /// Maximum shared memory of a block, in bytes.
    pub max_shared: usize,
}

impl Card {
    /// The largest card of a compute capability; none where no card of it is known.
    pub fn of(arch: u32) -> Option<Card> {
        // Multiprocessors, and kilobytes of shared memory that a block may have: CUDA C++ Programming Guide, "Compute
        // Capabilities".
        let (sms, kilobytes) = match arch {
            80 => (108, 163),
            86 => (84, 99),
            89 => (142, 99),
            90 => (132, 227),
            100 => (148, 227),
            120 => (188, 99),
            _ => return None,
        };
        Some(Card { arch, sms, max_shared: kilobytes << 10 })
    }
}

/// A launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks.
    pub blocks: u64,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

/// One line of what a step does: an op, or several that go together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Layer of its matrices, or of those before it; none before the first layer and behind the last.
    pub layer: Option<u32>,
    /// What it is, with the matrices that it multiplies with.
    pub name: String,
    /// Bytes of weights that it reads for one token.
    pub bytes: usize,
    /// In order.
    pub launches: Vec<Launched>,
}

/// A plan on a device that is not there.
pub struct Outline<'a> {
    laid: compile::Laid<'a>,
    stream: Stream,
    kernels: Kernels,
    layers: HashMap<Ptr, Option<u32>>,
    card: Card,
}

impl<'a> Outline<'a> {
    /// Lays out a plan as a card would have it.
    ///
    /// # Errors
    /// As [`backend::Backend::compile`], but for what needs a device.
    pub fn new(
        cuda: &Cuda,
        plan: &Plan,
        checkpoint: &'a Checkpoint,
        limits: Limits,
        card: Card,
    ) -> Result<Outline<'a>, CompileError> {
        let failed =
            |e: super::driver::DriverError| CompileError::Start { what: "no device".into(), why: e.to_string() };
        let context = Context::blank(card.arch, card.sms, card.max_shared);
        let stream = Stream::new(&context).map_err(failed)?;
        let mut laid = compile::lay(cuda, plan, checkpoint, limits, &context, &stream, Some(Link::blank()))?;
        let modules = laid.modules.keys().iter().map(|_| Module::load(&context, &[]));
        let kernels = Kernels::new(modules.collect::<Result<_, _>>().map_err(failed)?);
        let mut layers = HashMap::new();
        for (op, layer) in plan.ops.iter().zip(&plan.layers) {
            for w in op.weights().into_iter().filter(|&w: &Weight| plan.weight(w).shape.len() > 1) {
                // It was laid out above: this is where.
                let matrix = laid.weights.matrix(plan, checkpoint, w)?;
                layers.entry(matrix.q).or_insert(*layer);
            }
        }
        Ok(Outline { laid, stream, kernels, layers, card })
    }

    /// What a step of `n_chunks` sequences of `len` tokens each launches, `pages` pages into their contexts.
    ///
    /// # Errors
    /// None that is known: a device that is not there refuses nothing.
    pub fn step(&self, n_chunks: usize, len: usize, pages: usize) -> Result<Vec<Line>, CompileError> {
        self.step_with(n_chunks, len, pages, false)
    }

    /// The same of a step with drafts.
    fn step_with(
        &self,
        n_chunks: usize,
        len: usize,
        pages: usize,
        has_drafts: bool,
    ) -> Result<Vec<Line>, CompileError> {
        let tokens = n_chunks * len;
        let counts = Counts { tokens, rows: n_chunks, chunks: n_chunks };
        let mut encoder = Encoder {
            stream: &self.stream,
            kernels: &self.kernels,
            ropes: &self.laid.ropes,
            scratch: self.laid.scratch,
            step: args::Step::default(),
            given: Given::default(),
            counts,
            most_pages: pages.max(len.div_ceil(PAGE)).next_power_of_two().min(ATTEND_PAGES * MAX_SPLITS),
            longest: len,
            singles: if len == 1 { n_chunks } else { 0 },
            max_draft: 0,
            has_drafts: false,
            sms: self.card.sms,
            max_shared: self.card.max_shared,
            half: Half::Registers,
            is_traced: false,
            early: self.card.arch >= 90,
            n_launches: 0,
            normed: None,
            listed: None,
            is_plain: false,
            next: &[],
            ahead: Ahead::default(),
            unsummed: [None; 2],
        };
        let failed = |e: super::driver::DriverError| CompileError::Start { what: "a step".into(), why: e.to_string() };
        let take = || {
            let launch = |l: super::launch::Launch| Launched {
                kernel: l.entry,
                blocks: l.grid.iter().map(|&n| u64::from(n)).product(),
                threads: l.block,
                shared: l.shared,
            };
            self.stream.take_launched().into_iter().map(launch).collect::<Vec<_>>()
        };
        encoder.begin().map_err(failed)?;
        let mut lines = vec![Line { layer: None, name: "angles".into(), bytes: 0, launches: take() }];
        lines.retain(|line| !line.launches.is_empty());
        let lists = &self.laid.lists;
        let nodes = lists.nodes(list(counts, len, has_drafts, lists));
        let mut layer = None;
        for (i, node) in nodes.iter().enumerate() {
            if let Some(found) = matrices(node).iter().find_map(|w| self.layers.get(&w.data.q)) {
                layer = *found;
            }
            encoder.next = &nodes[i + 1..];
            encoder.node(node).map_err(failed)?;
            let (name, bytes) = node.describe();
            lines.push(Line { layer, name, bytes, launches: take() });
        }
        Ok(lines)
    }

    /// The modules that the plan wants.
    pub(super) fn modules(&self) -> &[Key] {
        self.laid.modules.keys()
    }
}

/// The matrices that a node multiplies with. An embedding's table may be the matrix of the logits too: it says nothing
/// of a layer.
fn matrices(node: &Node) -> Vec<Mat> {
    match node {
        Node::Linear { parts, .. } => parts.iter().map(|part| part.w).collect(),
        Node::GatedLinear { gate, .. } | Node::GatedLinearApart { gate, .. } => vec![*gate],
        Node::HeadLinear { w, .. } => vec![*w],
        Node::Experts(node) => vec![node.gate],
        Node::FewLinear(node) => node.parts.iter().flatten().map(|part| part.w).collect(),
        Node::Router(node) => node.parts.iter().map(|part| part.w).collect(),
        Node::ExpertsUp(node) => vec![node.experts.gate],
        Node::ExpertsDown(node) => vec![node.experts.down],
        Node::LatentQ(node) => vec![node.w],
        Node::LatentOut(node) => vec![node.w],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use backend::Backend;

    /// A step with drafts takes the list of single tokens, with keys appended before attention; a draft head has lists.
    #[test]
    fn drafts_take_the_list_of_few_tokens() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/qwen35_mtp/hf");
        let checkpoint = checkpoint::open(&path).unwrap();
        let cuda = Cuda::default();
        let plan = cuda.lower(model::build_drafting(&checkpoint).unwrap()).unwrap();
        let limits = Limits {
            max_tokens: 64,
            max_outputs: 64,
            n_pages: 64,
            max_positions: 2048,
            n_window_pages: 0,
            n_states: 4,
            max_draft: 3,
        };
        let outline = Outline::new(&cuda, &plan, &checkpoint, limits, Card::of(90).unwrap()).unwrap();
        assert!(outline.laid.head.as_ref().is_some_and(|head| !head.lists.few.is_empty()));
        let kernels = |chunks, len, has_drafts| -> Vec<&str> {
            let lines = outline.step_with(chunks, len, 1, has_drafts).unwrap();
            lines.iter().flat_map(|line| &line.launches).map(|launched| launched.kernel).collect()
        };
        let (singles, drafts) = (kernels(4, 1, false), kernels(1, 4, true));
        let (short, prompt) = (kernels(1, 4, false), kernels(1, 40, false));
        let counts = |all: &[&str], name: &str| all.iter().filter(|&&kernel| kernel == name).count();
        let n_attention = counts(&singles, "attend") + counts(&singles, "attention");
        assert_eq!(counts(&drafts, "attend"), 0, "{drafts:?}");
        assert_eq!(counts(&drafts, "attend_long") + counts(&drafts, "attention"), n_attention, "{drafts:?}");
        assert_eq!(counts(&drafts, "delta_in"), counts(&singles, "delta_in"), "{drafts:?}");
        assert!(drafts.len() < short.len() && counts(&prompt, "delta_in") == 0, "{short:?} {prompt:?}");
    }

    /// Launches of a token and of a prompt of 512 in the embedded model, on cards of each kind.
    #[test]
    fn launches_of_a_step_without_a_device() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
        let checkpoint = checkpoint::open(&path).unwrap();
        let cuda = Cuda::default();
        let plan = cuda.lower(model::build(&checkpoint).unwrap()).unwrap();
        let limits = Limits {
            max_tokens: 512,
            max_outputs: 64,
            n_pages: 64,
            max_positions: 2048,
            n_window_pages: 0,
            n_states: 0,
            max_draft: 0,
        };
        let n_layers = plan.layers.iter().flatten().max().unwrap() + 1;
        for arch in [80, 90, 120] {
            let outline = Outline::new(&cuda, &plan, &checkpoint, limits, Card::of(arch).unwrap()).unwrap();
            let one = outline.step(1, 1, 1).unwrap();
            let bytes: usize = one.iter().map(|line| line.bytes).sum();
            // Bytes of matrices: vectors and the row of the table are not counted.
            let all = plan.bytes_per_token();
            assert!(bytes <= all && bytes * 100 > all * 95, "{bytes} of {all}");
            for layer in 0..n_layers {
                let n: usize =
                    one.iter().filter(|line| line.layer == Some(layer)).map(|line| line.launches.len()).sum();
                // The last one selects rows twice, and the norm of the logits counts to it.
                let wanted = if layer + 1 == n_layers { 9 } else { 6 };
                assert_eq!(n, wanted, "sm_{arch}: launches of layer {layer}");
            }
            for (chunks, len) in [(8, 1), (32, 1), (64, 1), (65, 1), (256, 1), (1, 512)] {
                let lines = outline.step(chunks, len, 16).unwrap();
                assert!(lines.iter().flat_map(|line| &line.launches).all(|l| l.blocks > 0 && l.threads >= 32));
                assert!(lines.iter().all(|line| line.launches.iter().all(|l| (l.shared as usize) <= 227 << 10)));
            }
        }
    }
}
