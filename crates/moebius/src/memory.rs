//! What an engine may take: from a budget of memory to the limits that keep within it.
//!
//! What a program takes comes from [`Backend::footprint`] alone. Knows plans and limits, and nothing of files.

use anyhow::{Result, bail, ensure};
use backend::residency::Residency;
use backend::{Backend, Footprint, Kinds, Limits, PAGE, Part};
use gpu::cuda::Cuda;
use gpu::cuda::split::Split;
use model::plan::ValidPlan;

use crate::machine;

/// Context when neither the user nor the model says less, and memory holds several.
const DEFAULT_CTX: usize = 65536;
/// The part of the memory next to weights and steps that one such context may take where it is longer than a share.
const CTX_PART: usize = 4;
/// Positions of the cache for each sequence by default: what most need. One may have more, up to the context.
const SHARE_CTX: usize = 8192;
/// A context that is worth having fewer sequences for, where their number is not given.
const SMALL_CTX: usize = 2048;
/// Fewest checkpoints: the end of the last prompt and the end of its answer, of two conversations.
const MIN_CHECKPOINTS: usize = 4;
/// Maximum number of checkpoints.
const MAX_CHECKPOINTS: usize = 64;
/// The share of the room that checkpoints of one kind may take.
const CHECKPOINT_SHARE: usize = 16;
/// What the process takes later on besides the program: pages of its own code, stacks, the engine's tables.
const LATER_BYTES: usize = 8 << 20;
/// Likewise for each token of the vocabulary: samplers, and the automaton of structured output.
const LATER_BYTES_PER_TOKEN: usize = 64;

/// Returns the later allocations per model outside the compiled program, in bytes.
pub fn later_bytes(n_vocab: usize) -> usize {
    LATER_BYTES + n_vocab * LATER_BYTES_PER_TOKEN
}

/// A promise of memory that cannot be kept: a sentence.
#[derive(Debug)]
pub struct TooLarge(String);

impl std::fmt::Display for TooLarge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TooLarge {}

/// How much memory there is for a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// `--memory`: the process stays below this, mapped weights included, or it does not start.
    Promise {
        /// Bytes of the whole process.
        bytes: usize,
        /// Of those, what it takes besides the program.
        overhead: usize,
    },
    /// What is free less a margin, where the system says so. Mapped weights may be more than that: the system evicts
    /// them.
    Free(Option<usize>),
}

impl Budget {
    /// Returns the budget of a process that has loaded what it needs besides the program, and keeps `requests` bytes
    /// for what comes in. `resident` is what it takes now, measured when it is not given.
    pub fn new(memory: Option<usize>, plan: &ValidPlan, requests: usize, resident: Option<usize>) -> Budget {
        match memory {
            Some(bytes) => {
                let later = later_bytes(plan.n_vocab) + requests;
                let resident = resident.or_else(machine::resident_memory).unwrap_or(0);
                Budget::Promise { bytes, overhead: resident.saturating_add(later) }
            }
            None => Budget::Free(machine::usable_memory()),
        }
    }

    /// Bytes that a program may take, where they are known.
    pub fn bytes(self) -> Option<usize> {
        match self {
            Budget::Promise { bytes, overhead } => Some(bytes.saturating_sub(overhead)),
            Budget::Free(free) => free,
        }
    }

    /// Bytes that pages and states may take beside a program that takes `base` without them; none where that is
    /// unknown.
    fn room(self, base: &Footprint) -> Option<usize> {
        match self {
            Budget::Promise { bytes, overhead } => Some(bytes.saturating_sub(overhead.saturating_add(base.total()))),
            Budget::Free(None) => None,
            // Where the weights leave less than a quarter, they are what the system evicts.
            Budget::Free(Some(free)) => {
                let free = free.saturating_sub(base.allocated());
                Some(free.saturating_sub(base.mapped()).max(free / 4))
            }
        }
    }
}

/// What a user wants of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Positions of a sequence; what the model was trained for, up to a habit, when `None`.
    pub ctx: Option<usize>,
    /// Maximum number of sequences computed at a time.
    pub sequences: usize,
    /// Whether fewer sequences will do.
    pub fewer_will_do: bool,
    /// Positions of the cache over all of them; when `None`, every sequence's whole context where that is given, and a
    /// part of it where not.
    pub cache_tokens: Option<usize>,
    /// Maximum number of tokens of a step.
    pub batch: usize,
    /// Maximum number of tokens of a sequence that are drafted for a step.
    pub drafts: usize,
}

