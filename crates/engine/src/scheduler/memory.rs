//! All memory of sequences: pages, window pages and state slots, handed out and taken back together.
//!
//! A cached prefix can be resumed where everything is cached that the next position needs: the pages of the whole
//! prefix, the window pages that the position looks at, and, where the model has recurrent state, a checkpoint of it.
//! Each can be evicted by itself; [`Memory::adopt`] goes as far as all of them reach. It knows nothing of requests.

use backend::{Kinds, Limits, PAGE, Piece, Tables};

use super::checkpoints::{Checkpoints, Cuts, Stay};
use super::pages::{Attached, CacheChange, NONE, PageCounts, PagePool, Parent};
use super::store::{Key, Part, Unsaved, secret};
use super::windows::WindowPool;

/// What one sequence holds.
///
/// Between steps that is exactly what `computed` positions need: the first `n_registered` pages can be found in the
/// prefix cache, and the window pages are those that the next position looks at.
#[derive(Debug)]
pub(super) struct Held {
    /// Positions in the cache; the state covers all of them.
    pub computed: usize,
    pages: Vec<u32>,
    n_registered: usize,
    /// The last registered page.
    chain: Parent,
    root: Parent,
    window_pages: Vec<u32>,
    first_window_block: usize,
    /// Slot of its recurrent state, while it runs.
    slot: Option<u32>,
    /// The slot of the checkpoint to resume from, until its state is copied.
    restore: Option<u32>,
    cuts: Cuts,
    /// The page of the checkpoint that the next one replaces.
    replaced: Option<u32>,
    salt: u64,
    /// Where prompts are stored, the names of the registered pages, `[n_registered]`.
    keys: Vec<Key>,
    /// A step has computed something for it since it took its memory.
    has_run: bool,
}

impl Held {
    /// Returns whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.window_pages.is_empty() && self.slot.is_none()
    }

    /// Pages in order.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Where it lies. The slot of the recurrent state is 0 where there is none.
    pub fn tables(&self) -> Tables<'_> {
        let Held { pages, window_pages, first_window_block, slot, .. } = self;
        Tables { pages, window_pages, first_window_block: *first_window_block, state: slot.unwrap_or(0) }
    }

    /// Returns the next position where a chunk has to end for a checkpoint.
    pub fn next_cut(&self) -> Option<usize> {
        self.cuts.next(self.computed)
    }

    /// Returns the copy of state with which the sequence resumes, `(from, to)`; to be made before anything else
    /// is.
    pub fn take_restore(&mut self) -> Option<(u32, u32)> {
        Some((self.restore.take()?, self.slot?))
    }
}

/// All pools.
#[derive(Debug)]
pub(super) struct Memory {
    kinds: Kinds,
    pages: PagePool,
    windows: WindowPool,
    checkpoints: Checkpoints,
    free_slots: Vec<u32>,
    n_slots: usize,
    /// Maximum number of window pages that a sequence holds between steps.
    max_window: usize,
    /// Maximum number of tokens of a step.
    max_tokens: usize,
    /// The cached path of a search.
    path: Vec<(u32, u64)>,
    /// Copies of state that the last step requires, `(from, to)`, in order.
    copies: Vec<(u32, u32)>,
    /// What a store is still to get, where there is one.
    unsaved: Option<Unsaved>,
    /// The secret in what tokens of images are called in the cache.
    secret: [u8; 32],
}

impl Memory {
    /// Returns the memory of a program, for up to `max_running` sequences of up to `context` positions at a time.
    /// Everything that steps need is allocated here.
    pub fn new(limits: Limits, kinds: Kinds, max_running: usize, context: usize) -> Memory {
        let max_window = kinds.window_blocks().min(context.div_ceil(PAGE));
        let n_window_pages = if kinds.window.is_some() { limits.n_window_pages } else { 0 };
        let n_slots = if kinds.state { limits.n_states } else { 0 };
        // A slot for each sequence that runs; a run of window pages for each checkpoint.
        let by_state = kinds.state.then(|| n_slots.saturating_sub(max_running));
        let by_window = kinds.window.and_then(|_| n_window_pages.checked_div(max_window));
        let capacity = by_state.into_iter().chain(by_window).min().unwrap_or(0);
        Memory {
            kinds,
            pages: PagePool::new(limits.n_pages),
            windows: WindowPool::new(n_window_pages),
            checkpoints: Checkpoints::new(capacity, max_window),
            free_slots: (0..n_slots as u32).rev().collect(),
            n_slots,
            max_window,
            max_tokens: limits.max_tokens,
            path: Vec::with_capacity(limits.n_pages),
            copies: Vec::with_capacity(max_running),
            unsaved: None,
            secret: secret(),
        }
    }

