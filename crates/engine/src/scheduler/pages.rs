//! The page pool: which pages of the cache are free, in use, or cached because their content may be reused.
//!
//! It hands out page numbers and counts references. It knows no sequences, no requests and no content of a page.
//!
//! Full pages are registered in a trie: a page's key is its parent's node and its [`PAGE`] token ids, compared in full.
//! A hit therefore holds exactly these tokens after exactly this prefix; no hash collision can give wrong text. Node
//! numbers are never reused, so that a page whose parent was evicted is not found under the parent's successor.
//!
//! A registered page may have other memory of its block attached, of which this file stores only the numbers.

use std::collections::HashMap;

use backend::PAGE;

use super::ring::Ring;

/// No page, no checkpoint.
pub(super) const NONE: u32 = u32::MAX;

/// What precedes a page: nothing, or another registered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parent {
    /// The page is the first of its sequence. Chains of different salts share nothing.
    Root(u64),
    /// The page registered as this node.
    Node(u64),
}

/// What happened to the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// A page can be found as this node, after its parent and by these tokens.
    Stored {
        /// Its number, which no other page ever gets.
        node: u64,
        /// What precedes it.
        parent: Parent,
        /// Its tokens.
        tokens: [u32; PAGE],
    },
    /// The page of this node is gone. Pages after it cannot be found any more, though each is still told of.
    Removed {
        /// Its number.
        node: u64,
    },
}

/// Key of a registered page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [u32; PAGE],
}

/// Number of pages in each state. `free + cached + used` is the size of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages of the pool.
    pub total: usize,
    /// Pages without content.
    pub free: usize,
    /// Pages that no sequence uses, kept for their content and evicted when no page is free.
    pub cached: usize,
    /// Pages that sequences use.
    pub used: usize,
}

/// Other memory of a registered page's block, or [`NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    /// The window page of the same positions.
    pub window: u32,
    /// The checkpoint at the block's end.
    pub checkpoint: u32,
}

impl Attached {
    /// Nothing.
    pub const NOTHING: Attached = Attached { window: NONE, checkpoint: NONE };
}

/// State of one page.
#[derive(Clone, Copy, Debug)]
struct Page {
    /// Sequences that use it.
    refs: u32,
    /// Set when it is registered: its key and its node.
    registered: Option<(Key, u64)>,
    /// Of a registered page: the page before it (while that page's node is the key's parent), or [`NONE`].
    parent: u32,
    /// Of a registered page: number of registered pages directly after it.
    n_children: u32,
    attached: Attached,
}

/// Pages with reference counts, a free list, and a ring of cached pages in order of last use.
#[derive(Debug)]
pub(crate) struct PagePool {
    pages: Vec<Page>, // [n_pages]
    free: Vec<u32>,
    cached: Ring,
    index: HashMap<Key, u32>,
    next_node: u64,
    /// What has changed since it was last asked for, where that is watched.
    changes: Option<Vec<CacheChange>>,
}

impl PagePool {
    /// Returns a pool of free pages. Allocates all it will ever need.
    pub fn new(n_pages: usize) -> PagePool {
        let page = Page { refs: 0, registered: None, parent: NONE, n_children: 0, attached: Attached::NOTHING };
        PagePool {
            pages: vec![page; n_pages],
            // Low numbers first, so that small workloads touch little memory.
            free: (0..n_pages as u32).rev().collect(),
            cached: Ring::new(n_pages),
            // Twice the entries: removed ones are then cleaned up in place and the table never grows.
            index: HashMap::with_capacity(2 * n_pages),
            next_node: 0,
            changes: None,
        }
    }

    /// Notes from now on what becomes findable and what does not stay so.
    pub fn watch(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Returns what was noted since the last call, in order.
    pub fn changes(&mut self) -> impl Iterator<Item = CacheChange> + '_ {
        self.changes.iter_mut().flat_map(|changes| changes.drain(..))
    }

    /// Number of pages in each state.
    pub fn counts(&self) -> PageCounts {
        let total = self.pages.len();
        let (free, cached) = (self.free.len(), self.cached.len());
        PageCounts { total, free, cached, used: total - free - cached }
    }

