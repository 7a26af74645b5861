//! Prompt caches beyond the life of an engine: what is stored, when, and how it comes back. Knows no files.
//!
//! A [`Key`] names a block of [`PAGE`] tokens after exactly its prefix, under an identity of everything that its bytes
//! depend on. Full pages, window pages and checkpoints of recurrent state are queued when they become findable and
//! saved between steps, as the store has room for them; what was evicted by then is not. A prompt whose stored prefix
//! reaches farther than the one in memory gets its pages back before it is admitted, a slice of time per step.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use backend::{PAGE, Piece};
use ring::digest;

use super::Engine;
use super::memory::Memory;
use super::pages::{NONE, Parent};

/// Time that a step gives to restoring pages, and a step to saving them. A piece that was begun is finished.
const RESTORE_SLICE: Duration = Duration::from_millis(20);
const SAVE_SLICE: Duration = Duration::from_millis(1);

/// Names what is stored of a block: a hash of the identity, the prefix and the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// Before the first block of prompts with this cache salt.
    fn root(identity: &[u8; 32], salt: u64) -> Key {
        Key::of(&[identity, &salt.to_le_bytes()])
    }

    /// Of the block of these tokens.
    pub(super) fn next(self, tokens: &[u32]) -> Key {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Key::of(&[&self.0, &bytes])
    }

    fn of(parts: &[&[u8]]) -> Key {
        let mut hash = digest::Context::new(&digest::SHA256);
        parts.iter().for_each(|part| hash.update(part));
        let mut key = Key([0; 32]);
        key.0.copy_from_slice(hash.finish().as_ref());
        key
    }
}

/// What is stored under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The page of the block.
    Page,
    /// Its window page.
    Window,
    /// The recurrent state at its end.
    State,
}

/// Keeps blocks of prompts. An engine calls it between steps: only [`PromptStore::load`] may wait for a disk.
pub trait PromptStore: Send {
    /// Returns whether something is stored, as far as is known without reading it.
    fn has(&mut self, key: &Key, part: Part) -> bool;

    /// Returns whether what was computed needs no storing. Computing what the store has is a sign that it could not be
    /// loaded.
    fn is_stored(&mut self, key: &Key, part: Part) -> bool {
        self.has(key, part)
    }

    /// Reads what is stored, `n_bytes` long, into `out`, which is empty. False where it is not there, or not whole.
    fn load(&mut self, key: &Key, part: Part, n_bytes: usize, out: &mut Vec<u8>) -> bool;

    /// Returns an empty buffer, where there is room for something more to store now.
    fn buffer(&mut self) -> Option<Vec<u8>>;

    /// Stores the contents of a buffer, some time later.
    fn store(&mut self, key: Key, part: Part, bytes: Vec<u8>);

    /// A prompt that consists of these blocks, first to last, was used.
    fn used(&mut self, keys: Vec<Key>);

    /// Returns a secret that stays as long as what is stored: tokens of images are named with it.
    fn secret(&mut self) -> [u8; 32];
}

/// Returns a new secret, of the keys of the standard library's hashers.
pub fn secret() -> [u8; 32] {
    let (random, mut secret) = (RandomState::new(), [0; 32]);
    let eights = secret.as_chunks_mut().0.iter_mut().enumerate();
    eights.for_each(|(i, eight)| *eight = random.hash_one(i).to_le_bytes());
    secret
}

/// What was computed and is not stored yet.
#[derive(Debug)]
pub(super) struct Unsaved {
    identity: [u8; 32],
    queue: VecDeque<Item>,
    used: Vec<Vec<Key>>,
    max_queue: usize,
}

/// A piece to be saved, if it is still what it was when it was queued.
#[derive(Clone, Copy, Debug)]
struct Item {
    key: Key,
    page: u32,
    node: u64,
    part: Part,
}

impl Unsaved {
    /// Returns the key before the first block.
    pub fn root(&self, salt: u64) -> Key {
        Key::root(&self.identity, salt)
    }

