//! Recurrent states: slots that ops read and update, cleared at a sequence's start, copied for checkpoints.
//!
//! A slot holds all states of the plan in order, so that a checkpoint is one copy. Behind each state there is room for
//! what its op keeps of a step's drafts. A commit only counts the accepted drafts: the op replays them when it next
//! reads the state, which saves a pass over memory. Only ops know what the numbers mean.

use std::ops::Range;

use model::plan::StateDecl;

use super::pool::Pool;
use backend::drafts::Uncommitted;
use backend::{Batch, CompileError, StepError};
use sys::arena::Arena;

/// All slots of a program.
pub struct States {
    /// Each state of the plan, in all slots.
    pub views: Vec<StateView>,
    /// Drafts of each slot that were accepted and that its states are still to be moved past, `[n_slots]`.
    pub accepted: Vec<u32>,
    uncommitted: Uncommitted,
    /// Memory that the views point into.
    _arena: Arena,
}

/// One state of the plan in all slots.
#[derive(Clone, Copy, Debug)]
pub struct StateView {
    ptr: *mut u8,
    slot_bytes: usize,
    n: usize,
    n_kept: usize,
}

// SAFETY: an address; every access states its own conditions.
unsafe impl Send for StateView {}
// SAFETY: as above.
unsafe impl Sync for StateView {}

/// Where each state lies in a slot, and the slot's length in bytes; none when the number does not exist.
fn layout(decls: &[StateDecl], kept: &[usize]) -> (Vec<usize>, Option<usize>) {
    let (mut slot_bytes, mut first) = (Some(0usize), Vec::with_capacity(decls.len()));
    for (decl, &kept) in decls.iter().zip(kept) {
        first.push(slot_bytes.unwrap_or(0));
        let n = decl.n.checked_add(kept);
        let bytes = n.and_then(|n| n.checked_mul(4)).and_then(|n| n.checked_next_multiple_of(64));
        slot_bytes = slot_bytes.and_then(|at| at.checked_add(bytes?));
    }
    (first, slot_bytes)
}

impl States {
    /// Bytes that [`States::new`] allocates, or none when the number does not exist.
    pub fn bytes(decls: &[StateDecl], kept: &[usize], n_slots: usize) -> Option<usize> {
        layout(decls, kept).1?.checked_mul(n_slots)
    }

    /// Memory for `n_slots` slots, and where each state lies in it; `kept` numbers behind each state are for its
    /// drafts.
    pub fn new(decls: &[StateDecl], kept: &[usize], n_slots: usize) -> Result<States, CompileError> {
        let what = "recurrent states";
        let (first, slot_bytes) = layout(decls, kept);
        let total = slot_bytes.and_then(|bytes| bytes.checked_mul(n_slots));
        let (Some(slot_bytes), Some(total)) = (slot_bytes, total) else {
            return Err(CompileError::Memory { what, bytes: usize::MAX });
        };
        let arena = Arena::new(what, total)?;
        let view = |((decl, &n_kept), at): ((&StateDecl, &usize), usize)| {
            // SAFETY: the first slot holds all states; where there is no slot, no view is ever read.
            let ptr = unsafe { arena.ptr().add(if n_slots > 0 { at } else { 0 }) };
            StateView { ptr, slot_bytes, n: decl.n, n_kept }
        };
        let n_slots = if decls.is_empty() { 0 } else { n_slots };
        Ok(States {
            views: decls.iter().zip(kept).zip(first).map(view).collect(),
            accepted: vec![0; n_slots],
            uncommitted: Uncommitted::new(n_slots),
            _arena: arena,
        })
    }

    /// Clears the states of the sequences that start in this step.
    pub fn start(&mut self, pool: &mut Pool, batch: &Batch) {
        if self.views.is_empty() {
            return;
        }
        for chunk in batch.chunks.iter().filter(|chunk| chunk.pos == 0) {
            self.accepted[chunk.state as usize] = 0;
            let views = &self.views;
            // SAFETY: the slot was checked, and each task has its own state.
            pool.run(views.len(), &|_, i| unsafe { views[i].of(chunk.state) }.fill(0.0));
        }
    }

