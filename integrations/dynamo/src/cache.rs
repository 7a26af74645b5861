//! What the prefix cache holds, in the words of Dynamo's router: blocks of one page, each named by a hash of its tokens
//! and of the block before it.
//!
//! The engine tells of pages by numbers that are never used twice. A block whose parent is gone cannot be found there,
//! so the router is told that all blocks after a removed one are removed, too.

use std::collections::{HashMap, VecDeque};

use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, compute_block_hash_for_seq, compute_next_seq_hash,
};
use moebius::local::tokens::{CacheChange, Parent};

/// Most namespaces that are remembered. Of more, the router is not told what the oldest hold.
const MAX_NAMESPACES: usize = 4096;

/// Namespaces that clients keep their prefixes in, and the engine's names for them.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// With a secret of the process, so that no name can be made that passes for another.
    secret: std::hash::RandomState,
    names: HashMap<u64, String>,
    order: VecDeque<u64>,
}

impl Namespaces {
    /// Returns the engine's name for a namespace; 0 is that of none.
    pub fn salt(&mut self, namespace: Option<&str>) -> u64 {
        use std::hash::BuildHasher;
        let Some(name) = namespace.filter(|name| !name.is_empty()) else { return 0 };
        let salt = self.secret.hash_one(name).max(1);
        if self.names.insert(salt, name.to_string()).is_none() {
            self.order.push_back(salt);
            if self.order.len() > MAX_NAMESPACES {
                self.order.pop_front().map(|oldest| self.names.remove(&oldest));
            }
        }
        salt
    }

    /// Returns the namespace of a name, and whether it is known.
    fn name(&self, salt: u64) -> Option<Option<&str>> {
        match salt {
            0 => Some(None),
            salt => self.names.get(&salt).map(|name| Some(name.as_str())),
        }
    }
}

/// A block that the router knows.
#[derive(Debug)]
struct Block {
    hash: u64,
    salt: u64,
    parent: Option<u64>,
    children: Vec<u64>,
}

/// Turns changes of the engine's cache into events.
#[derive(Debug, Default)]
pub struct Blocks {
    known: HashMap<u64, Block>,
}

