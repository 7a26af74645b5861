//! Continuous batching over paged KV with a prefix cache.
