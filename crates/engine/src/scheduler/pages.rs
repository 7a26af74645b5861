//! The page pool: which pages of the cache are free, in use, or kept because their content may be asked for again.
//!
//! It hands out page numbers and counts references. It knows nothing of sequences, requests or the numbers in a page.
//!
//! Full pages are registered in a trie: a page's key is its parent's node and its own [`PAGE`] token ids, compared in
//! full. A lookup that hits therefore holds exactly the asked tokens after exactly the asked prefix; there is no hash
//! whose collision could give wrong text. Nodes are numbered once and never again, so that a page whose parent was
//! evicted is not found under the parent's successor.

use std::collections::HashMap;

use backend::PAGE;

/// What stands before a page: nothing, or another registered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Parent {
    /// The page is the first of its sequence. Chains of different salts share nothing.
    Root(u64),
    /// The page registered as this node.
    Node(u64),
}

/// What a registered page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [u32; PAGE],
}

/// How many pages are in which state. `free + cached + used` is the size of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages of the pool.
    pub total: usize,
    /// Pages without content.
    pub free: usize,
    /// Pages that no sequence uses, kept for their content, and given away when no page is free.
    pub cached: usize,
    /// Pages that sequences use.
    pub used: usize,
}

/// One page's books.
#[derive(Clone, Copy, Debug)]
struct Page {
    /// Sequences that use it.
    refs: u32,
    /// Set when it is registered: its key and its node.
    registered: Option<(Key, u64)>,
    /// Neighbours in the ring of cached pages; meaningless outside of it.
    older: u32,
    newer: u32,
}

/// Pages with reference counts, a free list, and a ring of cached pages in order of last use.
#[derive(Debug)]
pub(crate) struct PagePool {
    /// `[n_pages + 1]`; the last one is the ring's anchor: its `newer` is the oldest page, its `older` the newest.
    pages: Vec<Page>,
    free: Vec<u32>,
    n_cached: usize,
    index: HashMap<Key, u32>,
    next_node: u64,
}

impl PagePool {
    /// A pool of free pages. Everything it will ever need is allocated here.
    pub fn new(n_pages: usize) -> PagePool {
        let anchor = n_pages as u32;
        PagePool {
            pages: vec![Page { refs: 0, registered: None, older: anchor, newer: anchor }; n_pages + 1],
            // Low numbers first, so that small runs touch little memory.
            free: (0..anchor).rev().collect(),
            n_cached: 0,
            // Twice the entries: then removed ones are cleaned up in place and the table never grows.
            index: HashMap::with_capacity(2 * n_pages),
            next_node: 0,
        }
    }

    /// How many pages are in which state.
    pub fn counts(&self) -> PageCounts {
        let total = self.pages.len() - 1;
        let (free, cached) = (self.free.len(), self.n_cached);
        PageCounts { total, free, cached, used: total - free - cached }
    }

    /// Pages that [`PagePool::alloc`] can still give.
    pub fn available(&self) -> usize {
        self.free.len() + self.n_cached
    }

    /// Sequences that use a page.
    pub fn refs(&self, page: u32) -> u32 {
        self.pages[page as usize].refs
    }