/// What is wanted and fits: limits for a program, and what it will take.
#[derive(Clone, Debug)]
pub struct Fit {
    pub limits: Limits,
    pub sequences: usize,
    pub footprint: Footprint,
}

impl Fit {
    /// Bytes of weights beside the routed experts of a split.
    pub fn dense_bytes(&self, split: &Split) -> usize {
        self.footprint.weights().saturating_sub(split.bytes()[0])
    }

    /// Returns whether the context is as long as was requested, or long enough for a habit.
    pub fn is_roomy(&self, wish: &Wish, n_ctx_train: usize) -> bool {
        self.limits.max_positions >= wish.ctx.unwrap_or(n_ctx_train.min(SMALL_CTX))
    }
}

/// The memory of sequences: what one more page or slot takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// Of the layers that keep all positions.
    pub page: usize,
    /// Of the layers that keep a window.
    pub window_page: usize,
    /// Of recurrent states.
    pub state: usize,
    kinds: Kinds,
    /// Maximum number of drafts of a sequence in a step.
    drafts: usize,
}

/// Rows of logits that a step of a server has at least, so that the log-probabilities of prompts do not take a step a
/// token.
const MIN_ROWS: usize = 32;

impl Units {
    /// Of a plan that `backend` has lowered, with up to `drafts` drafts of a sequence in a step.
    pub fn of(backend: &dyn Backend, plan: &ValidPlan, drafts: usize) -> Units {
        let one = Limits { n_pages: 1, n_window_pages: 1, n_states: 1, max_draft: drafts, ..Limits::default() };
        let one = backend.footprint(plan, one);
        let bytes = |part| one.bytes(|p| p == part);
        Units {
            page: bytes(Part::Cache),
            window_page: bytes(Part::Windows),
            state: bytes(Part::States),
            kinds: Kinds::of(plan),
            drafts,
        }
    }

    /// Returns what decoding the token after `context` positions reads.
    pub fn read_per_token(&self, context: u64) -> u64 {
        let window = self.kinds.window.map_or(0, |window| context.min(window as u64));
        let page = PAGE as u64;
        context * self.page as u64 / page + window * self.window_page as u64 / page + self.state as u64
    }

    /// Window pages that a sequence of up to `positions` needs at a time when it decodes.
    fn window_pages(&self, positions: usize) -> usize {
        self.kinds.window_blocks().min(positions.div_ceil(PAGE))
    }

    /// Checkpoints of each kind that a share of the room holds: of window pages, and of states.
    fn checkpoints(&self, positions: usize, room: Option<usize>) -> [usize; 2] {
        let windows = self.window_pages(positions).saturating_mul(self.window_page);
        [windows, self.state].map(|bytes| match room {
            Some(room) => (room / CHECKPOINT_SHARE / bytes.max(1)).clamp(MIN_CHECKPOINTS, MAX_CHECKPOINTS),
            None => MIN_CHECKPOINTS,
        })
    }

    /// Limits for `sequences` of up to `positions` that share `n_pages`, with checkpoints of windows and of states.
    fn limits(
        &self,
        batch: usize,
        positions: usize,
        sequences: usize,
        n_pages: usize,
        checkpoints: [usize; 2],
    ) -> Limits {
        // Sequences of short contexts run together all the same.
        let most = positions.saturating_mul(sequences).max(1);
        let max_tokens = if self.kinds.whole { batch.max(positions).min(most) } else { batch.min(most) };
        let window = self.window_pages(positions);
        let chunk = if window > 0 { max_tokens.div_ceil(PAGE) } else { 0 };
        // Each draft has a separate row.
        let rows = match self.kinds.whole {
            // The rows of all tokens are pooled, in the step that computes them.
            true => max_tokens,
            false => sequences.saturating_mul(1 + self.drafts),
        };
        Limits {
            max_tokens,
            max_outputs: if sequences > 1 { rows.max(MIN_ROWS) } else { rows }.min(max_tokens),
            n_pages,
            max_positions: positions,
            // What a chunk writes is there beside the windows; no more than all positions ever have.
            n_window_pages: (window * (sequences + checkpoints[0]) + chunk).min(n_pages.max(window * sequences)),
            n_states: if self.kinds.state { sequences + checkpoints[1] } else { 0 },
            max_draft: self.drafts,
        }
    }

