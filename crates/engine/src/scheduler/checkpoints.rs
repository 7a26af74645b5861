//! Checkpoints: positions in cached prefixes where a sequence can resume although its layers keep more than pages.
//!
//! A checkpoint is at the end of a registered page. It holds a copy of the recurrent state and the window pages before
//! that position, whichever the model has. This file decides where sequences make checkpoints and which one is evicted
//! first; of pages it knows only numbers.

use backend::PAGE;

use super::pages::NONE;

/// A prompt is not cut for a checkpoint that saves less than this many tokens.
const GAP: usize = 2 * PAGE;
/// Minimum distance of the checkpoints along a prompt.
const SPACING: usize = 16 * PAGE;
/// Maximum number of hits that count for eviction.
const MAX_HITS: u64 = 3;

/// One checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    /// The registered page that it ends; [`NONE`] when the entry is free.
    pub page: u32,
    /// The slot of the copied state, or [`NONE`].
    pub slot: u32,
    /// The window pages before it, which it keeps allocated.
    pub window: Vec<u32>,
    /// When it was made or used.
    used: u64,
    /// Number of sequences that resumed from it.
    hits: u64,
}

/// A fixed number of checkpoints.
#[derive(Debug)]
pub(super) struct Checkpoints {
    list: Vec<Checkpoint>, // [capacity]
    free: Vec<u32>,
    clock: u64,
}

impl Checkpoints {
    /// Room for `capacity` checkpoints with up to `n_window` window pages each.
    pub fn new(capacity: usize, n_window: usize) -> Checkpoints {
        let entry = || Checkpoint { page: NONE, slot: NONE, window: Vec::with_capacity(n_window), used: 0, hits: 0 };
        Checkpoints {
            list: (0..capacity).map(|_| entry()).collect(),
            free: (0..capacity as u32).rev().collect(),
            clock: 0,
        }
    }

    /// Maximum number of checkpoints at a time.
    pub fn capacity(&self) -> usize {
        self.list.len()
    }

    /// Returns a checkpoint.
    pub fn get(&self, id: u32) -> &Checkpoint {
        &self.list[id as usize]
    }

    /// Returns a checkpoint, mutable.
    pub fn get_mut(&mut self, id: u32) -> &mut Checkpoint {
        &mut self.list[id as usize]
    }

    /// All checkpoints.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Checkpoint)> {
        (0..).zip(&self.list).filter(|(_, c)| c.page != NONE)
    }

    /// Adds a checkpoint at the end of `page`, without state and window pages; `None` when there is no room.
    pub fn insert(&mut self, page: u32) -> Option<u32> {
        let id = self.free.pop()?;
        self.clock += 1;
        let c = &mut self.list[id as usize];
        (c.page, c.slot, c.used, c.hits) = (page, NONE, self.clock, 0);
        c.window.clear();
        Some(id)
    }

    /// Frees an entry whose memory is already freed.
    pub fn remove(&mut self, id: u32) {
        self.list[id as usize].page = NONE;
        self.free.push(id);
    }

    /// A sequence reached the checkpoint again.
    pub fn touch(&mut self, id: u32) {
        self.clock += 1;
        self.list[id as usize].used = self.clock;
    }

    /// A sequence resumes from the checkpoint.
    pub fn hit(&mut self, id: u32) {
        self.touch(id);
        self.list[id as usize].hits += 1;
    }

    /// Returns whether no sequence ever resumed from the checkpoint.
    pub fn is_unused(&self, id: u32) -> bool {
        self.list[id as usize].hits == 0
    }

    /// Returns the checkpoint to evict: the least recently used one. Each hit, and being a branch, makes a checkpoint
    /// count as used later, by as many uses as there are checkpoints.
    pub fn worst(&self, is_branch: impl Fn(u32) -> bool) -> Option<u32> {
        let bonus = |c: &Checkpoint| (c.hits + u64::from(is_branch(c.page))).min(MAX_HITS) * self.list.len() as u64;
        self.iter().min_by_key(|(_, c)| c.used + bonus(c)).map(|(id, _)| id)
    }
}

/// Positions of a sequence's checkpoints.
///
/// Along a prompt: where it leaves the cached path of other sequences, at the last page boundary before its end (the
/// same prompt, or one with another end, resumes there), and at regular distances, which bound the loss of a prompt
/// with another middle. While decoding: at every page boundary, each replacing the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cuts {
    /// Length of the prompt, where decoding starts.
    end: usize,
    /// Where the prompt leaves the cached path, or 0.
    branch: usize,
    /// Distance of the regular ones; 0 when the sequence makes no checkpoints.
    spacing: usize,
    /// The last one made or resumed from.
    made: usize,
}

