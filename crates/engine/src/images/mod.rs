//! What a model sees: image files become pixels, pixels rows of patches, and an encoder's program makes features of
//! them, which take the place of tokens. Knows no message and no request; opens no file and no address.

mod decode;
mod encoder;
mod processor;
mod prompt;
mod resize;

pub use decode::{Hash, Image, MAX_PIXELS};
pub use encoder::{Encoder, Features};
pub use processor::{Processor, Rows};
pub use prompt::{Pictures, Placed};

/// Why an image is not seen. Each is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes are no image of a supported format, or a broken one.
    #[error("failed to decode an image: {0}")]
    Decode(String),
    /// Its shape cannot be encoded.
    #[error("failed to encode an image of {width} by {height} pixels: {why}")]
    #[allow(missing_docs)]
    Shape { width: usize, height: usize, why: String },
    /// The processor's settings in the model's files are invalid.
    #[error("failed to read how the model takes images, {file}: {what}")]
    #[allow(missing_docs)]
    Settings { file: String, what: String },
    /// A file of the model cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The encoder could not be started.
    #[error("failed to start the image encoder: {0}")]
    Compile(#[from] backend::CompileError),
    /// The encoder failed.
    #[error("failed to encode an image: {0}")]
    Step(#[from] backend::StepError),
    /// The features are not numbers.
    #[error("failed to encode an image: its features are not finite")]
    NotFinite,
    /// The prompt and its images do not fit together.
    #[error("failed to place images in the prompt: {0}")]
    Prompt(String),
}