    /// Returns what pages and states of the limits take.
    fn bytes(&self, limits: &Limits) -> usize {
        // A page's id is in a table of the program too.
        let pages = limits.n_pages.saturating_mul(self.page.saturating_add(4));
        let windows = limits.n_window_pages.saturating_mul(self.window_page.saturating_add(4));
        pages.saturating_add(windows).saturating_add(limits.n_states.saturating_mul(self.state))
    }
}

/// Returns the limits of an engine: as much of what is requested as the budget holds.
///
/// # Errors
/// A promise that cannot be kept, with the smallest one that can; a context or a batch that no engine has.
pub fn fit(backend: &dyn Backend, plan: &ValidPlan, wish: &Wish, budget: Budget) -> Result<Fit> {
    check_wish(wish)?;
    if let Some(ctx) = wish.ctx.filter(|&ctx| plan.whole && ctx > plan.n_ctx_train) {
        bail!("--ctx is {ctx}, the model has {} positions", plan.n_ctx_train);
    }
    let units = Units::of(backend, plan, wish.drafts);
    let (limits, sequences) = choose(&units, wish, plan.n_ctx_train, |limits| {
        budget.room(&backend.footprint(plan, Limits { n_pages: 0, n_window_pages: 0, n_states: 0, ..limits }))
    });
    let footprint = backend.footprint(plan, limits);
    if let Budget::Free(Some(free)) = budget {
        let copied = footprint.bytes(|part| matches!(part, Part::Weights(_, Residency::Copied)));
        let [c, f] = [copied, free].map(|n| machine::bytes(n as u64));
        ensure!(copied <= free, "failed to copy {c} of weights (--copy-weights): only {f} of memory are free");
    }
    keep(budget, &footprint, || smallest(backend, plan, &units, wish))?;
    Ok(Fit { limits, sequences, footprint })
}

/// Returns the limits of an engine on a device with its own memory, of which it may take `free` bytes: nothing is
/// evicted there. `is_roomy`: a context shorter than wanted, or than a habit, counts as one that does not fit.
///
/// # Errors
/// It does not fit: what is needed, what is free and what would fit. As [`fit`] besides.
pub fn fit_device(
    backend: &dyn Backend,
    plan: &ValidPlan,
    wish: &Wish,
    free: usize,
    device: &str,
    is_roomy: bool,
) -> Result<Fit> {
    match fit(backend, plan, wish, Budget::Promise { bytes: free, overhead: 0 }) {
        Ok(fit) if !is_roomy || fit.is_roomy(wish, plan.n_ctx_train) => return Ok(fit),
        Err(error) if !error.is::<TooLarge>() => return Err(error),
        _ => {}
    }
    let ctx = wish.ctx.unwrap_or(if is_roomy { plan.n_ctx_train.min(SMALL_CTX) } else { PAGE });
    let least = smallest(backend, plan, &Units::of(backend, plan, wish.drafts), &Wish { ctx: Some(ctx), ..*wish });
    let weights = least.weights();
    let would_fit = (free + weights).saturating_sub(least.total());
    let [needed, rest, free, would_fit, weights] =
        [least.total(), least.total() - weights, free, would_fit, weights].map(|n| machine::bytes(n as u64));
    let why = format!(
        "failed to fit the model on {device}: it needs {needed} ({weights} of weights, {rest} for a context of {ctx} \
         and steps of {} tokens), {free} are free: weights of up to {would_fit} would fit",
        wish.batch
    );
    Err(TooLarge(why).into())
}

/// The share of what dense weights and steps leave that the cache may take where experts are streamed and nobody says
/// how long the context is to be; slabs get the rest.
const CACHE_SHARE: usize = 4;

/// Returns the limits of an engine whose experts are streamed, and its backend: `with` makes one with given bytes of
/// slabs.
///
/// # Errors
/// As [`fit`].
pub fn fit_streamed<B: Backend>(
    with: impl Fn(usize) -> B,
    plan: &ValidPlan,
    wish: &Wish,
    budget: Budget,
) -> Result<(B, Fit)> {
    check_wish(wish)?;
    let least = with(0);
    let units = Units::of(&least, plan, wish.drafts);
    let (limits, sequences) = choose(&units, wish, plan.n_ctx_train, |limits| {
        let base = least.footprint(plan, Limits { n_pages: 0, n_window_pages: 0, n_states: 0, ..limits });
        budget.room(&base).map(|room| if wish.ctx.is_some() { room } else { room / CACHE_SHARE })
    });
    keep(budget, &least.footprint(plan, limits), || smallest(&least, plan, &units, wish))?;
    let (backend, footprint) = fill(with, plan, limits, budget);
    Ok((backend, Fit { limits, sequences, footprint }))
}

