//! The window page pool: which pages are free, in use, held by a checkpoint, or cached because their content may be
//! reused.
//!
//! A window page whose block is full is attached to the registered page of the same positions, and is found through it.
//! It may be evicted before that page, and is freed with it. Knows no sequences and no content of a page.

use super::pages::{NONE, PageCounts};
use super::ring::Ring;

/// State of one window page.
#[derive(Clone, Copy, Debug)]
struct Page {
    /// Sequences that use it.
    users: u32,
    /// Checkpoints that hold it.
    keepers: u32,
    /// The registered page it is attached to, or [`NONE`].
    node: u32,
}

/// Window pages with reference counts, a free list, and a ring of cached pages in order of last use.
#[derive(Debug)]
pub(super) struct WindowPool {
    pages: Vec<Page>, // [n_window_pages]
    free: Vec<u32>,
    /// Attached, and neither used nor held by a checkpoint.
    cached: Ring,
    n_used: usize,
}

impl WindowPool {
    /// Returns a pool of free pages. Allocates all it will ever need.
    pub fn new(n_pages: usize) -> WindowPool {
        WindowPool {
            pages: vec![Page { users: 0, keepers: 0, node: NONE }; n_pages],
            free: (0..n_pages as u32).rev().collect(),
            cached: Ring::new(n_pages),
            n_used: 0,
        }
    }

    /// Number of pages in each state; pages held by checkpoints count as cached.
    pub fn counts(&self) -> PageCounts {
        let (total, free, used) = (self.pages.len(), self.free.len(), self.n_used);
        PageCounts { total, free, cached: total - free - used, used }
    }

    /// Pages that no sequence uses.
    pub fn available(&self) -> usize {
        self.pages.len() - self.n_used
    }

    /// Takes a page to write into: a free one, else the least recently used cached one, returned with the registered
    /// page that it was attached to, or [`NONE`]. `None` when all others are in use or held by checkpoints.
    pub fn alloc(&mut self) -> Option<(u32, u32)> {
        let (page, node) = match self.free.pop() {
            Some(page) => (page, NONE),
            None => {
                let oldest = self.cached.oldest()?;
                self.cached.remove(oldest);
                (oldest, std::mem::replace(&mut self.pages[oldest as usize].node, NONE))
            }
        };
        self.pages[page as usize].users = 1;
        self.n_used += 1;
        Some((page, node))
    }

    /// Takes a page to read it.
    pub fn share(&mut self, page: u32) {
        self.wake(page);
        let p = &mut self.pages[page as usize];
        self.n_used += usize::from(p.users == 0);
        p.users += 1;
    }

    /// Releases a page.
    pub fn release(&mut self, page: u32) {
        let p = &mut self.pages[page as usize];
        p.users -= 1;
        self.n_used -= usize::from(p.users == 0);
        self.settle(page);
    }

    /// Holds a page for a checkpoint.
    pub fn keep(&mut self, page: u32) {
        self.wake(page);
        self.pages[page as usize].keepers += 1;
    }

    /// Releases a page from a checkpoint that is gone.
    pub fn unkeep(&mut self, page: u32) {
        self.pages[page as usize].keepers -= 1;
        self.settle(page);
    }

    /// Attaches a page in use to the registered page of the same positions.
    pub fn attach(&mut self, page: u32, node: u32) {
        self.pages[page as usize].node = node;
    }

    /// Detaches a page from its registered page, which is gone.
    pub fn detach(&mut self, page: u32) {
        let idle = self.is_idle(page);
        self.pages[page as usize].node = NONE;
        if idle {
            self.cached.remove(page);
            self.free.push(page);
        }
    }

    /// Returns the least recently used cached page, with the registered page that it is attached to.
    pub fn oldest_cached(&self) -> Option<(u32, u32)> {
        self.cached.oldest().map(|page| (page, self.pages[page as usize].node))
    }

    /// Recounts everything. `users` and `keepers` are counts made elsewhere; `node` returns the registered page of a
    /// window page.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn audit(&self, users: &[u32], keepers: &[u32], node: impl Fn(u32) -> u32) -> Result<(), String> {
        let mut free = vec![false; self.pages.len()];
        self.free.iter().for_each(|&page| free[page as usize] = true);
        for (i, page) in self.pages.iter().enumerate() {
            if (page.users, page.keepers, page.node) != (users[i], keepers[i], node(i as u32)) {
                let (u, k, n) = (users[i], keepers[i], node(i as u32));
                return Err(format!("window page {i} has {page:?}, found {u} users, {k} keepers, node {n}"));
            }
            let idle = page.users == 0 && page.keepers == 0;
            if free[i] != (idle && page.node == NONE) {
                return Err(format!("window page {i} is free: {}, and has {page:?}", free[i]));
            }
            if self.cached.iter().any(|cached| cached == i as u32) != (idle && page.node != NONE) {
                return Err(format!("window page {i} is in the wrong ring: {page:?}"));
            }
        }
        let n_used = self.pages.iter().filter(|page| page.users > 0).count();
        match n_used == self.n_used {
            true => Ok(()),
            false => Err(format!("{n_used} window pages are used, the count says {}", self.n_used)),
        }
    }

    fn is_idle(&self, page: u32) -> bool {
        let p = &self.pages[page as usize];
        p.users == 0 && p.keepers == 0
    }

    /// Takes a page out of the ring before a new use.
    fn wake(&mut self, page: u32) {
        if self.is_idle(page) {
            self.cached.remove(page);
        }
    }

    /// After a release: a page without users is cached or free.
    fn settle(&mut self, page: u32) {
        if self.is_idle(page) {
            match self.pages[page as usize].node {
                NONE => self.free.push(page),
                _ => self.cached.push(page),
            }
        }
    }
}