    /// Pages that [`PagePool::alloc`] can still return.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Sequences that use a page.
    pub fn refs(&self, page: u32) -> u32 {
        self.pages[page as usize].refs
    }

    /// Takes a page to write into: a free one, else the least recently used cached one, whose attached memory is
    /// returned with it.
    pub fn alloc(&mut self) -> Option<(u32, Attached)> {
        let (page, attached) = match self.free.pop() {
            Some(page) => (page, Attached::NOTHING),
            None => {
                let oldest = self.cached.oldest()?;
                self.cached.remove(oldest);
                (oldest, self.unregister(oldest))
            }
        };
        self.pages[page as usize].refs = 1;
        Some((page, attached))
    }

    /// Finds the page that holds `tokens` (of length [`PAGE`]) after `parent`, with its node.
    pub fn lookup(&self, parent: Parent, tokens: &[u32]) -> Option<(u32, u64)> {
        let page = *self.index.get(&key(parent, tokens)?)?;
        self.pages[page as usize].registered.map(|(_, node)| (page, node))
    }

    /// Takes a page that [`PagePool::lookup`] found, to read it.
    pub fn share(&mut self, page: u32) {
        if self.pages[page as usize].refs == 0 {
            self.cached.remove(page);
        }
        self.pages[page as usize].refs += 1;
    }

    /// Releases a page. A registered page stays cached until it is evicted or reused.
    ///
    /// A sequence releases its last page first: then no page outlives its parent.
    pub fn release(&mut self, page: u32) {
        let p = &mut self.pages[page as usize];
        p.refs -= 1;
        if p.refs > 0 {
            return;
        }
        if p.registered.is_some() {
            self.cached.push(page);
        } else {
            self.free.push(page);
        }
    }

    /// Makes a full page findable after `parent`, which is `before`, if that is a page. If another page holds the same
    /// already, the caller's page is released and the other one shared instead. Returns the page that the caller now
    /// holds and its node.
    pub fn register(&mut self, page: u32, parent: Parent, before: Option<u32>, tokens: &[u32]) -> (u32, u64) {
        if let Some((same, node)) = self.lookup(parent, tokens) {
            if same != page {
                self.share(same);
                self.release(page);
            }
            return (same, node);
        }
        let node = self.next_node;
        self.next_node += 1;
        if let Some(key) = key(parent, tokens) {
            self.index.insert(key, page);
            if let Some(changes) = &mut self.changes {
                changes.push(CacheChange::Stored { node, parent, tokens: key.tokens });
            }
            let before = before.filter(|&before| self.is_node(before, parent));
            before.iter().for_each(|&before| self.pages[before as usize].n_children += 1);
            let p = &mut self.pages[page as usize];
            (p.registered, p.parent, p.n_children) = (Some((key, node)), before.unwrap_or(NONE), 0);
        }
        (page, node)
    }

    /// Returns the memory attached to a registered page.
    pub fn attached(&self, page: u32) -> Attached {
        self.pages[page as usize].attached
    }

    /// Returns the same, mutable.
    pub fn attached_mut(&mut self, page: u32) -> &mut Attached {
        &mut self.pages[page as usize].attached
    }

    /// Returns whether several registered pages follow this one.
    pub fn is_branch(&self, page: u32) -> bool {
        self.pages[page as usize].n_children > 1
    }

    /// Makes a page's content unfindable; sequences may still use it. Returns what was attached to it.
    pub fn forget(&mut self, page: u32) -> Attached {
        let cached = self.pages[page as usize].refs == 0 && self.pages[page as usize].registered.is_some();
        let attached = self.unregister(page);
        if cached {
            self.cached.remove(page);
            self.free.push(page);
        }
        attached
    }

    /// Returns the least recently used cached page.
    pub fn oldest_cached(&self) -> Option<u32> {
        self.cached.oldest()
    }

