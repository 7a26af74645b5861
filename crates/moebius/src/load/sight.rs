//! What a model that sees has besides its text model: the encoder, in the model's own files or in one alongside them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use backend::reference::Reference;
use backend::residency::Policy;
use backend::{Backend, CacheType};
use checkpoint::Checkpoint;
use cpu::Cpu;
use engine::images::{self, Encoder, Image, Pictures, Placed};
use engine::tokenizer::{Encode, Tokenizer};
use gpu::cuda::Cuda;
use gpu::metal::Metal;
use model::plan::ValidPlan;
use model::vision::{self, Vision};

use super::{EngineSetup, Model};
use crate::args::SightArgs;
use crate::device::Chosen;
use crate::input;

/// Longest file of an image, in bytes.
const MAX_IMAGE_BYTES: u64 = 64 << 20;

/// The encoder of a model, not started.
pub struct Sight {
    vision: Vision,
    checkpoint: Arc<Checkpoint>,
    max_features: usize,
    /// It stays on the CPU where a GPU runs the text model.
    stays: bool,
}

/// Memory that an image encoder takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderRoom {
    bytes: usize,
    stays: bool,
}

impl EncoderRoom {
    /// Returns the bytes of the host's memory and of the device's, where `kind` runs the text model.
    pub fn on(self, kind: Chosen) -> [usize; 2] {
        match place(kind, self.stays) {
            Chosen::Cuda | Chosen::Metal => [0, self.bytes],
            Chosen::Cpu | Chosen::Reference => [self.bytes, 0],
        }
    }
}

/// What runs an encoder where `kind` runs the text model.
fn place(kind: Chosen, stays: bool) -> Chosen {
    match kind {
        Chosen::Cuda | Chosen::Metal if stays => Chosen::Cpu,
        kind => kind,
    }
}

impl Model {
    /// Returns the same with places for images in its plan, and the encoder, where it has one: in its own files, in the
    /// file that is named, or in a file called mmproj next to a GGUF file.
    ///
    /// # Errors
    /// The encoder is named and is none, or is another model's; or the model's own is unsupported.
    pub fn seeing(self, args: &SightArgs) -> Result<Model> {
        let open = |path: &Path| -> Result<_> {
            let file = open(path)?;
            Ok((vision::open(&self.checkpoint, &self.plan, Some(&file))?, Some(file)))
        };
        let own = || anyhow::Ok((vision::open(&self.checkpoint, &self.plan, None)?, None));
        let mut unseen = None;
        let (seen, file) = match (&args.mmproj, alongside(&self.checkpoint)) {
            (Some(path), _) => open(path)?,
            (None, Some(path)) => match open(&path) {
                Ok(found) => found,
                // The folder may hold other models' encoders.
                Err(why) => {
                    unseen = Some(format!("the image encoder next to the model is not used: {why}"));
                    own()?
                }
            },
            (None, None) => own()?,
        };
        let Some((plan, vision)) = seen else {
            ensure!(args.mmproj.is_none(), "failed to open --mmproj: {} takes no images", self.plan.arch);
            return Ok(Model { unseen, ..self });
        };
        let checkpoint = file.unwrap_or_else(|| Arc::clone(&self.checkpoint));
        let sight = Some(Sight { vision, checkpoint, max_features: args.image_tokens, stays: args.no_mmproj_offload });
        Ok(Model { plan, sight, unseen, ..self })
    }
}

impl Sight {
    /// Returns another plan of the text model with places for images.
    ///
    /// # Errors
    /// The encoder does not fit it.
    pub(super) fn place(&self, text: &Checkpoint, plan: ValidPlan) -> Result<ValidPlan> {
        Ok(vision::open(text, &plan, Some(&self.checkpoint))?.map_or(plan, |(plan, _)| plan))
    }

    /// Returns the encoder, where `kind` runs the text model: on the same device, or on the CPU. An image is one step
    /// of it, whose rows steps of the text model take.
    ///
    /// # Errors
    /// Its settings are invalid.
    pub fn encoder(self, setup: &EngineSetup, kind: Chosen) -> Result<Encoder> {
        let backend: Box<dyn Backend + Send> = match place(kind, self.stays) {
            Chosen::Reference => Box::new(Reference),
            Chosen::Cuda => Box::new(Cuda { cache: CacheType::F16, ..setup.cuda() }),
            Chosen::Metal => Box::new(Metal { cache: CacheType::F16, ..setup.metal(&self.vision.encoder)? }),
            Chosen::Cpu => Box::new(Cpu { cache: CacheType::F32, ..setup.cpu(Policy::Mapped)? }),
        };
        Ok(Encoder::new(self.vision, self.checkpoint, backend, self.max_features)?)
    }

    /// Memory that the encoder takes for the largest image.
    ///
    /// # Errors
    /// As [`Sight::encoder`].
    pub fn room(&self, setup: &EngineSetup) -> Result<EncoderRoom> {
        let Sight { vision, checkpoint, max_features, stays } = self;
        let (vision, checkpoint) = (vision.clone(), Arc::clone(checkpoint));
        let own = Sight { vision, checkpoint, max_features: *max_features, stays: *stays };
        let bytes = own.encoder(setup, setup.kind())?.footprint().total();
        Ok(EncoderRoom { bytes, stays: *stays })
    }