    /// Returns the secret that names tokens of images.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Tokens of images are called from now on what a store calls them.
    pub fn set_secret(&mut self, secret: [u8; 32]) {
        self.secret = secret;
    }

    /// What is computed from now on is queued for a store.
    pub fn set_unsaved(&mut self, unsaved: Unsaved) {
        self.unsaved = Some(unsaved);
    }

    /// Returns the queue for a store.
    pub fn unsaved(&self) -> Option<&Unsaved> {
        self.unsaved.as_ref()
    }

    /// Returns the same, mutable.
    pub fn unsaved_mut(&mut self) -> Option<&mut Unsaved> {
        self.unsaved.as_mut()
    }

    /// Notes from now on what becomes findable in the prefix cache, and what does not stay so.
    pub fn watch(&mut self) {
        self.pages.watch();
    }

    /// Returns what was noted since the last call, in order.
    pub fn changes(&mut self) -> impl Iterator<Item = CacheChange> + '_ {
        self.pages.changes()
    }

    /// Returns the kinds of memory that sequences take.
    pub fn kinds(&self) -> Kinds {
        self.kinds
    }

    /// Returns the registered page of these tokens, and its node.
    pub fn find(&self, parent: Parent, tokens: &[u32]) -> Option<(u32, u64)> {
        self.pages.lookup(parent, tokens)
    }

    /// Returns what is attached to a registered page.
    pub fn attached(&self, page: u32) -> Attached {
        self.pages.attached(page)
    }

    /// Returns the same, if the page is still registered as this node.
    pub fn attached_to(&self, page: u32, node: u64) -> Option<Attached> {
        self.pages.is_node(page, Parent::Node(node)).then(|| self.pages.attached(page))
    }

    /// Returns the slot of a checkpoint, or [`NONE`].
    pub fn slot_of(&self, checkpoint: u32) -> u32 {
        self.checkpoints.get(checkpoint).slot
    }

    /// Returns what a new sequence of up to `max_tokens` tokens holds: nothing, with room for everything.
    pub fn hold(&self, salt: u64, max_tokens: usize) -> Held {
        let blocks = max_tokens.div_ceil(PAGE);
        let at_once = self.max_window.saturating_add(self.max_tokens.div_ceil(PAGE) + 1);
        let root = Parent::Root(salt);
        Held {
            computed: 0,
            pages: Vec::with_capacity(blocks),
            n_registered: 0,
            chain: root,
            root,
            window_pages: Vec::with_capacity(if self.kinds.window.is_some() { at_once.min(blocks) } else { 0 }),
            first_window_block: 0,
            slot: None,
            restore: None,
            cuts: Cuts::default(),
            replaced: None,
            salt,
            keys: Vec::with_capacity(if self.unsaved.is_some() { blocks } else { 0 }),
            has_run: false,
        }
    }

    /// Pages in each state.
    pub fn pages(&self) -> PageCounts {
        self.pages.counts()
    }

    /// Window pages in each state; those that checkpoints hold count as cached.
    pub fn window_pages(&self) -> PageCounts {
        self.windows.counts()
    }

    /// State slots in each state; those of checkpoints count as cached.
    pub fn slots(&self) -> PageCounts {
        let (total, free) = (self.n_slots, self.free_slots.len());
        let cached = self.checkpoints.iter().filter(|(_, c)| c.slot != NONE).count();
        PageCounts { total, free, cached, used: total - free - cached }
    }

    /// Pages that can still be had.
    pub fn available(&self) -> usize {
        self.pages.available()
    }

    /// Window pages that can still be had.
    pub fn available_window(&self) -> usize {
        self.windows.available()
    }

    /// Pages that a sequence of `n_tokens` needs beyond those it has.
    pub fn outstanding(&self, held: &Held, n_tokens: usize) -> usize {
        n_tokens.div_ceil(PAGE).saturating_sub(held.pages.len())
    }

    /// Window pages that a sequence, which grows up to `max_tokens`, will need at a time beyond those it has.
    pub fn outstanding_window(&self, held: &Held, max_tokens: usize) -> usize {
        self.max_window.min(max_tokens.div_ceil(PAGE)).saturating_sub(held.window_pages.len())
    }

    /// Gives a sequence its slot. There always is one for as many sequences as may run.
    pub fn admit(&mut self, held: &mut Held) {
        held.slot = held.slot.or_else(|| self.free_slots.pop());
    }

    /// Resumes from the longest cached prefix of `tokens` beyond the computed positions that has a checkpoint. The last
    /// token is never part of it, as its logits are needed. Returns the number of positions saved.
    pub fn adopt(&mut self, held: &mut Held, tokens: &[u32]) -> usize {
        if held.pages.is_empty() {
            held.cuts = Cuts::new(tokens.len(), self.checkpoints.capacity());
        }
        if held.n_registered < held.pages.len() || held.computed < held.pages.len() * PAGE {
            return 0;
        }
        let n = self.search(held, tokens);
        let matched = held.computed + self.path.len() * PAGE;
        for i in 0..n {
            let (page, node) = self.path[i];
            self.pages.share(page);
            let at = held.pages.len() * PAGE;
            held.pages.push(page);
            held.chain = Parent::Node(node);
            self.name(held, &tokens[at..at + PAGE]);
        }
        let saved = n * PAGE;
        held.n_registered += n;
        held.computed += saved;
        held.cuts.adopted(if n > 0 { held.computed } else { 0 }, matched);
        if n > 0 {
            self.adopt_window(held);
            let id = self.pages.attached(held.pages[held.pages.len() - 1]).checkpoint;
            if id != NONE {
                self.checkpoints.hit(id);
                held.restore = Some(self.checkpoints.get(id).slot).filter(|&slot| slot != NONE);
            }
            held.replaced = None;
        }
        saved
    }

    /// Follows the cached path beyond the computed positions; returns how many of its pages can be resumed from.
    fn search(&mut self, held: &Held, tokens: &[u32]) -> usize {
        self.path.clear();
        let (start, mut chain) = (held.pages.len(), held.chain);
        // Window pages without a gap up to here, and the deepest place that has all it needs.
        let (mut run, mut best) = (0, 0);
        for block in start.. {
            let (at, end) = (block * PAGE, (block + 1) * PAGE);
            if end >= tokens.len() {
                break;
            }
            let Some((page, node)) = self.pages.lookup(chain, &tokens[at..end]) else { break };
            self.path.push((page, node));
            chain = Parent::Node(node);
            let attached = self.pages.attached(page);
            run = if attached.window == NONE { 0 } else { run + 1 };
            let first = self.kinds.first_window_block(end).max(start);
            let window = self.kinds.window.is_none() || first > block || run > block - first;
            let state = !self.kinds.state || attached.checkpoint != NONE;
            if window && state {
                best = self.path.len();
            }
        }
        best
    }

    /// Takes the window pages that the next position looks at, after pages were adopted.
    fn adopt_window(&mut self, held: &mut Held) {
        if self.kinds.window.is_none() {
            return;
        }
        self.drop_dead(held);
        let end = held.first_window_block + held.window_pages.len();
        for block in end..held.pages.len() {
            let page = self.pages.attached(held.pages[block]).window;
            self.windows.share(page);
            held.window_pages.push(page);
        }
    }

    /// Takes pages for up to `want` more tokens; returns for how many there was room.
    pub fn extend(&mut self, held: &mut Held, want: usize) -> usize {
        while held.pages.len() * PAGE < held.computed + want {
            let Some(page) = self.alloc() else { break };
            held.pages.push(page);
        }
        let mut room = want.min(held.pages.len() * PAGE - held.computed);
        if self.kinds.window.is_some() {
            let end = |held: &Held| (held.first_window_block + held.window_pages.len()) * PAGE;
            while end(held) < held.computed + room {
                let Some(page) = self.alloc_window() else { break };
                held.window_pages.push(page);
            }
            room = room.min(end(held) - held.computed);
        }
        self.trim(held, held.computed + room);
        room
    }

    /// Draft tokens that a step may have behind one token of a sequence: where its state is copied at page boundaries,
    /// no step goes past one, so that drafts lose no checkpoint.
    pub fn draft_room(&self, held: &Held, cache: bool) -> usize {
        match cache && self.kinds.state && self.checkpoints.capacity() > 0 {
            true => PAGE - 1 - held.computed % PAGE,
            false => usize::MAX,
        }
    }

    /// Takes back what was planned, after a step that computed nothing.
    pub fn unplan(&mut self, held: &mut Held) {
        self.trim(held, held.computed);
    }

    /// The next `n` positions of `tokens` are computed; pages for more are given back. Full pages become findable when
    /// `cache` says so.
    pub fn advance(&mut self, held: &mut Held, tokens: &[u32], n: usize, cache: bool) {
        let before = held.computed;
        held.computed += n;
        held.has_run = true;
        self.trim(held, held.computed);
        while cache && (held.n_registered + 1) * PAGE <= held.computed {
            self.register(held, tokens);
        }
        if cache && self.checkpoints.capacity() > 0 {
            for at in (before / PAGE + 1..=held.computed / PAGE).map(|block| block * PAGE) {
                // The state is where the computed positions end, and nowhere else.
                if at == held.computed || !self.kinds.state {
                    self.checkpoint(held, at);
                }
            }
        }
        self.drop_dead(held);
    }

    /// Copies of state to be made now, in order.
    pub fn copies(&mut self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.copies.drain(..)
    }

    /// Gives everything back; the sequence starts again from its first token, and finds what is still cached.
    pub fn release(&mut self, held: &mut Held) {
        self.queue_last(held);
        // Last page first: then a page is never kept longer than those before it.
        while let Some(page) = held.pages.pop() {
            self.pages.release(page);
        }
        held.window_pages.drain(..).for_each(|page| self.windows.release(page));
        self.free_slots.extend(held.slot.take());
        (held.computed, held.n_registered, held.chain) = (0, 0, held.root);
        (held.first_window_block, held.restore, held.replaced) = (0, None, None);
        held.has_run = false;
        held.keys.clear();
    }

    /// Names the page behind those that are registered, where prompts are stored.
    fn name(&self, held: &mut Held, tokens: &[u32]) -> Option<Key> {
        let key = self.unsaved.as_ref()?.next(held.salt, &held.keys, tokens);
        held.keys.push(key);
        Some(key)
    }

    /// Queues the last checkpoint of a sequence that ends, which no later one has replaced, and tells of its blocks.
    fn queue_last(&mut self, held: &mut Held) {
        if self.unsaved.is_none() || !held.has_run || held.keys.is_empty() {
            return;
        }
        let last = held.n_registered.checked_sub(1).map(|i| held.pages[i]);
        if held.replaced.is_some() && held.replaced == last {
            self.queue_state(held);
        }
        if let Some(unsaved) = &mut self.unsaved {
            unsaved.used(held.keys.clone());
        }
    }

    /// Queues the checkpoint at the end of the last registered page.
    fn queue_state(&mut self, held: &Held) {
        let Some(unsaved) = &mut self.unsaved else { return };
        if let (true, Some(&key), Parent::Node(node)) = (self.kinds.state, held.keys.last(), held.chain) {
            unsaved.push(key, held.pages[held.n_registered - 1], node, Part::State);
        }
    }

    /// Puts the first `n_blocks` blocks of a prompt into the prefix cache, by `load`, as far as they are not there;
    /// false when it was `is_late` before the last one. What cannot be loaded, or has no room, ends it.
    pub fn restore_blocks(
        &mut self,
        salt: u64,
        tokens: &[u32],
        n_blocks: usize,
        load: &mut dyn FnMut(&Key, Part, Piece) -> bool,
        is_late: impl Fn() -> bool,
    ) -> bool {
        let Some(mut key) = self.unsaved.as_ref().map(|unsaved| unsaved.root(salt)) else { return true };
        let first_window = self.kinds.first_window_block(n_blocks * PAGE);
        // What it has found and loaded stays until all is there.
        let (mut pages, mut windows) = (Vec::with_capacity(n_blocks), Vec::new());
        let (mut chain, mut is_done) = (Parent::Root(salt), true);
        for (block, block_tokens) in tokens.chunks_exact(PAGE).take(n_blocks).enumerate() {
            key = key.next(block_tokens);
            let (page, node) = match self.pages.lookup(chain, block_tokens) {
                Some((page, node)) => {
                    self.pages.share(page);
                    (page, node)
                }
                None if is_late() => {
                    is_done = false;
                    break;
                }
                None => {
                    let Some(page) = self.alloc() else { break };
                    if !load(&key, Part::Page, Piece::Page(page)) {
                        self.pages.release(page);
                        break;
                    }
                    self.pages.register(page, chain, pages.last().copied(), block_tokens)
                }
            };
            pages.push(page);
            chain = Parent::Node(node);
            if self.kinds.window.is_some() && block >= first_window {
                match self.pages.attached(page).window {
                    NONE => {
                        let Some(window) = self.alloc_window() else { break };
                        windows.push(window);
                        if !load(&key, Part::Window, Piece::WindowPage(window)) {
                            break;
                        }
                        self.pages.attached_mut(page).window = window;
                        self.windows.attach(window, page);
                    }
                    window => {
                        self.windows.share(window);
                        windows.push(window);
                    }
                }
            }
            if self.kinds.state && block + 1 == n_blocks && self.pages.attached(page).checkpoint == NONE {
                self.restore_state(page, &windows, |slot| load(&key, Part::State, Piece::State(slot)));
            }
        }
        windows.into_iter().for_each(|window| self.windows.release(window));
        while let Some(page) = pages.pop() {
            self.pages.release(page);
        }
        is_done
    }

    /// Makes a checkpoint at the end of a registered page, whose state `load` writes into a slot. `windows` are the
    /// window pages before it.
    fn restore_state(&mut self, page: u32, windows: &[u32], load: impl FnOnce(u32) -> bool) {
        let Some(id) = self.new_checkpoint(page) else { return };
        let slot = self.free_slots.pop();
        let Some(slot) = slot.filter(|&slot| load(slot)) else {
            self.free_slots.extend(slot);
            self.checkpoints.remove(id);
            return;
        };
        let new = self.checkpoints.get_mut(id);
        new.slot = slot;
        for &window in windows {
            self.windows.keep(window);
            new.window.push(window);
        }
        self.pages.attached_mut(page).checkpoint = id;
    }

    /// Returns a checkpoint without memory, in the place of the worst one where all are taken.
    fn new_checkpoint(&mut self, page: u32) -> Option<u32> {
        self.checkpoints.insert(page).or_else(|| {
            let worst = self.checkpoints.worst(|page| self.pages.is_branch(page))?;
            self.drop_checkpoint(worst);
            self.checkpoints.insert(page)
        })
    }

    /// Makes everything that was computed for a sequence unfindable.
    pub fn forget(&mut self, held: &Held) {
        held.pages.iter().for_each(|&page| {
            let attached = self.pages.forget(page);
            self.detach(attached);
        });
    }

    /// Forgets every cached prefix that no sequence uses.
    pub fn clear_cached(&mut self) {
        while let Some(page) = self.pages.oldest_cached() {
            let attached = self.pages.forget(page);
            self.detach(attached);
        }
        while let Some(id) = self.checkpoints.worst(|_| false) {
            self.drop_checkpoint(id);
        }
        while let Some((page, node)) = self.windows.oldest_cached() {
            self.pages.attached_mut(node).window = NONE;
            self.windows.detach(page);
        }
    }

    /// Counts everything again, the slow way, and says what does not add up. `held` is what sequences hold.
    pub fn audit<'a>(&self, held: impl Iterator<Item = &'a Held>) -> Result<(), String> {
        self.pages.audit()?;
        let mut users = vec![0; self.pages.counts().total];
        let mut window_users = vec![0; self.windows.counts().total];
        let mut slots = vec![0; self.n_slots];
        for held in held {
            let Held { computed, pages, n_registered, window_pages, first_window_block, slot, .. } = held;
            let blocks = computed.div_ceil(PAGE);
            if pages.len() != blocks || *n_registered > computed / PAGE {
                let n = pages.len();
                return Err(format!("{computed} positions in {n} pages, {n_registered} of them registered"));
            }
            let first = self.kinds.first_window_block(*computed);
            let wanted = if self.kinds.window.is_some() { blocks.saturating_sub(first) } else { 0 };
            if (*first_window_block, window_pages.len()) != (first, wanted) {
                let n = window_pages.len();
                return Err(format!(
                    "{n} window pages from block {first_window_block}, expected {wanted} from {first}"
                ));
            }
            pages.iter().for_each(|&page| users[page as usize] += 1);
            window_pages.iter().for_each(|&page| window_users[page as usize] += 1);
            slot.iter().for_each(|&slot| slots[slot as usize] += 1);
        }
        for (page, &n) in users.iter().enumerate() {
            if self.pages.refs(page as u32) != n {
                return Err(format!("page {page} counts {} users, it has {n}", self.pages.refs(page as u32)));
            }
        }
        let mut keepers = vec![0; window_users.len()];
        for (id, c) in self.checkpoints.iter() {
            if self.pages.attached(c.page).checkpoint != id {
                return Err(format!("checkpoint {id} is not attached to its page {}", c.page));
            }
            c.window.iter().for_each(|&page| keepers[page as usize] += 1);
            (c.slot != NONE).then(|| slots[c.slot as usize] += 1);
        }
        self.free_slots.iter().for_each(|&slot| slots[slot as usize] += 1);
        if let Some(slot) = slots.iter().position(|&n| n != 1) {
            return Err(format!("state {slot} has {} owners", slots[slot]));
        }
        let mut nodes = vec![NONE; window_users.len()];
        let mut n_checkpoints = 0;
        for page in 0..users.len() as u32 {
            let Attached { window, checkpoint } = self.pages.attached(page);
            n_checkpoints += usize::from(checkpoint != NONE);
            if window != NONE && std::mem::replace(&mut nodes[window as usize], page) != NONE {
                return Err(format!("window page {window} is attached twice"));
            }
        }
        if n_checkpoints != self.checkpoints.iter().count() {
            return Err(format!("{n_checkpoints} pages have checkpoints"));
        }
        self.windows.audit(&window_users, &keepers, |page| nodes[page as usize])
    }

    /// Makes the first full page that is not findable yet findable.
    fn register(&mut self, held: &mut Held, tokens: &[u32]) {
        let block = held.n_registered;
        let before = block.checked_sub(1).map(|i| held.pages[i]);
        let block_tokens = &tokens[block * PAGE..(block + 1) * PAGE];
        let (page, node) = self.pages.register(held.pages[block], held.chain, before, block_tokens);
        held.pages[block] = page;
        held.chain = Parent::Node(node);
        held.n_registered += 1;
        if let (Some(key), Some(unsaved)) = (self.name(held, block_tokens), &mut self.unsaved) {
            unsaved.push(key, page, node, Part::Page);
            if self.kinds.window.is_some() {
                unsaved.push(key, page, node, Part::Window);
            }
        }
        let in_window = block.checked_sub(held.first_window_block);
        let Some(mine) = in_window.and_then(|i| held.window_pages.get_mut(i)) else { return };
        match self.pages.attached(page).window {
            NONE => {
                self.pages.attached_mut(page).window = *mine;
                self.windows.attach(*mine, page);
            }
            same if same == *mine => {}
            same => {
                self.windows.share(same);
                self.windows.release(*mine);
                *mine = same;
            }
        }
    }

    /// Makes a checkpoint at a page boundary where one is due and none is.
    fn checkpoint(&mut self, held: &mut Held, at: usize) {
        let Some(stay) = held.cuts.due(at) else { return };
        if let Some(page) = held.replaced.take() {
            let id = self.pages.attached(page).checkpoint;
            if id != NONE && self.checkpoints.is_unused(id) && !self.pages.is_branch(page) {
                self.drop_checkpoint(id);
            }
        }
        let page = held.pages[at / PAGE - 1];
        let id = self.pages.attached(page).checkpoint;
        if id != NONE {
            self.checkpoints.touch(id);
        } else if !self.insert_checkpoint(held, page, at) {
            return;
        } else if stay == Stay::Replaced {
            held.replaced = Some(page);
        }
        if stay == Stay::Kept {
            held.cuts.made(at);
            if at == held.n_registered * PAGE {
                self.queue_state(held);
            }
        }
    }

    fn insert_checkpoint(&mut self, held: &Held, page: u32, at: usize) -> bool {
        let Some(id) = self.new_checkpoint(page) else { return false };
        let new = self.checkpoints.get_mut(id);
        if let Some(from) = held.slot {
            // Slots are as many as sequences that run and checkpoints together.
            let Some(to) = self.free_slots.pop() else {
                self.checkpoints.remove(id);
                return false;
            };
            new.slot = to;
            self.copies.push((from, to));
        }
        let first = self.kinds.first_window_block(at) - held.first_window_block;
        let end = (at / PAGE - held.first_window_block).min(held.window_pages.len());
        for &page in held.window_pages.get(first..end).unwrap_or_default() {
            self.windows.keep(page);
            new.window.push(page);
        }
        self.pages.attached_mut(page).checkpoint = id;
        true
    }

    /// Gives the memory of a checkpoint back.
    fn drop_checkpoint(&mut self, id: u32) {
        let c = self.checkpoints.get(id);
        self.pages.attached_mut(c.page).checkpoint = NONE;
        self.free_slots.extend((c.slot != NONE).then_some(c.slot));
        c.window.iter().for_each(|&page| self.windows.unkeep(page));
        self.checkpoints.remove(id);
    }

    /// What was attached to a page goes with it.
    fn detach(&mut self, attached: Attached) {
        if attached.checkpoint != NONE {
            self.drop_checkpoint(attached.checkpoint);
        }
        if attached.window != NONE {
            self.windows.detach(attached.window);
        }
    }

    fn alloc(&mut self) -> Option<u32> {
        let (page, attached) = self.pages.alloc()?;
        self.detach(attached);
        Some(page)
    }

    /// Takes a window page; checkpoints go where they hold all that is left.
    fn alloc_window(&mut self) -> Option<u32> {
        loop {
            if let Some((page, node)) = self.windows.alloc() {
                if node != NONE {
                    self.pages.attached_mut(node).window = NONE;
                }
                return Some(page);
            }
            let worst = self.checkpoints.worst(|page| self.pages.is_branch(page))?;
            self.drop_checkpoint(worst);
        }
    }

    /// Gives back the pages behind `end`.
    fn trim(&mut self, held: &mut Held, end: usize) {
        while held.pages.len() > end.div_ceil(PAGE) {
            held.pages.pop().into_iter().for_each(|page| self.pages.release(page));
        }
        while held.window_pages.len() > end.div_ceil(PAGE).saturating_sub(held.first_window_block) {
            held.window_pages.pop().into_iter().for_each(|page| self.windows.release(page));
        }
    }

    /// Gives back the window pages that no later position looks at.
    fn drop_dead(&mut self, held: &mut Held) {
        let first = self.kinds.first_window_block(held.computed);
        let n_dead = first.saturating_sub(held.first_window_block).min(held.window_pages.len());
        held.window_pages.drain(..n_dead).for_each(|page| self.windows.release(page));
        held.first_window_block = first;
    }
}