impl Blocks {
    /// Returns the events of these changes, in order; `next_id` numbers them.
    pub fn events(
        &mut self,
        changes: &[CacheChange],
        namespaces: &Namespaces,
        mut next_id: impl FnMut() -> u64,
    ) -> Vec<KvCacheEvent> {
        let mut told: Vec<KvCacheEventData> = Vec::new();
        for change in changes {
            match change {
                CacheChange::Stored { node, parent, tokens } => {
                    let Some((parent_hash, block)) = self.store(*node, *parent, tokens, namespaces) else { continue };
                    match told.last_mut() {
                        // A prompt's pages become one event.
                        Some(KvCacheEventData::Stored(data))
                            if parent_hash.is_some()
                                && data.blocks.last().map(|last| last.block_hash) == parent_hash =>
                        {
                            data.blocks.push(block);
                        }
                        _ => told.push(KvCacheEventData::Stored(KvCacheStoreData {
                            parent_hash,
                            start_position: None,
                            blocks: vec![block],
                        })),
                    }
                }
                CacheChange::Removed { node } => {
                    let mut gone = Vec::new();
                    self.remove(*node, &mut gone);
                    match told.last_mut() {
                        _ if gone.is_empty() => {}
                        Some(KvCacheEventData::Removed(data)) => data.block_hashes.extend(gone),
                        _ => told.push(KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: gone })),
                    }
                }
            }
        }
        if self.known.is_empty() && !told.is_empty() {
            told = vec![KvCacheEventData::Cleared];
        }
        told.into_iter().map(|data| KvCacheEvent { event_id: next_id(), data, dp_rank: 0 }).collect()
    }

    /// Notes a block; its parent's hash and what the router is told of it. None where it cannot be found.
    fn store(
        &mut self,
        node: u64,
        parent: Parent,
        tokens: &[u32],
        namespaces: &Namespaces,
    ) -> Option<(Option<ExternalSequenceBlockHash>, KvCacheStoredBlockData)> {
        let (before, salt) = match parent {
            Parent::Root(salt) => (None, salt),
            Parent::Node(parent) => (Some(parent), self.known.get(&parent)?.salt),
        };
        let options = BlockHashOptions { cache_namespace: namespaces.name(salt)?, ..BlockHashOptions::default() };
        let tokens_hash: LocalBlockHash = compute_block_hash_for_seq(tokens, tokens.len() as u32, options).pop()?;
        let parent_hash = before.and_then(|parent| Some(self.known.get(&parent)?.hash));
        let hash = parent_hash.map_or(tokens_hash.0, |parent| compute_next_seq_hash(parent, tokens_hash));
        if let Some(parent) = before.and_then(|parent| self.known.get_mut(&parent)) {
            parent.children.push(node);
        }
        self.known.insert(node, Block { hash, salt, parent: before, children: Vec::new() });
        let block = KvCacheStoredBlockData { block_hash: hash.into(), tokens_hash, mm_extra_info: None };
        Some((parent_hash.map(Into::into), block))
    }

    /// Forgets a block and all after it, and adds their hashes to `gone`, the last ones first.
    fn remove(&mut self, node: u64, gone: &mut Vec<ExternalSequenceBlockHash>) {
        let Some(parent) = self.known.get(&node).map(|block| block.parent) else { return };
        if let Some(parent) = parent.and_then(|parent| self.known.get_mut(&parent)) {
            parent.children.retain(|child| *child != node);
        }
        let first = gone.len();
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            let Some(block) = self.known.remove(&node) else { continue };
            gone.push(block.hash.into());
            open.extend(block.children);
        }
        gone[first..].reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynamo_kv_router::protocols::compute_seq_hash_for_block;

    fn page(seed: u32) -> [u32; 32] {
        std::array::from_fn(|i| seed * 100 + i as u32)
    }

    fn stored(node: u64, parent: Parent, seed: u32) -> CacheChange {
        CacheChange::Stored { node, parent, tokens: page(seed) }
    }

    fn events(blocks: &mut Blocks, changes: &[CacheChange], namespaces: &Namespaces) -> Vec<KvCacheEventData> {
        let mut n = 0;
        let next = || {
            n += 1;
            n
        };
        let events = blocks.events(changes, namespaces, next);
        assert!(events.iter().zip(1..).all(|(event, id)| event.event_id == id));
        events.into_iter().map(|event| event.data).collect()
    }

    #[test]
    fn hashes_are_those_that_the_router_computes_of_a_prompt() {
        let mut namespaces = Namespaces::default();
        for (namespace, first) in [(None, 0), (Some("tenant"), 10)] {
            let salt = namespaces.salt(namespace);
            assert_eq!(salt, namespaces.salt(namespace));
            let mut blocks = Blocks::default();
            let changes = [
                stored(first, Parent::Root(salt), 1),
                stored(first + 1, Parent::Node(first), 2),
                stored(first + 2, Parent::Node(first + 1), 3),
            ];
            let told = events(&mut blocks, &changes, &namespaces);
            let [KvCacheEventData::Stored(data)] = &told[..] else { panic!("{told:?}") };
            let prompt: Vec<u32> = [page(1), page(2), page(3)].concat();
            let options = BlockHashOptions { cache_namespace: namespace, ..BlockHashOptions::default() };
            let local = compute_block_hash_for_seq(&prompt, 32, options);
            let chained = compute_seq_hash_for_block(&local);
            assert_eq!(data.parent_hash, None);
            assert_eq!(data.blocks.iter().map(|block| block.tokens_hash).collect::<Vec<_>>(), local);
            assert_eq!(data.blocks.iter().map(|block| block.block_hash.0).collect::<Vec<_>>(), chained);
        }
    }

    #[test]
    fn what_follows_a_removed_block_is_removed_with_it() {
        let (mut blocks, namespaces) = (Blocks::default(), Namespaces::default());
        let changes = [
            stored(0, Parent::Root(0), 1),
            stored(1, Parent::Node(0), 2),
            stored(2, Parent::Node(1), 3),
            stored(3, Parent::Node(1), 4),
            stored(4, Parent::Root(0), 5),
        ];
        let told = events(&mut blocks, &changes, &namespaces);
        let hash = |i: usize| blocks.known[&(i as u64)].hash;
        let hashes: Vec<u64> = (0..5).map(hash).collect();
        // Blocks 0, 1 and 2; then 3 after 1; then 4.
        assert_eq!(told.len(), 3);
        let told = events(&mut blocks, &[CacheChange::Removed { node: 1 }], &namespaces);
        let [KvCacheEventData::Removed(data)] = &told[..] else { panic!("{told:?}") };
        let mut gone: Vec<u64> = data.block_hashes.iter().map(|hash| hash.0).collect();
        assert_eq!(gone.pop(), Some(hashes[1]));
        gone.sort_unstable();
        let mut expected = vec![hashes[2], hashes[3]];
        expected.sort_unstable();
        assert_eq!(gone, expected);
        // The engine tells of each of them later; that is no news.
        assert!(events(&mut blocks, &[CacheChange::Removed { node: 2 }], &namespaces).is_empty());
        // What comes after a block that is gone cannot be found.
        assert!(events(&mut blocks, &[stored(9, Parent::Node(1), 7)], &namespaces).is_empty());
        let rest = [CacheChange::Removed { node: 0 }, CacheChange::Removed { node: 4 }];
        assert_eq!(events(&mut blocks, &rest, &namespaces), [KvCacheEventData::Cleared]);
        assert!(events(&mut blocks, &[], &namespaces).is_empty());
    }

    #[test]
    fn unknown_namespaces_are_not_told_of() {
        let (mut blocks, mut namespaces) = (Blocks::default(), Namespaces::default());
        let first = namespaces.salt(Some("first"));
        for i in 0..MAX_NAMESPACES {
            assert_ne!(namespaces.salt(Some(&i.to_string())), first);
        }
        assert!(events(&mut blocks, &[stored(0, Parent::Root(first), 1)], &namespaces).is_empty());
        let last = namespaces.salt(Some("0"));
        assert_eq!(events(&mut blocks, &[stored(1, Parent::Root(last), 1)], &namespaces).len(), 1);
    }
}
