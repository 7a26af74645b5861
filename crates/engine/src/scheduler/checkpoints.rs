//! Checkpoints: places in cached prefixes from which a sequence can go on although its layers keep more than pages.
//!
//! A checkpoint stands at the end of a registered page. It holds a copy of the recurrent state there and the window pages
//! before it, whatever of the two the model has. This file knows where sequences make them and which one goes first when
//! there is no room; it knows nothing of pages beside their numbers.

use backend::PAGE;

use super::pages::NONE;

/// A prompt is not cut for a checkpoint that saves less than this many tokens.
const GAP: usize = 2 * PAGE;
/// Least distance of the checkpoints along a prompt.
const SPACING: usize = 16 * PAGE;
/// Hits that count.
const MAX_HITS: u64 = 3;

/// One checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    /// The registered page at whose end it stands; [`NONE`] when the entry is free.
    pub page: u32,
    /// The slot with the copy of the state, or [`NONE`].
    pub slot: u32,
    /// The window pages before it, which it holds.
    pub window: Vec<u32>,
    /// When it was made or used.
    used: u64,
    /// How often sequences went on from it.
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

    /// Most checkpoints at a time.
    pub fn capacity(&self) -> usize {
        self.list.len()
    }

    /// A checkpoint.
    pub fn get(&self, id: u32) -> &Checkpoint {
        &self.list[id as usize]
    }

    /// A checkpoint, to be changed.
    pub fn get_mut(&mut self, id: u32) -> &mut Checkpoint {
        &mut self.list[id as usize]
    }

    /// The checkpoints there are.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Checkpoint)> {
        (0..).zip(&self.list).filter(|(_, c)| c.page != NONE)
    }

    /// A new checkpoint at the end of `page`, without state and window pages; none when there is no room.
    pub fn insert(&mut self, page: u32) -> Option<u32> {
        let id = self.free.pop()?;
        self.clock += 1;
        let c = &mut self.list[id as usize];
        (c.page, c.slot, c.used, c.hits) = (page, NONE, self.clock, 0);
        c.window.clear();
        Some(id)
    }

    /// Frees an entry, whose memory was given back.
    pub fn remove(&mut self, id: u32) {
        self.list[id as usize].page = NONE;
        self.free.push(id);
    }

    /// A sequence stands at the checkpoint again.
    pub fn touch(&mut self, id: u32) {
        self.clock += 1;
        self.list[id as usize].used = self.clock;
    }

    /// A sequence goes on from the checkpoint.
    pub fn hit(&mut self, id: u32) {
        self.touch(id);
        self.list[id as usize].hits += 1;
    }

    /// Whether the checkpoint never served anybody.
    pub fn is_unused(&self, id: u32) -> bool {
        self.list[id as usize].hits == 0
    }

    /// The checkpoint that goes first: the one not used for longest. Each hit, and being where sequences part, makes one
    /// count as if it was used later, by as many uses as there are checkpoints.
    pub fn worst(&self, is_branch: impl Fn(u32) -> bool) -> Option<u32> {
        let bonus = |c: &Checkpoint| (c.hits + u64::from(is_branch(c.page))).min(MAX_HITS) * self.list.len() as u64;
        self.iter().min_by_key(|(_, c)| c.used + bonus(c)).map(|(id, _)| id)
    }
}

/// Where a sequence makes its checkpoints.
///
/// Along a prompt: where it leaves a path that others went before, at the last page boundary before its end (the same prompt
/// again, or one with another end, goes on from there), and at regular distances, so that a prompt with another middle loses
/// no more than that. While it decodes: at every page boundary, each replacing the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cuts {
    /// Where the prompt ends and decoding starts.
    end: usize,
    /// Where it leaves the cached path, or 0.
    branch: usize,
    /// Distance of the regular ones; 0 when the sequence makes none at all.
    spacing: usize,
    /// The last one made or found.
    made: usize,
}

impl Cuts {
    /// For a sequence that has `n_tokens` tokens to begin with, where there is room for `capacity` checkpoints. The regular
    /// ones of one prompt take no more than half of the room.
    pub fn new(n_tokens: usize, capacity: usize) -> Cuts {
        let spacing = match capacity {
            0 => 0,
            _ => SPACING.max(n_tokens / (capacity / 2).max(1)).next_power_of_two(),
        };
        Cuts { end: n_tokens, branch: 0, spacing, made: 0 }
    }

    /// The sequence goes on from position `at`; the cached path goes up to `matched`.
    pub fn adopted(&mut self, at: usize, matched: usize) {
        self.made = self.made.max(at);
        self.branch = matched;
    }

    /// The next position where a chunk has to end, when the state can be copied only there.
    pub fn next(&self, computed: usize) -> Option<usize> {
        if self.spacing == 0 {
            return None;
        }
        let last = self.last();
        let regular = (computed / self.spacing + 1) * self.spacing;
        let wanted = |&at: &usize| at > computed && at <= last && at >= self.made + GAP;
        [self.branch, regular, last].into_iter().filter(wanted).min()
    }

    /// Whether a checkpoint is made at a page boundary, and whether it is one that stays when the next is made.
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

    /// The last page boundary before the prompt's last token.
    fn last(&self) -> usize {
        self.end.saturating_sub(1) / PAGE * PAGE
    }
}

/// What becomes of a checkpoint when its sequence makes the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stay {
    /// It stays.
    Kept,
    /// It goes, unless somebody went on from it.
    Replaced,
}
