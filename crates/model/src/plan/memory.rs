//! Places buffers: those that are never alive at the same time share memory.
//!
//! Sizes follow from the limits of a step, so the arena is allocated once. Knows no device.

use super::Plan;

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// An arena for the buffers of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte of each buffer, `[bufs]`, a multiple of [`ALIGN`].
    pub offset: Vec<usize>,
    /// Length of each buffer in bytes at the limits of a step, `[bufs]`.
    pub len: Vec<usize>,
    /// Length of the arena in bytes. Sums saturate, so impossible limits fail at allocation.
    pub bytes: usize,
}

/// First and last op that names a buffer, as indices into [`Plan::all_ops`]; `None` for unused buffers. The logits and
/// their input live to the end of their ops, and so do the hidden states that a draft head is given.
pub fn lifetimes(plan: &Plan) -> Vec<Option<(usize, usize)>> {
    let mut lives = vec![None; plan.bufs.len()];
    let n_ops = plan.ops.len();
    for (i, op) in plan.all_ops().enumerate() {
        for (buf, _) in op.bufs() {
            let life = &mut lives[buf.0 as usize];
            *life = Some((life.map_or(i, |(first, _): (usize, usize)| first), i));
        }
    }
    let mut outputs = vec![(Some(plan.logits), n_ops), (plan.hidden(), n_ops)];
    if let Some(draft) = &plan.draft {
        let end = n_ops + draft.ops.len();
        outputs.extend([(Some(draft.source), n_ops), (Some(draft.logits), end), (plan.draft_hidden(), end)]);
        if let Some(Some((first, _))) = lives.get_mut(draft.input.0 as usize) {
            *first = n_ops;
        }
    }
    for (buf, end) in outputs {
        if let Some(Some((_, last))) = buf.and_then(|buf| lives.get_mut(buf.0 as usize)) {
            *last = end;
        }
    }
    lives
}

/// Places the buffers of a plan for steps of at most `max_tokens` tokens and `max_outputs` rows of logits.
///
/// Largest first, each at the lowest gap among those alive at the same time (Pisarchyk and Lee, arXiv 2001.03288).
pub fn place(plan: &Plan, max_tokens: usize, max_outputs: usize) -> Placement {
    place_lives(plan, &lifetimes(plan), max_tokens, max_outputs)
}

/// Returns the same with lifetimes of the caller's own, `[bufs]`: first and last moment of each buffer.
pub fn place_lives(plan: &Plan, lives: &[Option<(usize, usize)>], max_tokens: usize, max_outputs: usize) -> Placement {
    let len: Vec<usize> = plan
        .bufs
        .iter()
        .map(|buf| {
            let rows = buf.rows.count(max_tokens, max_outputs);
            rows.saturating_mul(buf.width).saturating_mul(buf.elem.bytes())
        })
        .collect();

    let mut order: Vec<usize> = (0..len.len()).filter(|&i| lives[i].is_some()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(len[i]), i));
    let mut offset = vec![0; len.len()];
    let mut bytes = 0;
    let mut placed: Vec<usize> = Vec::with_capacity(order.len()); // by offset
    for i in order {
        let mut at = 0usize;
        for &j in placed.iter().filter(|&&j| overlap(lives[i], lives[j])) {
            if at.saturating_add(len[i]) <= offset[j] {
                break;
            }
            at = at.max(align(offset[j].saturating_add(len[j])));
        }
        offset[i] = at;
        bytes = bytes.max(align(at.saturating_add(len[i])));
        placed.insert(placed.partition_point(|&j| offset[j] <= at), i);
    }
    Placement { offset, len, bytes }
}

fn overlap(a: Option<(usize, usize)>, b: Option<(usize, usize)>) -> bool {
    matches!((a, b), (Some(a), Some(b)) if a.0 <= b.1 && b.0 <= a.1)
}

fn align(n: usize) -> usize {
    n.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
}

/// Bytes that [`place`] would need without sharing: for printing what sharing saves.
pub fn unshared_bytes(placement: &Placement) -> usize {
    placement.len.iter().fold(0, |sum, &len| align(len).saturating_add(sum))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Buf, BufDecl, Elem, Op, Rows};
    use super::*;

    /// Returns a plan of copies: op `i` reads and writes the buffers of `uses[i]`. Only lifetimes and sizes matter
    /// here.
    fn plan(widths: &[usize], uses: &[(usize, usize)]) -> Plan {
        let rows = [Rows::Tokens, Rows::Slots(3), Rows::Outputs];
        let bufs = widths.iter().enumerate().map(|(i, &width)| BufDecl {
            name: format!("b{i}"),
            rows: rows[i % 3],
            width,
            elem: Elem::F32,
        });
        let buf = |i: usize| Buf((i % widths.len()) as u32);
        let ops: Vec<Op> = uses.iter().map(|&(x, y)| Op::Add { x: buf(x), y: buf(y) }).collect();
        Plan {
            arch: "test".into(),
            n_vocab: 1,
            d_model: 1,
            n_ctx_train: 1,
            weights: Vec::new(),
            bufs: bufs.collect(),
            caches: Vec::new(),
            states: Vec::new(),
            ropes: Vec::new(),
            long_ropes: None,
            layers: vec![None; ops.len()],
            ops,
            logits: Buf(0),
            whole: false,
            draft: None,
        }
    }

    proptest! {
        #[test]
        fn buffers_that_live_together_lie_apart(
            widths in prop::collection::vec(1usize..200, 1..40),
            uses in prop::collection::vec((0usize..40, 0usize..40), 1..60),
            max_tokens in 0usize..9,
            max_outputs in 0usize..9,
        ) {
            let plan = plan(&widths, &uses);
            let placement = place(&plan, max_tokens, max_outputs);
            let lives = lifetimes(&plan);
            for i in 0..widths.len() {
                let end = placement.offset[i] + placement.len[i];
                prop_assert!(placement.offset[i].is_multiple_of(ALIGN));
                prop_assert!(lives[i].is_none() || end <= placement.bytes);
                for j in 0..i {
                    let apart = end <= placement.offset[j]
                        || placement.offset[j] + placement.len[j] <= placement.offset[i]
                        || placement.len[i] == 0 || placement.len[j] == 0;
                    prop_assert!(apart || !overlap(lives[i], lives[j]), "{i} and {j}");
                }
            }
            prop_assert!(placement.bytes <= unshared_bytes(&placement));
        }
    }

    #[test]
    fn a_chain_needs_two_buffers_at_a_time() {
        let mut plan = plan(&[16; 30], &(0..28).map(|i| (i + 1, i + 2)).collect::<Vec<_>>());
        plan.bufs.iter_mut().for_each(|buf| buf.rows = Rows::Tokens);
        let placement = place(&plan, 4, 4);
        assert_eq!(placement.bytes, 2 * 16 * 4 * 4);
    }

    #[test]
    fn limits_that_cannot_be_saturate() {
        let plan = plan(&[16, 16], &[(0, 1)]);
        assert_eq!(place(&plan, usize::MAX, usize::MAX).bytes, usize::MAX);
    }
}