/// Returns the limits of an engine whose routed experts are on a GPU as far as they fit, and its backend: `with` makes
/// one with this many bytes of experts there. Where no one says how long steps are, the buffers of a step take a small
/// part of the budget.
///
/// # Errors
/// As [`fit`].
pub fn fit_split<B: Backend>(
    with: impl Fn(usize) -> B,
    plan: &ValidPlan,
    wish: &Wish,
    is_batch_given: bool,
    budget: Budget,
) -> Result<(B, Fit)> {
    /// The part of the budget that a step's buffers may take.
    const SHARE: usize = 4;
    let room = budget.bytes().unwrap_or(usize::MAX);
    let batches = [wish.batch, wish.batch / 2, wish.batch / 4];
    let tried = batches.into_iter().filter(|_| !is_batch_given).find_map(|batch| {
        let (backend, fit) = fit_streamed(&with, plan, &Wish { batch, ..*wish }, budget).ok()?;
        let is_step = |part| matches!(part, Part::Activations | Part::Inputs | Part::Scratch);
        (fit.footprint.bytes(is_step) <= room / SHARE).then_some((backend, fit))
    });
    match tried {
        Some(found) => Ok(found),
        None if is_batch_given => fit_streamed(with, plan, wish, budget),
        None => fit_streamed(with, plan, &Wish { batch: batches[2].max(1), ..*wish }, budget),
    }
}

/// Returns a GPU whose host half keeps within a promise too: experts that do not fit there either are streamed, through
/// as many slabs as it holds. `with` makes one with this many bytes of slabs.
///
/// # Errors
/// As [`fit`].
pub fn fit_host(with: impl Fn(usize) -> Cuda, plan: &ValidPlan, limits: Limits, budget: Budget) -> Result<Cuda> {
    let least = with(0).host_footprint(plan, limits);
    keep(budget, &least, || least.clone())?;
    let room = budget.bytes().unwrap_or(0);
    let is_slab = |part| matches!(part, Part::Weights(_, Residency::Streamed));
    let mut bytes = room.saturating_sub(least.total() - least.bytes(is_slab));
    loop {
        let cuda = with(bytes);
        // Tables grow with the slabs.
        match cuda.host_footprint(plan, limits).total().checked_sub(room) {
            Some(over) if over > 0 && bytes > 0 => bytes = bytes.saturating_sub(over),
            _ => return Ok(cuda),
        }
    }
}

/// Returns the limits of a model that drafts for one with this fit: for as many sequences and positions, as far as it
/// was trained for them, with a copy of each state.
pub fn limits_alongside(backend: &dyn Backend, plan: &ValidPlan, fit: &Fit) -> Limits {
    let (main, sequences) = (fit.limits, fit.sequences);
    let positions = main.max_positions.min(plan.n_ctx_train.max(PAGE));
    let n_pages = main.n_pages.min(positions.div_ceil(PAGE) * sequences);
    let limits =
        Units::of(backend, plan, 0).limits(main.max_tokens, positions, sequences, n_pages, [MIN_CHECKPOINTS; 2]);
    Limits { n_states: if limits.n_states > 0 { limits.n_states + sequences } else { 0 }, ..limits }
}

/// Returns the first of `sizes` for the tokens of a step whose buffers take a small part of the memory and that prompts
/// can fill, else what is wished for. For devices whose steps read much once, whatever their length.
pub fn long_batch(
    least: &dyn Backend,
    plan: &ValidPlan,
    wish: &Wish,
    budget: Budget,
    sizes: impl IntoIterator<Item = usize>,
) -> usize {
    /// The part of what is left beside dense weights.
    const SHARE: usize = 16;
    let units = Units::of(least, plan, wish.drafts);
    // Beside the context that was asked for.
    let positions = wish.ctx.unwrap_or(PAGE);
    let takes = |batch: usize| {
        let limits = units.limits(batch, positions, wish.sequences, positions.div_ceil(PAGE), [MIN_CHECKPOINTS; 2]);
        least.footprint(plan, Limits { max_tokens: batch, ..limits })
    };
    let room = budget.room(&takes(1)).unwrap_or(0);
    let longest = wish.ctx.unwrap_or(DEFAULT_CTX).min(plan.n_ctx_train.max(PAGE)) * wish.sequences;
    let fits = |&batch: &usize| {
        let step = takes(batch).bytes(|part| matches!(part, Part::Activations | Part::Inputs | Part::Scratch));
        batch <= longest && step <= room / SHARE
    };
    sizes.into_iter().find(fits).unwrap_or(wish.batch).max(wish.batch)
}