    /// Whether the batch may be computed: see [`Uncommitted::check`].
    pub fn check(&self, batch: &Batch) -> Result<(), StepError> {
        self.uncommitted.check(batch)
    }

    /// The step of a batch was computed: the ops have moved its states past the accepted drafts, and kept the new ones.
    pub fn computed(&mut self, batch: &Batch) {
        if !self.views.is_empty() {
            batch.chunks.iter().for_each(|chunk| self.accepted[chunk.state as usize] = 0);
            self.uncommitted.computed(batch);
        }
    }

    /// So many drafts of a slot were accepted. Panics where it has fewer.
    pub fn commit(&mut self, slot: u32, n_accepted: usize) {
        if self.uncommitted.commit(slot, n_accepted) {
            self.accepted[slot as usize] = n_accepted as u32;
        }
    }

    /// Copies a slot to another, with its accepted drafts. Panics where there is no such slot, or it has uncommitted
    /// drafts.
    pub fn copy(&mut self, pool: &mut Pool, from: u32, to: u32) {
        let n_slots = self.accepted.len();
        for slot in [from, to] {
            assert!((slot as usize) < n_slots, "state {slot} of {n_slots}");
        }
        self.uncommitted.copied(from, to);
        if from == to {
            return;
        }
        let (views, n_accepted) = (&self.views, self.accepted[from as usize]);
        pool.run(views.len(), &|_, i| {
            let view = views[i];
            let end = if n_accepted > 0 { view.n + view.n_kept } else { view.n };
            // SAFETY: the slots were checked and are two, and each state is one chunk's.
            unsafe { view.part(to, 0..end).copy_from_slice(view.part(from, 0..end)) }
        });
        self.accepted[to as usize] = n_accepted;
    }

    /// Bytes of a saved slot: the number of accepted drafts, and each state with what is kept behind it. None without
    /// states.
    pub fn saved_bytes(&self) -> usize {
        let numbers: usize = self.views.iter().map(|view| view.n + view.n_kept).sum();
        if numbers > 0 { 4 + 4 * numbers } else { 0 }
    }

    /// Appends a slot to `out`. Panics as [`States::copy`].
    pub fn save(&self, slot: u32, out: &mut Vec<u8>) {
        let n_accepted = self.accepted[slot as usize];
        self.uncommitted.assert_committed(slot);
        out.extend_from_slice(&n_accepted.to_ne_bytes());
        for view in &self.views {
            // SAFETY: the slot is one of the program's, and no step is in flight.
            let numbers = unsafe { view.part(slot, 0..view.n + view.n_kept) };
            out.extend(numbers.iter().flat_map(|x| x.to_ne_bytes()));
        }
    }

    /// Restores a slot; false, and nothing is changed, where it has more accepted drafts than a step.
    pub fn restore(&mut self, slot: u32, bytes: &[u8], max_draft: usize) -> bool {
        let Some((n_accepted, mut rest)) = bytes.split_first_chunk::<4>() else { return false };
        let n_accepted = u32::from_ne_bytes(*n_accepted);
        if n_accepted as usize > max_draft || bytes.len() != self.saved_bytes() {
            return false;
        }
        self.uncommitted.forget(slot);
        self.accepted[slot as usize] = n_accepted;
        for view in &self.views {
            // SAFETY: as in `save`.
            let numbers = unsafe { view.part(slot, 0..view.n + view.n_kept) };
            let (mine, others) = rest.split_at(4 * numbers.len());
            for (x, bytes) in numbers.iter_mut().zip(mine.as_chunks().0) {
                *x = f32::from_ne_bytes(*bytes);
            }
            rest = others;
        }
        true
    }
}

impl StateView {
    /// A range of the numbers of a slot's state.
    ///
    /// # Safety
    /// As [`StateView::of`], for these numbers; `range` is within the state or what is kept behind it.
    pub unsafe fn part<'a>(&self, slot: u32, range: Range<usize>) -> &'a mut [f32] {
        // SAFETY: as the caller guarantees.
        unsafe {
            let state = self.ptr.add(slot as usize * self.slot_bytes).cast::<f32>();
            std::slice::from_raw_parts_mut(state.add(range.start), range.len())
        }
    }