    /// Returns the encoder and the tokens of images.
    ///
    /// # Errors
    /// As [`Sight::encoder`], and where the vocabulary lacks such a token.
    pub(super) fn open(self, setup: &EngineSetup, kind: Chosen, tokenizer: &Tokenizer) -> Result<Eyes> {
        let tokens = &self.vision.tokens;
        let id = |known: Option<u32>, text: &str| {
            let id = known.or_else(|| tokenizer.token_to_id(text)).filter(|&id| (id as usize) < tokenizer.n_vocab());
            id.with_context(|| format!("failed to show images to the model: it has no token {text}"))
        };
        let feature = id(tokens.feature, tokens.feature_text)?;
        let [front, after] = [0, 1].map(|i| id(tokens.around_ids[i], tokens.around[i]));
        let around = [front?, after?];
        let vision = self.vision.clone();
        Ok(Eyes { encoder: Mutex::new(self.encoder(setup, kind)?), vision, feature, around })
    }
}

/// The encoder of a loaded model, and the tokens of images.
pub struct Eyes {
    encoder: Mutex<Encoder>,
    vision: Vision,
    feature: u32,
    /// In front of an image and after it.
    around: [u32; 2],
}

impl Eyes {
    /// Returns an empty prompt.
    pub fn prompt<'a>(&'a self, tokenizer: &'a Tokenizer) -> SeenPrompt<'a> {
        SeenPrompt { eyes: self, tokenizer, tokens: Vec::new(), images: Vec::new(), is_begun: false }
    }
}

/// A prompt of texts and images.
pub struct SeenPrompt<'a> {
    eyes: &'a Eyes,
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    images: Vec<Placed>,
    is_begun: bool,
}

impl SeenPrompt<'_> {
    /// Appends text that a template or a user wrote for the model, special tokens included.
    pub fn push_text(&mut self, text: &str) {
        let add_special = !std::mem::replace(&mut self.is_begun, true);
        let more = self.tokenizer.encode(text, Encode { add_special, parse_special: true });
        // Templates that write the begin-of-text token themselves would get it twice.
        let twice = add_special && self.tokenizer.bos().is_some_and(|bos| more.starts_with(&[bos, bos]));
        self.tokens.extend_from_slice(&more[usize::from(twice)..]);
    }

    /// Appends the image of a file.
    ///
    /// # Errors
    /// It is no image, or the encoder fails.
    pub fn push_image(&mut self, file: &[u8]) -> Result<(), images::Error> {
        let features = self.eyes.encoder.lock().unwrap_or_else(PoisonError::into_inner).see(file)?;
        let [front, after] = self.eyes.around;
        self.tokens.push(front);
        let first = self.tokens.len();
        self.tokens.resize(first + features.len(), self.eyes.feature);
        self.tokens.push(after);
        self.images.push(Placed { first, features });
        Ok(())
    }

    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns its tokens and where its images are.
    pub fn finish(self) -> (Vec<u32>, Pictures) {
        (self.tokens, Pictures::at(&self.eyes.vision, self.eyes.feature, self.images))
    }
}

/// Returns the bytes of an image's file.
///
/// # Errors
/// It cannot be read, or is longer than 64 MiB.
pub fn image_file(path: &Path) -> Result<Vec<u8>> {
    input::bytes_up_to(path, MAX_IMAGE_BYTES)
}

/// An image of a conversation.
pub struct Shown {
    /// What stands for it in the text. It has a random number: marks that a text has by chance are taken for text.
    pub mark: String,
    path: PathBuf,
    file: Vec<u8>,
}

impl Shown {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no image.
    pub fn open(path: &Path) -> Result<Shown> {
        let file = image_file(path)?;
        Image::decode(&file).with_context(|| format!("failed to show {}", path.display()))?;
        Ok(Shown { mark: format!("[image {:016x}]", crate::serve::random()), path: path.into(), file })
    }
}

impl Eyes {
    /// Returns the tokens of a text, those of images in place of their marks, which are in it in this order.
    ///
    /// # Errors
    /// A mark is not there, or the encoder fails.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, shown: &[&Shown]) -> Result<(Vec<u32>, Pictures)> {
        let (mut seen, mut rest) = (self.prompt(tokenizer), text);
        for Shown { mark, path, file } in shown {
            let parts = rest.split_once(mark.as_str());
            let (before, after) = parts.context("failed to place the images: the chat template leaves them out")?;
            seen.push_text(before);
            seen.push_image(file).with_context(|| format!("failed to show {}", path.display()))?;
            rest = after;
        }
        seen.push_text(rest);
        Ok(seen.finish())
    }
}

/// Returns the file of an encoder in the folder of a GGUF file, by its name: `mmproj-` and the model's, else the first
/// by name.
fn alongside(checkpoint: &Checkpoint) -> Option<PathBuf> {
    let path = checkpoint.path();
    if !path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) {
        return None;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_encoder = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        name.contains("mmproj") && name.ends_with(".gguf")
    };
    let own = folder.join(format!("mmproj-{}", path.file_name()?.to_string_lossy()));
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(is_encoder).min_by_key(|file| (*file != own, file.clone()))
}

fn open(path: &Path) -> Result<Arc<Checkpoint>> {
    let checkpoint = checkpoint::open(path)?;
    let arch = checkpoint.meta().opt_str("general.architecture").ok().flatten();
    if arch != Some("clip") {
        bail!("failed to open {}: it is no image encoder (mmproj)", path.display());
    }
    Ok(Arc::new(checkpoint))
}
