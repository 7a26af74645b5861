//! The modules that a plan needs.

use std::collections::HashMap;

use super::super::sources::{self, Key};
use super::ModuleId;

/// Modules that a plan needs, each once.
#[derive(Default)]
pub struct Modules {
    keys: Vec<Key>,
    index: HashMap<Key, ModuleId>,
}

impl Modules {
    /// Every program needs these.
    pub const NORM: ModuleId = 0;
    pub const ROPE: ModuleId = 1;
    pub const ELEMENTWISE: ModuleId = 2;
    pub const COMBINE: ModuleId = 3;
    pub const EXPERT_LISTS: ModuleId = 4;
    pub const PICK: ModuleId = 5;
    pub const PACK: ModuleId = 6;

    /// With the modules that every program needs.
    pub fn new() -> Modules {
        let mut modules = Modules::default();
        for source in [
            sources::NORM,
            sources::ROPE,
            sources::ELEMENTWISE,
            sources::COMBINE,
            sources::EXPERT_LISTS,
            sources::PICK,
            sources::PACK,
        ] {
            modules.id(Key::plain(source));
        }
        modules
    }

    /// The module of a key.
    pub fn id(&mut self, key: Key) -> ModuleId {
        let next = self.keys.len();
        *self.index.entry(key).or_insert_with_key(|key| {
            self.keys.push(key.clone());
            next
        })
    }

    /// All of them, by their index.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}