    /// Takes a page to write into: a free one, else the cached one that was not used for longest.
    pub fn alloc(&mut self) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None if self.n_cached > 0 => {
                let oldest = self.pages[self.anchor()].newer;
                self.unlink(oldest);
                self.unregister(oldest);
                oldest
            }
            None => return None,
        };
        self.pages[page as usize].refs = 1;
        Some(page)
    }

    /// Finds the page that holds `tokens` (of length [`PAGE`]) after `parent`, with its node.
    pub fn lookup(&self, parent: Parent, tokens: &[u32]) -> Option<(u32, u64)> {
        let page = *self.index.get(&key(parent, tokens)?)?;
        self.pages[page as usize].registered.map(|(_, node)| (page, node))
    }

    /// Takes a page that [`PagePool::lookup`] found, to read it.
    pub fn share(&mut self, page: u32) {
        if self.pages[page as usize].refs == 0 {
            self.unlink(page);
        }
        self.pages[page as usize].refs += 1;
    }

    /// Gives a page back. A registered page stays cached until it is needed or asked for.
    ///
    /// The pages of a sequence are released last page first: then a page is never kept longer than its parent.
    pub fn release(&mut self, page: u32) {
        let p = &mut self.pages[page as usize];
        p.refs -= 1;
        if p.refs > 0 {
            return;
        }
        if p.registered.is_some() {
            self.link_newest(page);
        } else {
            self.free.push(page);
        }
    }

    /// Makes a full page findable. Where another page holds the same already, the caller's page is released
    /// and the other one shared instead. Returns the page the caller now holds and its node.
    pub fn register(&mut self, page: u32, parent: Parent, tokens: &[u32]) -> (u32, u64) {
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
            self.pages[page as usize].registered = Some((key, node));
        }
        (page, node)
    }

    /// Makes a page's content unfindable; who uses it goes on.
    pub fn forget(&mut self, page: u32) {
        let cached = self.pages[page as usize].refs == 0 && self.pages[page as usize].registered.is_some();
        self.unregister(page);
        if cached {
            self.unlink(page);
            self.free.push(page);
        }
    }

    /// Makes every cached page free.
    pub fn clear_cached(&mut self) {
        while self.n_cached > 0 {
            self.forget(self.pages[self.anchor()].newer);
        }
    }

    /// Counts everything again, the slow way, and says what does not add up.
    pub fn audit(&self) -> Result<(), String> {
        let n_pages = self.pages.len() - 1;
        let mut state = vec!["lost"; n_pages];
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
        let (mut page, mut n_cached) = (self.pages[self.anchor()].newer, 0);
        while page as usize != self.anchor() {
            let p = &self.pages[page as usize];
            if state[page as usize] != "lost" || p.refs != 0 || p.registered.is_none() {
                return Err(format!("page {page} is cached, but {} with {} users", state[page as usize], p.refs));
            }
            state[page as usize] = "cached";
            n_cached += 1;
            page = p.newer;
        }
        if n_cached != self.n_cached {
            return Err(format!("{n_cached} pages are cached, the count says {}", self.n_cached));
        }
        for (page, p) in self.pages[..n_pages].iter().enumerate() {
            if state[page] == "lost" && p.refs == 0 {
                return Err(format!("page {page} is lost"));
            }
            if let Some((key, _)) = &p.registered
                && self.index.get(key) != Some(&(page as u32))
            {
                return Err(format!("page {page} is registered and cannot be found"));
            }
        }
        let n_registered = self.pages.iter().filter(|p| p.registered.is_some()).count();
        if n_registered != self.index.len() {
            return Err(format!("{n_registered} pages are registered, the index has {}", self.index.len()));
        }
        Ok(())
    }

    fn anchor(&self) -> usize {
        self.pages.len() - 1
    }

    fn unregister(&mut self, page: u32) {
        if let Some((key, _)) = self.pages[page as usize].registered.take() {
            self.index.remove(&key);
        }
    }

    fn link_newest(&mut self, page: u32) {
        let anchor = self.anchor();
        let newest = self.pages[anchor].older;
        self.pages[page as usize].older = newest;
        self.pages[page as usize].newer = anchor as u32;
        self.pages[newest as usize].newer = page;
        self.pages[anchor].older = page;
        self.n_cached += 1;
    }

    fn unlink(&mut self, page: u32) {
        let Page { older, newer, .. } = self.pages[page as usize];
        self.pages[older as usize].newer = newer;
        self.pages[newer as usize].older = older;
        self.n_cached -= 1;
    }
}

/// The key of a page; none where `tokens` are not a full page.
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
        let pages: Vec<u32> = (0..3).map(|_| pool.alloc().unwrap()).collect();
        assert_eq!(pool.alloc(), None);
        for (i, &page) in pages.iter().enumerate() {
            assert_eq!(pool.register(page, Parent::Root(0), &full(i as u32)).0, page);
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
            assert_eq!(pool.alloc(), Some(pages[expected]));
            assert!(pool.lookup(Parent::Root(0), &full(expected as u32)).is_none());
            pool.audit().unwrap();
        }
        assert_eq!(pool.counts(), PageCounts { total: 3, free: 0, cached: 0, used: 3 });
    }

    #[test]
    fn a_page_is_found_only_after_its_own_prefix() {
        let mut pool = PagePool::new(4);
        let (a, b) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        let (_, node) = pool.register(a, Parent::Root(7), &full(1));
        pool.register(b, Parent::Node(node), &full(2));
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
        // The parent is registered anew: the child must not be found below the new node.
        pool.forget(a);
        let (_, again) = pool.register(a, Parent::Root(7), &full(1));
        assert_eq!(pool.lookup(Parent::Node(again), &full(2)), None);
        pool.audit().unwrap();
    }

    #[test]
    fn equal_pages_become_one() {
        let mut pool = PagePool::new(2);
        let (a, b) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        assert_eq!(pool.register(a, Parent::Root(0), &full(1)), (a, 0));
        assert_eq!(pool.register(b, Parent::Root(0), &full(1)), (a, 0));
        assert_eq!(pool.refs(a), 2);
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 1, cached: 0, used: 1 });
        pool.release(a);
        pool.release(a);
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 1, cached: 1, used: 0 });
        pool.clear_cached();
        assert_eq!(pool.counts(), PageCounts { total: 2, free: 2, cached: 0, used: 0 });
        pool.audit().unwrap();
    }
}