impl Cuts {
    /// For a sequence that starts with `n_tokens` tokens, with room for `capacity` checkpoints. The regular ones of one
    /// prompt take at most half of the room.
    pub fn new(n_tokens: usize, capacity: usize) -> Cuts {
        let spacing = match capacity {
            0 => 0,
            _ => SPACING.max(n_tokens / (capacity / 2).max(1)).next_power_of_two(),
        };
        Cuts { end: n_tokens, branch: 0, spacing, made: 0 }
    }

    /// The sequence resumes at position `at`; the cached path extends to `matched`.
    pub fn adopted(&mut self, at: usize, matched: usize) {
        self.made = self.made.max(at);
        self.branch = matched;
    }

    /// Returns the next position where a chunk must end, because the state can be copied only there.
    pub fn next(&self, computed: usize) -> Option<usize> {
        if self.spacing == 0 {
            return None;
        }
        let last = self.last();
        let regular = (computed + 1).max(self.made + GAP).next_multiple_of(self.spacing);
        let wanted = |&at: &usize| at > computed && at <= last && at >= self.made + GAP;
        [self.branch, regular, last].into_iter().filter(wanted).min()
    }

    /// Returns whether a checkpoint is due at a page boundary, and whether it outlives the next one.
    pub fn due(&self, at: usize) -> Option<Stay> {
        if self.spacing == 0 {
            return None;
        }
        let named = at == self.branch || at == self.last() || at.is_multiple_of(self.spacing);
        match (named && at >= self.made + GAP, at >= self.end) {
            (true, _) => Some(Stay::Kept),
            (false, true) => Some(Stay::Replaced),
            (false, false) => None,
        }
    }

    /// A checkpoint was made at a position.
    pub fn made(&mut self, at: usize) {
        self.made = at;
    }

    /// Returns the last page boundary before the prompt's last token.
    fn last(&self) -> usize {
        self.end.saturating_sub(1) / PAGE * PAGE
    }
}

/// Lifetime of a checkpoint once its sequence makes the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stay {
    /// It is kept.
    Kept,
    /// It is removed, unless a sequence resumed from it.
    Replaced,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_used_goes_first_and_hits_count_as_time() {
        let mut checkpoints = Checkpoints::new(4, 0);
        let ids: Vec<u32> = (0..4).map(|page| checkpoints.insert(page).unwrap()).collect();
        assert_eq!(checkpoints.insert(9), None);
        assert_eq!(checkpoints.worst(|_| false), Some(ids[0]));
        // A branch counts as a hit, and a hit as four later uses.
        assert_eq!(checkpoints.worst(|page| page == 0), Some(ids[1]));
        checkpoints.hit(ids[1]);
        checkpoints.touch(ids[0]);
        assert_eq!(checkpoints.worst(|_| false), Some(ids[2]));
        // A hit does not keep a checkpoint forever.
        for page in 10..30 {
            let worst = checkpoints.worst(|_| false).unwrap();
            checkpoints.remove(worst);
            checkpoints.insert(page).unwrap();
        }
        assert!(checkpoints.iter().all(|(_, c)| c.page >= 10));
        assert_eq!(checkpoints.iter().count(), 4);
    }

    #[test]
    fn prompts_are_cut_where_a_checkpoint_is_worth_it() {
        // tokens, room, resumed at, branch, cuts
        let cases: &[(usize, usize, usize, usize, &[usize])] = &[
            (1, 8, 0, 0, &[]),
            (64, 8, 0, 0, &[]),
            (65, 8, 0, 0, &[64]),
            (1200, 8, 0, 0, &[512, 1024, 1184]),
            (1200, 8, 0, 320, &[320, 512, 1024, 1184]),
            (1200, 8, 512, 512, &[1024, 1184]),
            // Too close to the one before.
            (1080, 8, 0, 0, &[512, 1024]),
            (1200, 8, 0, 480, &[480, 1024, 1184]),
            // At most half of the room for one prompt.
            (8000, 8, 0, 0, &[2048, 4096, 6144, 7968]),
            (8000, 1, 0, 0, &[7968]),
            (8000, 0, 0, 0, &[]),
        ];
        for &(n_tokens, capacity, at, matched, expected) in cases {
            let mut cuts = Cuts::new(n_tokens, capacity);
            cuts.adopted(at, matched);
            let (mut computed, mut found) = (at, Vec::new());
            while let Some(next) = cuts.next(computed) {
                assert!(next > computed && next < n_tokens);
                assert_eq!(cuts.due(next), Some(Stay::Kept));
                cuts.made(next);
                found.push(next);
                computed = next;
            }
            assert_eq!(found, expected, "{n_tokens} tokens, room for {capacity}, from {at}");
        }
        // Decoding makes one at each page, which replaces the one before; the regular ones are kept.
        let mut cuts = Cuts::new(100, 8);
        cuts.made(96);
        assert_eq!(cuts.due(128), Some(Stay::Replaced));
        assert_eq!(cuts.due(512), Some(Stay::Kept));
        assert_eq!(cuts.due(96), None);
    }
}