    /// Returns the key after `keys` and another block.
    pub fn next(&self, salt: u64, keys: &[Key], tokens: &[u32]) -> Key {
        keys.last().copied().unwrap_or_else(|| self.root(salt)).next(tokens)
    }

    /// A page was registered as this node.
    pub fn push(&mut self, key: Key, page: u32, node: u64, part: Part) {
        if self.queue.len() >= self.max_queue {
            self.queue.pop_front();
        }
        self.queue.push_back(Item { key, page, node, part });
    }

    /// A sequence of these blocks ends.
    pub fn used(&mut self, keys: Vec<Key>) {
        self.used.push(keys);
    }
}

/// How far a store's blocks of a waiting prompt are on their way back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Restore {
    /// Nobody has looked yet.
    #[default]
    Unknown,
    /// The first so many blocks are wanted.
    Blocks(usize),
    /// There is nothing to wait for.
    Done,
}

impl Engine {
    /// Keeps prompt caches in a store from now on, where the program can save its memory; false where it cannot.
    /// `identity` stands for everything that the bytes depend on: model, numbers, cache type.
    pub fn set_store(&mut self, identity: [u8; 32], mut store: Box<dyn PromptStore>) -> bool {
        let Some(sizes) = self.program.saver().map(|saver| saver.piece_bytes()) else { return false };
        let sizes = [sizes.page, sizes.window_page, sizes.state].map(|n| (n as u64).to_le_bytes());
        let identity = Key::of(&[&identity, sizes.as_flattened()]).0;
        let limits = self.program.limits();
        let max_queue = 2 * limits.n_pages + limits.n_states;
        self.memory.set_unsaved(Unsaved { identity, queue: VecDeque::new(), used: Vec::new(), max_queue });
        if self.program.d_input().is_some() {
            self.memory.set_secret(store.secret());
        }
        self.store = Some(store);
        true
    }

    /// Returns whether something waits to be handed to the store.
    pub fn has_unsaved(&self) -> bool {
        self.memory.unsaved().is_some_and(|unsaved| !unsaved.queue.is_empty() || !unsaved.used.is_empty())
    }

    /// Hands to the store what it has room for, for as long as `patience` lasts. Not while a step is under way.
    pub fn save(&mut self, patience: Duration) {
        let Engine { store: Some(store), memory, program, is_busy: false, .. } = self else { return };
        let Some(saver) = program.saver() else { return };
        let start = Instant::now();
        while let Some((piece, key, part)) = memory.next_unsaved() {
            if !store.is_stored(&key, part) {
                let Some(mut bytes) = store.buffer() else { break };
                saver.save(piece, &mut bytes);
                store.store(key, part, bytes);
            }
            memory.saved();
            if start.elapsed() >= patience {
                break;
            }
        }
        memory.take_used().for_each(|keys| store.used(keys));
    }

    /// [`Engine::save`] between two steps.
    pub(super) fn save_some(&mut self) {
        self.save(SAVE_SLICE);
    }

    /// Gets blocks of the first waiting prompt back from the store; false while there are more to come.
    pub(super) fn restore_front(&mut self) -> bool {
        let Engine { store: Some(store), memory, program, waiting, buffer, .. } = self else { return true };
        let (Some(sequence), Some(saver)) = (waiting.front_mut(), program.saver()) else { return true };
        let sizes = saver.piece_bytes();
        let Some((salt, tokens)) = sequence.restorable() else { return true };
        let n_blocks = match sequence.restore {
            Restore::Done => return true,
            Restore::Blocks(n) => n,
            Restore::Unknown => memory.stored_blocks(salt, tokens, |key, part| store.has(key, part)),
        };
        let start = Instant::now();
        let mut load = |key: &Key, part: Part, piece: Piece| {
            buffer.clear();
            store.load(key, part, sizes.of(piece), buffer) && saver.restore(piece, buffer)
        };
        let is_late = || start.elapsed() >= RESTORE_SLICE;
        let is_done = memory.restore_blocks(salt, tokens, n_blocks, &mut load, is_late);
        sequence.restore = if is_done { Restore::Done } else { Restore::Blocks(n_blocks) };
        is_done
    }
}