/// As many slabs as the budget holds beside everything else.
fn fill<B: Backend>(with: impl Fn(usize) -> B, plan: &ValidPlan, limits: Limits, budget: Budget) -> (B, Footprint) {
    let slabs = |footprint: &Footprint| footprint.bytes(|part| matches!(part, Part::Weights(_, Residency::Streamed)));
    let least = with(0).footprint(plan, limits);
    let room = budget.bytes().unwrap_or(0);
    let mut bytes = room.saturating_sub(least.total() - slabs(&least));
    loop {
        let backend = with(bytes);
        let footprint = backend.footprint(plan, limits);
        // Tables grow with the slabs.
        match footprint.total().checked_sub(room) {
            Some(over) if over > 0 && bytes > 0 => bytes = bytes.saturating_sub(over),
            _ => return (backend, footprint),
        }
    }
}

/// Returns the smallest engine that is still what was asked for.
fn smallest(backend: &dyn Backend, plan: &ValidPlan, units: &Units, wish: &Wish) -> Footprint {
    let sequences = if wish.fewer_will_do { 1 } else { wish.sequences };
    let positions = wish.ctx.unwrap_or(PAGE);
    let n_pages = wish.cache_tokens.unwrap_or(0).min(1 << 31).max(positions).div_ceil(PAGE);
    backend.footprint(plan, units.limits(wish.batch, positions, sequences, n_pages, [MIN_CHECKPOINTS; 2]))
}

/// Limits for one sequence of `positions` without an engine, which keeps all of them.
///
/// # Errors
/// As [`fit`].
pub fn fit_whole(
    backend: &dyn Backend,
    plan: &ValidPlan,
    batch: usize,
    positions: usize,
    budget: Budget,
) -> Result<Limits> {
    let limits = whole(plan, batch, positions)?;
    let footprint = backend.footprint(plan, limits);
    keep(budget, &footprint, || footprint.clone())?;
    Ok(limits)
}

/// As [`fit_whole`], with streamed experts; `with` makes a backend with so many bytes of slabs.
///
/// # Errors
/// As [`fit`].
pub fn fit_whole_streamed<B: Backend>(
    with: impl Fn(usize) -> B,
    plan: &ValidPlan,
    batch: usize,
    positions: usize,
    budget: Budget,
) -> Result<(B, Limits)> {
    let limits = whole(plan, batch, positions)?;
    let least = with(0).footprint(plan, limits);
    keep(budget, &least, || least.clone())?;
    Ok((fill(with, plan, limits, budget).0, limits))
}

fn whole(plan: &ValidPlan, batch: usize, positions: usize) -> Result<Limits> {
    check_batch(batch)?;
    let max_tokens = batch.min(positions.max(1));
    Ok(Limits {
        max_tokens,
        max_outputs: max_tokens,
        n_pages: positions.div_ceil(PAGE),
        max_positions: positions,
        n_window_pages: positions.div_ceil(PAGE),
        n_states: usize::from(!plan.states.is_empty()),
        max_draft: 0,
    })
}

fn check_wish(wish: &Wish) -> Result<()> {
    check_batch(wish.batch)?;
    if let Some(ctx) = wish.ctx {
        ensure!((1..=1 << 20).contains(&ctx), "--ctx must be between 1 and {}, it is {ctx}", 1 << 20);
    }
    Ok(())
}

fn check_batch(batch: usize) -> Result<()> {
    ensure!((1..=65536).contains(&batch), "--batch must be between 1 and 65536, it is {batch}");
    Ok(())
}

