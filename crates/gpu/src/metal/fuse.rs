//! Runs of ops that go together in one dispatch or a few, and their order. Knows plans and no kernels.

mod patterns;

use model::plan::{Access, Buf, Op, Plan};

pub use self::patterns::{Chain, DeltaIn, DeltaNorm, Heads, Latent, LayerNorm, Mixture, Part, Shared, Split, Sum};
use self::patterns::{chain, delta_in, delta_norm, heads, latent, layer_norm, mixture, scaled_route, split_heads};
use super::variants::Off;

/// What is lowered as one.
#[derive(Clone, Debug, PartialEq)]
pub enum Run {
    /// The op by itself.
    Op,
    Heads(Heads, Option<Split>),
    Mixture(Mixture),
    /// A mixture whose sum begins a chain.
    MixtureChain(Mixture, Chain),
    Latent(Latent),
    DeltaIn(DeltaIn),
    DeltaNorm(DeltaNorm),
    Chain(Chain),
    LayerNorm(LayerNorm),
    /// A router's choice among logits times this.
    Route(f32),
}

/// A run of a plan, and when it is due.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// First op, and number of ops.
    pub first: usize,
    pub n: usize,
    pub run: Run,
    /// First moment, and the one behind the last: all that it waits for has ended at `from`.
    pub from: usize,
    pub to: usize,
}

/// A plan's ops as runs, in the order of their moments. Runs of one moment do not wait for each other.
pub fn steps(plan: &Plan, off: Off) -> Vec<Step> {
    let (mut written, mut read) = (vec![0; plan.bufs.len()], vec![0; plan.bufs.len()]);
    let (mut caches, mut states) = (vec![0; plan.caches.len()], vec![0; plan.states.len()]);
    let mut steps = Vec::new();
    let mut first = 0;
    while first < plan.ops.len() {
        let (run, n) = run(plan, first, off);
        let ops = &plan.ops[first..first + n];
        let mut from = 0;
        for (buf, access) in ops.iter().flat_map(Op::bufs) {
            let buf = buf.0 as usize;
            let readers = if access == Access::Read { 0 } else { read[buf] };
            from = from.max(written[buf]).max(readers);
        }
        let cache = |op: &Op| match op {
            Op::KvAppend { cache, .. } | Op::Choose { cache, .. } | Op::Attention { cache, .. } => {
                Some(cache.0 as usize)
            }
            _ => None,
        };
        let state = |op: &Op| op.state().map(|state| state.0 as usize);
        from = ops.iter().filter_map(cache).fold(from, |from, i| from.max(caches[i]));
        from = ops.iter().filter_map(state).fold(from, |from, i| from.max(states[i]));
        // It waits for nothing, and its buffer is kept no longer than it is read.
        if let Op::Constant { .. } = ops[0] {
            from = from.max(steps.last().map_or(0, |step: &Step| step.from));
        }
        // Dispatches that follow each other.
        let depth = match run {
            Run::Mixture(_) => 2,
            Run::MixtureChain(..) | Run::Latent(_) => 3,
            Run::Op if matches!(ops[0], Op::Experts { .. }) => 2,
            _ => 1,
        };
        let to = from + depth;
        for (buf, access) in ops.iter().flat_map(Op::bufs) {
            let last = if access == Access::Read { &mut read } else { &mut written };
            last[buf.0 as usize] = last[buf.0 as usize].max(to);
        }
        ops.iter().filter_map(cache).for_each(|i| caches[i] = to);
        ops.iter().filter_map(state).for_each(|i| states[i] = to);
        steps.push(Step { first, n, run, from, to });
        first += n;
    }
    steps.sort_by_key(|step| step.from);
    steps
}

fn run(plan: &Plan, i: usize, off: Off) -> (Run, usize) {
    if !off.attention {
        if let Some((split, heads, n)) = split_heads(plan, i) {
            return (Run::Heads(heads, Some(split)), n);
        }
        if let Some((heads, n)) = heads(plan, i) {
            return (Run::Heads(heads, None), n);
        }
    }
    if !off.experts
        && let Some((mixture, n)) = mixture(plan, i)
    {
        let first = mixture.sum.norm.map(|norm| (mixture.sum.x, norm)).filter(|_| !mixture.sum.add && !off.norms);
        return match first.and_then(|first| chain(plan, i + n, Some(first))) {
            Some((chain, more)) => (Run::MixtureChain(mixture, chain), n + more),
            None => (Run::Mixture(mixture), n),
        };
    }
    if !off.latent
        && let Some((latent, n)) = latent(plan, i)
    {
        return (Run::Latent(latent), n);
    }
    if !off.delta {
        if let Some((delta, n)) = delta_in(plan, i) {
            return (Run::DeltaIn(delta), n);
        }
        if let Some((norm, n)) = delta_norm(plan, i) {
            return (Run::DeltaNorm(norm), n);
        }
    }
    if !off.experts
        && let Some(scale) = scaled_route(plan, i)
    {
        return (Run::Route(scale), 2);
    }
    if !off.norms
        && let Some((norm, n)) = layer_norm(plan, i)
    {
        return (Run::LayerNorm(norm), n);
    }
    match chain(plan, i, None).filter(|_| !off.norms) {
        Some((chain, n)) => (Run::Chain(chain), n),
        None => (Run::Op, 1),
    }
}

