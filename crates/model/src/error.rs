//! The one error of this crate.

/// Why no plan can be made of a model. The text continues the words "failed to".
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key is missing or has another type.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// No file in [`crate::arch`] knows this architecture.
    #[error("build plan of {file}: architecture {arch} is not supported; supported: {supported}")]
    Architecture {
        /// The model.
        file: String,
        /// What it calls itself.
        arch: String,
        /// Names of the architectures that are.
        supported: String,
    },
    /// A key's value is absurd, or contradicts another.
    #[error("build plan of {file}: key {key}: {what}")]
    Key {
        /// The model.
        file: String,
        /// The key.
        key: String,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A tensor is missing, has another shape or type, or is one that the architecture has no use for.
    #[error("build plan of {file}: tensor {tensor}: {what}")]
    Tensor {
        /// The model.
        file: String,
        /// The tensor.
        tensor: String,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A plan breaks a rule of an op.
    #[error("validate plan: op {op} ({name}): {what}")]
    Op {
        /// Index into [`crate::plan::Plan::ops`].
        op: usize,
        /// Name of the op.
        name: &'static str,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A plan contradicts itself outside its ops.
    #[error("validate plan: {0}")]
    Plan(String),
}

/// A name out of a file, fit to print: escaped where it would steer a terminal, and cut to a line.
pub(crate) fn printable(name: &str) -> String {
    const LIMIT: usize = 80;
    let mut out: String = name.chars().take(LIMIT).flat_map(char::escape_debug).collect();
    if name.chars().nth(LIMIT).is_some() {
        out.push('…');
    }
    out
}