/// Checks that a promise can be kept.
fn keep(budget: Budget, footprint: &Footprint, least: impl FnOnce() -> Footprint) -> Result<()> {
    let Budget::Promise { bytes, overhead } = budget else { return Ok(()) };
    if overhead.saturating_add(footprint.total()) <= bytes {
        return Ok(());
    }
    let least = least();
    let megabytes = overhead.saturating_add(least.total()).div_ceil(1_000_000);
    let shown = |n: usize| machine::bytes(n as u64);
    if least.device == gpu::cuda::MEMORY {
        let why = format!(
            "--gpu-memory {} is too little: this model needs at least {megabytes}M ({} allocated by the program, {} \
             for the driver)",
            shown(bytes),
            shown(least.allocated()),
            shown(overhead),
        );
        return Err(TooLarge(why).into());
    }
    let why = format!(
        "--memory {} is too little: this model needs at least {megabytes}M ({} of weights in files, {} allocated by \
         the program, {} for the rest of the process)",
        shown(bytes),
        shown(least.mapped()),
        shown(least.allocated()),
        shown(overhead),
    );
    Err(TooLarge(why).into())
}

/// As much of a wish as `room` holds, which says how much pages and states may take beside a step of such limits.
fn choose(units: &Units, wish: &Wish, n_ctx_train: usize, room: impl Fn(Limits) -> Option<usize>) -> (Limits, usize) {
    let most = match units.kinds.whole {
        true => n_ctx_train.min(DEFAULT_CTX),
        false => n_ctx_train.clamp(PAGE, DEFAULT_CTX),
    };
    let mut sequences = wish.sequences;
    loop {
        // The room beside the largest step; a shorter context has no larger one.
        let room = room(units.limits(wish.batch, wish.ctx.unwrap_or(most), sequences, 0, [0; 2]));
        let habit = room.map_or(most, |room| {
            let n = room / CTX_PART / units.page.saturating_add(4) * PAGE;
            most.min(n.max(SHARE_CTX))
        });
        let wanted = wish.ctx.unwrap_or(habit);
        let fits = |limits: &Limits| room.is_none_or(|room| units.bytes(limits) <= room);
        let with = |positions: usize, n_pages: usize, checkpoints| {
            units.limits(wish.batch, positions, sequences, n_pages, checkpoints)
        };
        let one = |positions: usize, checkpoints| with(positions, positions.div_ceil(PAGE), checkpoints);

        // The longest context of which one sequence fits beside what the others need at least.
        let checkpoints = units.checkpoints(wanted, room);
        let longest = |checkpoints| match wish.ctx {
            Some(ctx) => fits(&one(ctx, checkpoints)).then_some(ctx),
            None => {
                let n = last(habit.div_ceil(PAGE), |n| n > 0 && fits(&one((n * PAGE).min(habit), checkpoints)));
                (n > 0).then_some((n * PAGE).min(habit))
            }
        };
        let generous = longest(checkpoints).filter(|&positions| positions == wanted).map(|p| (p, checkpoints));
        let spare = || longest([MIN_CHECKPOINTS; 2]).map(|p| (p, [MIN_CHECKPOINTS; 2]));
        let found = generous.or_else(spare);
        let is_enough = found.is_some_and(|(positions, _)| positions >= wanted.min(SMALL_CTX));
        if !is_enough && wish.fewer_will_do && sequences > 1 {
            sequences /= 2;
            continue;
        }
        let (positions, checkpoints) = found.unwrap_or((wish.ctx.unwrap_or(PAGE.min(habit)), [MIN_CHECKPOINTS; 2]));

        // Pages for all sequences, as many as fit; one sequence always must: what the engine promises rests on it.
        let least = positions.div_ceil(PAGE);
        let each = wish.ctx.unwrap_or(positions.min(SHARE_CTX));
        let shared = positions.max(each.saturating_mul(sequences));
        let n_most = wish.cache_tokens.unwrap_or(shared).min(1 << 31).div_ceil(PAGE);
        let n_pages = match wish.cache_tokens {
            Some(_) => n_most.max(least),
            None => last(n_most, |n| fits(&with(positions, n, checkpoints))).max(least),
        };
        return (with(positions, n_pages, checkpoints), sequences);
    }
}

/// Returns the largest number up to `most` for which `holds`, which holds up to some number; 0 when it holds for none.
fn last(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most.saturating_add(1));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle }
    }
    low
}

