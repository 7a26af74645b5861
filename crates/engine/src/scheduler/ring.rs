//! Numbers in order of last use: cached items enter as the newest, and the oldest is evicted first.

/// A ring over the numbers below a limit. Allocates all it will ever need.
#[derive(Debug)]
pub(super) struct Ring {
    /// `[n + 1]`, `(older, newer)` neighbors; the last entry is the anchor: its `newer` is the oldest number, its
    /// `older` the newest. Undefined for numbers outside of the ring.
    links: Vec<(u32, u32)>,
    len: usize,
}

impl Ring {
    /// Returns an empty ring for numbers below `n`.
    pub fn new(n: usize) -> Ring {
        Ring { links: vec![(n as u32, n as u32); n + 1], len: 0 }
    }

    /// Number of numbers in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the oldest number.
    pub fn oldest(&self) -> Option<u32> {
        (self.len > 0).then(|| self.links[self.anchor()].1)
    }

    /// Adds a number as the newest.
    pub fn push(&mut self, id: u32) {
        let anchor = self.anchor();
        let newest = self.links[anchor].0;
        self.links[id as usize] = (newest, anchor as u32);
        self.links[newest as usize].1 = id;
        self.links[anchor].0 = id;
        self.len += 1;
    }

    /// Removes a number that is in it.
    pub fn remove(&mut self, id: u32) {
        let (older, newer) = self.links[id as usize];
        self.links[older as usize].1 = newer;
        self.links[newer as usize].0 = older;
        self.len -= 1;
    }

    /// The numbers, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let next = |&id: &u32| Some(self.links[id as usize].1);
        std::iter::successors(self.oldest(), next).take_while(|&id| id as usize != self.anchor())
    }

    fn anchor(&self) -> usize {
        self.links.len() - 1
    }
}