    /// Some of the numbers that are kept of a slot's drafts.
    ///
    /// # Safety
    /// As [`StateView::of`], for these numbers; `range` is within them.
    pub unsafe fn kept<'a>(&self, slot: u32, range: Range<usize>) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.part(slot, self.n + range.start..self.n + range.end) }
    }

    /// The state of a slot.
    ///
    /// # Safety
    /// The slot is one of the program's, and nothing else reads or writes its copy of this state while the slice lives.
    pub unsafe fn of<'a>(&self, slot: u32) -> &'a mut [f32] {
        // SAFETY: as the caller guarantees; the memory starts zeroed, so it is initialised.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(slot as usize * self.slot_bytes).cast(), self.n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::Tables;

    #[test]
    fn slots_are_apart_and_start_from_zeros() {
        let decls = [(5, "a"), (200_000, "b"), (16, "c")].map(|(n, what)| StateDecl { what, n });
        let mut pool = Pool::new(2).unwrap();
        let mut states = States::new(&decls, &[7, 0, 100], 3).unwrap();
        let views = states.views.clone();
        let value = |slot: u32, state: usize, i: usize| (slot as usize * 1_000_000 + state * 300_000 + i) as f32;
        let fill = |slot: u32| {
            for (state, view) in views.iter().enumerate() {
                // SAFETY: the slot exists, and the test has one thread.
                unsafe { view.of(slot) }.iter_mut().enumerate().for_each(|(i, x)| *x = value(slot, state, i));
            }
        };
        // `of[slot]` is the slot whose numbers are in it, `None` for zeros.
        let check = |of: [Option<u32>; 3]| {
            for (slot, of) in (0..).zip(of) {
                for (state, view) in views.iter().enumerate() {
                    // SAFETY: as above.
                    let found = unsafe { view.of(slot) };
                    assert_eq!(found.len(), decls[state].n);
                    let wanted = |i| of.map_or(0.0, |of| value(of, state, i));
                    assert!(found.iter().enumerate().all(|(i, &x)| x == wanted(i)), "slot {slot} state {state}");
                }
            }
        };
        check([None; 3]);
        (0..3).for_each(fill);
        check([Some(0), Some(1), Some(2)]);
        states.copy(&mut pool, 2, 0);
        states.copy(&mut pool, 1, 1);
        check([Some(2), Some(1), Some(2)]);
        let mut batch = Batch::default();
        batch.push(&[0], 0, Tables { state: 1, ..Tables::default() }, []);
        batch.push(&[0], 7, Tables { state: 2, ..Tables::default() }, []);
        states.start(&mut pool, &batch);
        check([Some(2), None, Some(2)]);
    }

    #[test]
    fn a_saved_slot_is_restored_with_its_accepted_drafts() {
        let decls = [(5, "a"), (16, "b")].map(|(n, what)| StateDecl { what, n });
        let mut states = States::new(&decls, &[7, 0], 3).unwrap();
        let views = states.views.clone();
        // SAFETY: the slots exist, and the test has one thread.
        let numbers = |slot| views.iter().flat_map(move |v| unsafe { v.part(slot, 0..v.n + v.n_kept) });
        numbers(1).zip(1..).for_each(|(x, i)| *x = i as f32);
        states.accepted[1] = 2;
        let mut saved = Vec::new();
        states.save(1, &mut saved);
        assert_eq!(saved.len(), states.saved_bytes());
        assert!(states.restore(2, &saved, 3));
        assert!(numbers(2).zip(1..).all(|(x, i)| *x == i as f32) && states.accepted == [0, 2, 2]);
        // More drafts than a step has, other lengths: nothing changes.
        assert!(!states.restore(0, &saved, 1) && !states.restore(0, &saved[1..], 3) && !states.restore(0, &[], 3));
        assert!(numbers(0).all(|x| *x == 0.0) && states.accepted == [0, 2, 2]);
    }

    #[test]
    fn memory_that_cannot_be_is_an_error() {
        for (n, n_slots) in [(usize::MAX / 4, 2), (usize::MAX, 1), (1 << 40, 1 << 30)] {
            let error = States::new(&[StateDecl { what: "a", n }], &[1], n_slots).err();
            assert!(matches!(error, Some(CompileError::Memory { what: "recurrent states", .. })), "{n} {n_slots}");
        }
    }
}