    /// Recounts everything the slow way.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn audit(&self) -> Result<(), String> {
        let mut state = vec!["lost"; self.pages.len()];
        for &page in &self.free {
            let p = &self.pages[page as usize];
            if state[page as usize] != "lost" || p.refs != 0 || p.registered.is_some() {
                return Err(format!(
                    "page {page} is in the free list, but {} with {} users",
                    state[page as usize], p.refs
                ));
            }
            state[page as usize] = "free";
        }
        for page in self.cached.iter() {
            let p = &self.pages[page as usize];
            if state[page as usize] != "lost" || p.refs != 0 || p.registered.is_none() {
                return Err(format!("page {page} is cached, but {} with {} users", state[page as usize], p.refs));
            }
            state[page as usize] = "cached";
        }
        let n_cached = state.iter().filter(|&&s| s == "cached").count();
        if n_cached != self.cached.len() {
            return Err(format!("{n_cached} pages are cached, the count says {}", self.cached.len()));
        }
        for (page, p) in self.pages.iter().enumerate() {
            if state[page] == "lost" && p.refs == 0 {
                return Err(format!("page {page} is lost"));
            }
            if let Some((key, _)) = &p.registered
                && self.index.get(key) != Some(&(page as u32))
            {
                return Err(format!("page {page} is registered and cannot be found"));
            }
            if p.registered.is_none() && p.attached != Attached::NOTHING {
                return Err(format!("page {page} is not registered and has {:?}", p.attached));
            }
            let is_child = |c: &&Page| {
                c.registered.is_some_and(|(key, _)| c.parent == page as u32 && self.is_node(page as u32, key.parent))
            };
            let n_children = self.pages.iter().filter(is_child).count();
            if p.registered.is_some() && p.n_children as usize != n_children {
                return Err(format!("page {page} has {n_children} children, it counts {}", p.n_children));
            }
        }
        let n_registered = self.pages.iter().filter(|p| p.registered.is_some()).count();
        if n_registered != self.index.len() {
            return Err(format!("{n_registered} pages are registered, the index has {}", self.index.len()));
        }
        Ok(())
    }

    /// Returns whether a page is registered as the node that a parent names.
    pub fn is_node(&self, page: u32, parent: Parent) -> bool {
        let registered = self.pages.get(page as usize).and_then(|p| p.registered);
        registered.is_some_and(|(_, node)| parent == Parent::Node(node))
    }

    fn unregister(&mut self, page: u32) -> Attached {
        let p = &mut self.pages[page as usize];
        let attached = std::mem::replace(&mut p.attached, Attached::NOTHING);
        if let Some((key, node)) = p.registered.take() {
            let parent = p.parent;
            self.index.remove(&key);
            self.changes.iter_mut().for_each(|changes| changes.push(CacheChange::Removed { node }));
            if self.is_node(parent, key.parent) {
                self.pages[parent as usize].n_children -= 1;
            }
        }
        attached
    }
}

