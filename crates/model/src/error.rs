//! The error of this crate.

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
        /// Its name in the file.
        arch: String,
        /// Names of the supported architectures.
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
    /// A tensor is missing, has another shape or type, or is not used by the architecture.
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

/// A name from a file, for a message: visible, cut to a line.
pub(crate) fn printable(name: &str) -> String {
    const LIMIT: usize = 80;
    let mut out = checkpoint::visible(&name.chars().take(LIMIT).collect::<String>());
    if name.chars().nth(LIMIT).is_some() {
        out.push('…');
    }
    out
}