impl Memory {
    /// Returns the next piece to save; what is not what it was is passed over.
    fn next_unsaved(&mut self) -> Option<(Piece, Key, Part)> {
        loop {
            let item = *self.unsaved()?.queue.front()?;
            match self.piece(item) {
                Some(piece) => return Some((piece, item.key, item.part)),
                None => self.saved(),
            }
        }
    }

    /// Returns where the bytes of an item are, if they still are.
    fn piece(&self, item: Item) -> Option<Piece> {
        let attached = self.attached_to(item.page, item.node)?;
        match item.part {
            Part::Page => Some(Piece::Page(item.page)),
            Part::Window => Some(attached.window).filter(|&page| page != NONE).map(Piece::WindowPage),
            Part::State => {
                let id = Some(attached.checkpoint).filter(|&id| id != NONE)?;
                Some(self.slot_of(id)).filter(|&slot| slot != NONE).map(Piece::State)
            }
        }
    }

    /// The piece at the front of the queue is dealt with.
    fn saved(&mut self) {
        self.unsaved_mut().map(|unsaved| unsaved.queue.pop_front());
    }

    fn take_used(&mut self) -> impl Iterator<Item = Vec<Key>> + '_ {
        self.unsaved_mut().into_iter().flat_map(|unsaved| unsaved.used.drain(..))
    }

    /// Blocks of a prompt from which it can be resumed once the store has given what memory lacks; 0 where the store
    /// reaches no farther than memory.
    fn stored_blocks(&self, salt: u64, tokens: &[u32], mut has: impl FnMut(&Key, Part) -> bool) -> usize {
        let Some(unsaved) = self.unsaved() else { return 0 };
        let (mut key, mut chain) = (unsaved.root(salt), Some(Parent::Root(salt)));
        let (mut in_memory, mut with_store, mut best) = (Reach::default(), Reach::default(), [0, 0]);
        // The last token is never part of it: its logits are wanted.
        for (block, block_tokens) in tokens[..tokens.len().saturating_sub(1)].chunks_exact(PAGE).enumerate() {
            key = key.next(block_tokens);
            let found = chain.and_then(|chain| self.find(chain, block_tokens));
            chain = found.map(|(_, node)| Parent::Node(node));
            if found.is_none() && !has(&key, Part::Page) {
                break;
            }
            let attached = found.map(|(page, _)| self.attached(page));
            let here = attached.map_or([false; 2], |a| [a.window != NONE, a.checkpoint != NONE]);
            let [mut window, mut state] = here;
            window = window || self.kinds().window.is_some() && has(&key, Part::Window);
            state = state || self.kinds().state && has(&key, Part::State);
            if found.is_some() && in_memory.extends(self.kinds(), block, here) {
                best[0] = block + 1;
            }
            if with_store.extends(self.kinds(), block, [window, state]) {
                best[1] = block + 1;
            }
        }
        if best[1] > best[0] { best[1] } else { 0 }
    }
}

/// How far a prompt can be resumed, block by block.
#[derive(Default)]
struct Reach {
    /// Blocks with window pages, without a gap up to the last one.
    n_window: usize,
}

impl Reach {
    /// Returns whether the position after `block` can be resumed from, which has a window page and a state or not.
    fn extends(&mut self, kinds: backend::Kinds, block: usize, [window, state]: [bool; 2]) -> bool {
        self.n_window = if window { self.n_window + 1 } else { 0 };
        let wanted = (block + 1).saturating_sub(kinds.first_window_block((block + 1) * PAGE));
        (kinds.window.is_none() || self.n_window >= wanted) && (state || !kinds.state)
    }
}