/// First and last moment of each buffer, `[bufs]`: buffers that are in use at one moment lie apart. The logits and
/// their input live to the end, and so does what a draft head is given, whose moments follow those of the model.
pub fn lifetimes(plan: &Plan, off: Off) -> Vec<Option<(usize, usize)>> {
    let steps = steps(plan, off);
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; plan.bufs.len()];
    for step in &steps {
        for (buf, _) in plan.ops[step.first..step.first + step.n].iter().flat_map(Op::bufs) {
            let life = lives[buf.0 as usize].get_or_insert((step.from, step.to - 1));
            *life = (life.0.min(step.from), life.1.max(step.to - 1));
        }
    }
    let end = steps.iter().map(|step| step.to).max().unwrap_or(0);
    let source = plan.draft.as_ref().map(|draft| draft.source);
    for buf in [Some(plan.logits), plan.hidden(), source].into_iter().flatten() {
        if let Some(Some((_, last))) = lives.get_mut(buf.0 as usize) {
            *last = end;
        }
    }
    if let (Some(draft), Some(head)) = (&plan.draft, plan.draft_plan()) {
        let begin = end + 1;
        for (life, own) in lives.iter_mut().zip(lifetimes(&head, off)) {
            let Some((first, last)) = own.map(|(first, last)| (begin + first, begin + last)) else { continue };
            *life = Some((life.map_or(first, |life| life.0), last));
        }
        if let Some(Some((first, _))) = lives.get_mut(draft.input.0 as usize) {
            *first = begin;
        }
    }
    lives
}

/// Moves norms of a row that other norms have just read, or just made, to where those are, so that they go together.
pub fn gather_norms(plan: &mut Plan) {
    for i in 1..plan.ops.len() {
        let Op::RmsNorm { x, residual: None, out, .. } = plan.ops[i] else { continue };
        let meets = |op: &Op| {
            let bufs = op.bufs();
            bufs.iter().any(|&(buf, access)| buf == out || (buf == x && access != Access::Read))
        };
        let is_norm = |op: &Op| matches!(op, Op::RmsNorm { x: other, .. } if *other == x);
        // The op that it may stand behind: a norm of the row, with nothing between that it must not pass.
        let stop = plan.ops[..i].iter().rposition(meets);
        let last = plan.ops[..i].iter().rposition(is_norm);
        let Some(last) = last.filter(|&last| stop.is_none_or(|stop| stop <= last) && last + 1 < i) else { continue };
        let is_out = plan.ops[last].bufs().iter().any(|&(buf, _)| buf == out);
        if !is_out {
            let (op, layer) = (plan.ops.remove(i), plan.layers.remove(i));
            plan.ops.insert(last + 1, op);
            plan.layers.insert(last + 1, layer);
        }
    }
}

/// Whether an op behind `i` reads what a buffer holds then.
fn is_read_behind(plan: &Plan, buf: Buf, i: usize) -> bool {
    for op in &plan.ops[i + 1..] {
        let bufs = op.bufs();
        let mut accesses = bufs.iter().filter(|(b, _)| *b == buf).map(|(_, access)| *access).peekable();
        if accesses.peek().is_some() {
            return accesses.any(|access| access != Access::Write);
        }
    }
    let is_given = plan.draft.as_ref().is_some_and(|draft| draft.source == buf);
    is_given || buf == plan.logits || plan.hidden() == Some(buf)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use model::plan::passes;

    use super::*;

    /// Plans of every architecture, as they are lowered.
    fn plans() -> Vec<Plan> {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data");
        let folders = ["deepseekv2", "deepseekv3", "gemma4", "glm4moe", "gptoss", "qwen35", "qwen3moe", "qwen3next"];
        let plan = |folder: &str| {
            let checkpoint = checkpoint::open(&data.join(folder).join("model-bf16.gguf")).unwrap();
            let rewritten = model::build(&checkpoint).unwrap().rewrite(|plan| {
                passes::fuse(plan);
                gather_norms(plan);
            });
            rewritten.unwrap().into_plan()
        };
        folders.map(plan).into()
    }

    #[test]
    fn every_op_is_in_one_step_and_waits_for_what_it_reads() {
        let off = Off { attention: true, latent: true, experts: true, norms: true, delta: true };
        for (plan, off) in plans().iter().flat_map(|plan| [(plan, Off::NONE), (plan, off)]) {
            let steps = steps(plan, off);
            let mut at = vec![usize::MAX; plan.ops.len()];
            for (i, step) in steps.iter().enumerate() {
                for op in &mut at[step.first..step.first + step.n] {
                    assert_eq!(std::mem::replace(op, i), usize::MAX, "{}: an op in two steps", plan.arch);
                }
            }
            assert!(!at.contains(&usize::MAX), "{}: an op in no step", plan.arch);
            assert!(steps.is_sorted_by_key(|step| step.from));
            for (j, op) in plan.ops.iter().enumerate() {
                for (buf, access) in op.bufs() {
                    let meets = |i: &usize| {
                        let other = plan.ops[*i].bufs().into_iter().find(|(other, _)| *other == buf);
                        other.is_some_and(|(_, other)| (access, other) != (Access::Read, Access::Read))
                    };
                    for i in (0..j).filter(meets).filter(|&i| at[i] != at[j]) {
                        assert!(steps[at[i]].to <= steps[at[j]].from, "{}: ops {i} and {j}", plan.arch);
                    }
                }
            }
        }
    }

    #[test]
    fn plain_kernels_are_an_op_each() {
        assert!(plans().iter().flat_map(|plan| steps(plan, Off::ALL)).all(|step| step.run == Run::Op && step.n == 1));
    }
}
