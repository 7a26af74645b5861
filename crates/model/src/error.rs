//! The error of this crate.

/// Why no plan can be made of a model. Each is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key is missing or has another type.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// No file in [`crate::arch`] knows this architecture.
    #[error(
        "failed to build the plan of {file}: architecture {arch} is unsupported{}; `moebius models --supported` lists \
         what runs, docs/models.md says how to ask for more",
        nearest.map(|name| format!(" (the nearest is {name})")).unwrap_or_default()
    )]
    Architecture {
        /// The model.
        file: String,
        /// Its name in the file.
        arch: String,
        /// The most similar name of a supported architecture, where one is similar.
        nearest: Option<&'static str>,
    },
    /// A key's value is absurd, or contradicts another.
    #[error("failed to build the plan of {file}: key {key}: {what}")]
    Key {
        /// The model.
        file: String,
        /// The key.
        key: String,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A tensor is missing, has another shape or type, or is not used by the architecture.
    #[error("failed to build the plan of {file}: tensor {tensor}: {what}")]
    Tensor {
        /// The model.
        file: String,
        /// The tensor.
        tensor: String,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A plan breaks a rule of an op.
    #[error("failed to validate the plan: op {op} ({name}): {what}")]
    Op {
        /// Index into [`crate::plan::Plan::ops`].
        op: usize,
        /// Name of the op.
        name: &'static str,
        /// What disagrees, with the numbers.
        what: String,
    },
    /// A plan contradicts itself outside its ops.
    #[error("failed to validate the plan: {0}")]
    Plan(String),
}

/// Returns a name from a file, for a message: visible, cut to a line.
pub(crate) fn printable(name: &str) -> String {
    const LIMIT: usize = 80;
    let mut out = checkpoint::visible(&name.chars().take(LIMIT).collect::<String>());
    if name.chars().nth(LIMIT).is_some() {
        out.push('…');
    }
    out
}