/// Returns a warning where caches may grow to more bytes than are free.
pub fn crowded(caches: usize, free: usize) -> Option<String> {
    let [most, there] = [caches, free].map(|bytes| machine::bytes(bytes as u64));
    (caches > free).then(|| {
        format!(
            "the KV cache may take {most}, and {there} of memory are free: --cache-tokens, --parallel or --ctx bound it"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    fn wish(ctx: Option<usize>, sequences: usize) -> Wish {
        Wish { ctx, sequences, fewer_will_do: false, cache_tokens: None, batch: 512, drafts: 0 }
    }

    /// Pages of 128,000 bytes, window pages of 32,000, states of a megabyte.
    fn units(window: Option<usize>, state: bool) -> Units {
        let kinds = Kinds { window, state, whole: false };
        Units {
            page: 128_000,
            window_page: if window.is_some() { 32_000 } else { 0 },
            state: if state { MB } else { 0 },
            kinds,
            drafts: 0,
        }
    }

    #[test]
    fn memory_is_set_aside_by_kind() {
        let cases = [
            // window, states, context, sequences, room; positions, pages, window pages, states
            (None, false, Some(8192), 3, None, (8192, 768, 0, 0)),
            (None, false, None, 1, Some(1 << 32), (40_960, 1280, 0, 0)),
            // A quarter of a gigabyte holds 2,097 pages, of 200 megabytes fewer than a share.
            (None, false, None, 1, Some(1_000_000_000), (40_960, 1280, 0, 0)),
            (None, false, None, 1, Some(400_000_000), (24_992, 781, 0, 0)),
            (None, false, None, 1, Some(100_000_000), (8192, 256, 0, 0)),
            // The others have shares.
            (None, false, None, 4, Some(1 << 32), (40_960, 1280, 0, 0)),
            (None, false, None, 16, Some(1 << 32), (40_960, 4096, 0, 0)),
            // 100 MB hold 819 pages, and each has four bytes in a table.
            (None, false, None, 4, Some(100_000_000), (8192, 781, 0, 0)),
            // Less than the habit: 15 pages.
            (None, false, None, 1, Some(2_000_000), (480, 15, 0, 0)),
            // What was asked for stays, and one page is the least.
            (None, false, Some(8192), 4, Some(0), (8192, 256, 0, 0)),
            (None, false, None, 4, Some(0), (32, 1, 0, 0)),
            (None, true, Some(8192), 3, None, (8192, 768, 0, 3 + 4)),
            (None, true, Some(8192), 3, Some(1 << 31), (8192, 768, 0, 3 + 64)),
            (None, true, Some(8192), 3, Some(200 * MB), (8192, 1493, 0, 3 + 12)),
            // A window of 128 looks at 5 pages; a chunk writes 16.
            (Some(128), false, Some(8192), 1, None, (8192, 256, 5 * 5 + 16, 0)),
            (Some(128), false, Some(8192), 2, None, (8192, 512, 5 * 6 + 16, 0)),
            // A window wider than the context is no wider than it.
            (Some(4096), true, Some(320), 1, None, (320, 10, 10, 5)),
        ];
        for (window, state, ctx, sequences, room, wanted) in cases {
            let wish = wish(ctx, sequences);
            let (limits, n) = choose(&units(window, state), &wish, 40_960, |_| room);
            let (positions, pages, window_pages, states) = wanted;
            let pages = pages.min(positions * sequences / PAGE).max(positions.div_ceil(PAGE));
            let found = (limits.max_positions, limits.n_pages, limits.n_window_pages, limits.n_states, n);
            assert_eq!(found, (positions, pages, window_pages, states, sequences), "{wish:?} {room:?}");
        }
    }

    /// Each of many sequences has a token in a step, and a row, however short their contexts are.
    #[test]
    fn short_contexts_run_together() {
        for n in [2, 65, 300] {
            let (limits, sequences) = choose(&units(None, false), &wish(Some(PAGE), n), 40_960, |_| None);
            assert_eq!((sequences, limits.max_tokens.min(n), limits.max_outputs.min(n)), (n, n, n), "{limits:?}");
        }
        let (limits, _) = choose(&units(None, false), &wish(Some(PAGE), 1), 40_960, |_| None);
        assert_eq!(limits.max_tokens, PAGE);
    }

    /// Whatever is chosen takes no more than the room, unless what was asked for takes more by itself.
    #[test]
    fn what_is_chosen_fits() {
        for (window, state) in [(None, false), (Some(1024), false), (None, true), (Some(128), true)] {
            let units = units(window, state);
            for sequences in [1, 4, 16] {
                for room in (0..40).map(|i| i * 20 * MB) {
                    let wish = Wish { fewer_will_do: true, ..wish(None, sequences) };
                    let (limits, n) = choose(&units, &wish, 40_960, |_| Some(room));
                    let least = units.limits(512, PAGE, 1, 1, [MIN_CHECKPOINTS; 2]);
                    let taken = units.bytes(&limits);
                    assert!(taken <= room.max(units.bytes(&least)), "{wish:?} {room}: {limits:?}");
                    assert!((1..=sequences).contains(&n) && limits.n_pages * PAGE >= limits.max_positions);
                }
            }
        }
    }

    #[test]
    fn drafts_have_rows() {
        for (sequences, drafts, rows) in [(1, 0, 1), (1, 3, 4), (4, 3, MIN_ROWS), (16, 3, 64)] {
            let units = Units { drafts, ..units(None, true) };
            let (limits, _) = choose(&units, &Wish { drafts, ..wish(None, sequences) }, 40_960, |_| None);
            assert_eq!((limits.max_outputs, limits.max_draft), (rows, drafts));
        }
    }

    #[test]
    fn fewer_sequences_before_a_tiny_context() {
        let wish = Wish { fewer_will_do: true, ..wish(None, 16) };
        // 16 + 4 states take 20 MB of the 25; one sequence of 2,048 needs 8.
        let (limits, sequences) = choose(&units(None, true), &wish, 40_960, |_| Some(25 * MB));
        assert!(sequences < 16 && limits.max_positions >= 2048, "{sequences} {limits:?}");
        let asked = Wish { fewer_will_do: false, ..wish };
        assert_eq!(choose(&units(None, true), &asked, 40_960, |_| Some(25 * MB)).1, 16);
    }

    #[test]
    fn room_beside_the_weights() {
        let mut base = Footprint::new("host");
        base.add(Part::Activations, 100);
        for (budget, mapped, room) in [
            (Budget::Free(None), 0, None),
            (Budget::Free(Some(1100)), 400, Some(600)),
            // Weights that do not fit leave a quarter.
            (Budget::Free(Some(1100)), 5000, Some(250)),
            (Budget::Promise { bytes: 1000, overhead: 50 }, 400, Some(450)),
            (Budget::Promise { bytes: 1000, overhead: 50 }, 5000, Some(0)),
        ] {
            let mut base = base.clone();
            let experts = model::plan::cost::Kind::Experts;
            base.add(Part::Weights(experts, Residency::Mapped), mapped);
            assert_eq!(budget.room(&base), room, "{budget:?} {mapped}");
        }
    }

    #[test]
    fn what_does_not_fit_a_device_is_named_with_what_would() {
        let plan = crate::load::open(None).unwrap().plan;
        let cuda = Cuda::default();
        let plan = cuda.lower(plan).unwrap();
        let on = |free, is_roomy| fit_device(&cuda, &plan, &wish(None, 1), free, "Card", is_roomy);
        let whole = on(1 << 40, true).unwrap();
        let weights = whole.footprint.weights();
        assert!(whole.limits.max_positions >= SMALL_CTX.min(plan.n_ctx_train));
        // A device that holds no more than the weights: what is free and what would fit are less than is needed.
        let why = on(weights, true).unwrap_err();
        assert!(why.is::<TooLarge>());
        let why = why.to_string();
        for part in ["fit the model on Card: ", " of weights", "steps of 512 tokens", " are free: ", "would fit"] {
            assert!(why.contains(part), "{part}: {why}");
        }
        // A short context fits where a long one does not: one who named the device takes it.
        let short = whole.footprint.total() - whole.footprint.bytes(|part| part == Part::Cache) + (1 << 20);
        assert!(on(short, true).is_err());
        assert!(on(short, false).unwrap().limits.max_positions < SMALL_CTX);
    }

    #[test]
    fn what_may_not_fit_is_warned_of() {
        assert_eq!(crowded(8, 8), None);
        let warning = crowded(22_500_000_000, 20_000_000_000).unwrap();
        assert!(warning.starts_with("the KV cache may take 22.5 GB, and 20.0 GB of memory are free"), "{warning}");
    }

    #[test]
    fn the_last_number_that_holds() {
        for most in 0..20 {
            for limit in 0..25 {
                assert_eq!(last(most, |n| n <= limit), limit.min(most));
            }
        }
    }
}