/// Returns the key of a page; none where `tokens` are not a full page.
fn key(parent: Parent, tokens: &[u32]) -> Option<Key> {
    Some(Key { parent, tokens: tokens.try_into().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(seed: u32) -> Vec<u32> {
        (0..PAGE as u32).map(|i| seed * 1000 + i).collect()
    }

    #[test]
    fn least_recently_released_page_is_evicted_first() {
        let mut pool = PagePool::new(3);
        let pages: Vec<u32> = (0..3).map(|_| pool.alloc().unwrap().0).collect();
        assert_eq!(pool.alloc(), None);
        for (i, &page) in pages.iter().enumerate() {
            assert_eq!(pool.register(page, Parent::Root(0), None, &full(i as u32)).0, page);
        }
        for i in [1, 0, 2] {
            pool.release(pages[i]);
        }
        // A hit makes page 1 the newest.
        let (hit, _) = pool.lookup(Parent::Root(0), &full(1)).unwrap();
        pool.share(hit);
        pool.release(hit);
        for expected in [0, 2, 1] {
            assert!(pool.lookup(Parent::Root(0), &full(expected as u32)).is_some());
            assert_eq!(pool.alloc().map(|(page, _)| page), Some(pages[expected]));
            assert!(pool.lookup(Parent::Root(0), &full(expected as u32)).is_none());
            pool.audit().unwrap();
        }
        assert_eq!(pool.counts(), PageCounts { total: 3, free: 0, cached: 0, used: 3 });
    }

    #[test]
    fn a_page_is_found_only_after_its_own_prefix() {
        let mut pool = PagePool::new(4);
        let (a, b) = (pool.alloc().unwrap().0, pool.alloc().unwrap().0);
        let (_, node) = pool.register(a, Parent::Root(7), None, &full(1));
        pool.register(b, Parent::Node(node), Some(a), &full(2));
        let cases = [
            (Parent::Root(7), full(1), Some(a)),
            (Parent::Node(node), full(2), Some(b)),
            (Parent::Root(8), full(1), None),
            (Parent::Root(7), full(2), None),
            (Parent::Node(node + 5), full(2), None),
            (Parent::Root(7), full(1)[1..].to_vec(), None),
        ];
        for (parent, tokens, expected) in cases {
            assert_eq!(pool.lookup(parent, &tokens).map(|hit| hit.0), expected, "{parent:?}");
        }
        // The parent is registered again: the child must not be found below the new node.
        pool.forget(a);
        let (_, again) = pool.register(a, Parent::Root(7), None, &full(1));
        assert_eq!(pool.lookup(Parent::Node(again), &full(2)), None);
        pool.audit().unwrap();
    }

    #[test]
    fn children_are_counted_and_what_is_attached_comes_back() {
        let mut pool = PagePool::new(3);
        let [a, b, c] = [0; 3].map(|_| pool.alloc().unwrap().0);
        let (_, node) = pool.register(a, Parent::Root(0), None, &full(1));
        pool.register(b, Parent::Node(node), Some(a), &full(2));
        assert!(!pool.is_branch(a));
        pool.register(c, Parent::Node(node), Some(a), &full(3));
        assert!(pool.is_branch(a) && !pool.is_branch(b));
        *pool.attached_mut(b) = Attached { window: 7, checkpoint: 9 };
        pool.audit().unwrap();
        [c, b, a].iter().for_each(|&page| pool.release(page));
        assert_eq!(pool.alloc(), Some((c, Attached::NOTHING)));
        assert!(!pool.is_branch(a));
        // The parent is evicted and registered again: the child is not counted for the new node.
        assert_eq!(pool.forget(a), Attached::NOTHING);
        let a = pool.alloc().unwrap().0;
        pool.register(a, Parent::Root(0), None, &full(1));
        pool.audit().unwrap();
        assert_eq!(pool.alloc(), Some((b, Attached { window: 7, checkpoint: 9 })));
        pool.audit().unwrap();
    }

    #[test]
    fn changes_are_told_once_and_in_order() {
        let mut pool = PagePool::new(2);
        let unwatched = pool.alloc().unwrap().0;
        pool.register(unwatched, Parent::Root(0), None, &full(9));
        assert_eq!(pool.changes().count(), 0);
        pool.watch();
        let page = pool.alloc().unwrap().0;
        let (_, node) = pool.register(page, Parent::Root(3), None, &full(1));
        // The same content again is no change.
        pool.register(page, Parent::Root(3), None, &full(1));
        pool.release(page);
        pool.forget(page);
        let tokens = full(1).try_into().unwrap();
        let stored = CacheChange::Stored { node, parent: Parent::Root(3), tokens };
        assert_eq!(pool.changes().collect::<Vec<_>>(), [stored, CacheChange::Removed { node }]);
        assert_eq!(pool.changes().count(), 0);
    }

    #[test]
    fn equal_pages_become_one() {
        let mut pool = PagePool::new(2);
        let (a, b) = (pool.alloc().unwrap().0, pool.alloc().unwrap().0);
        assert_eq!(pool.register(a, Parent::Root(0), None, &full(1)), (a, 0));
        assert_eq!(pool.register(b, Parent::Root(0), None, &full(1)), (a, 0));
        assert_eq!(pool.refs(a), 2);
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 1, cached: 0, used: 1 });
        pool.release(a);
        pool.release(a);
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 1, cached: 1, used: 0 });
        assert_eq!(pool.oldest_cached(), Some(a));
        pool.forget(a);
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 2, cached: 0, used: 0 });
        pool.audit().unwrap();
    }
}
