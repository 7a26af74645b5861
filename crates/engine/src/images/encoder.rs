//! The program of an encoder: compiled when the first image comes, anew when a larger one does.

use std::collections::VecDeque;
use std::sync::Arc;

use backend::{Backend, Batch, Footprint, GivenRows, Limits, PAGE, Program, Tables};
use checkpoint::Checkpoint;
use model::plan::ValidPlan;
use model::vision::Vision;

use super::decode::{self, Hash};
use super::{Error, Image, Processor, Rows};

/// Patches that a program is compiled for at least.
const LEAST_PATCHES: usize = 1024;
/// Memory of features that are kept.
const MAX_RECENT_BYTES: usize = 64 << 20;

/// Computes features of images.
pub struct Encoder {
    vision: Vision,
    processor: Processor,
    backend: Box<dyn Backend + Send>,
    checkpoint: Arc<Checkpoint>,
    plan: ValidPlan,
    program: Option<Box<dyn Program>>,
    /// Features of the last images, the latest last: a conversation sends them again with every turn.
    recent: VecDeque<Arc<Features>>,
}

/// What a text model is given for an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    /// `[n, d_features]`.
    pub rows: Vec<f32>,
    /// Rows and columns of them.
    pub grid: [usize; 2],
    /// Hash of the image's file.
    pub hash: Hash,
    /// Hash of the features and their grid, which cached prefixes are found by.
    pub content: Hash,
}

impl Features {
    /// Number of features: tokens that the image takes.
    pub fn len(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Whether there are none; an image has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Encoder {
    /// An encoder that computes on `backend`, with the weights and settings in `checkpoint`.
    ///
    /// # Errors
    /// Its settings are invalid, or the backend lacks an op of it.
    pub fn new(
        vision: Vision,
        checkpoint: Arc<Checkpoint>,
        backend: Box<dyn Backend + Send>,
        max_features: usize,
    ) -> Result<Encoder, Error> {
        let processor = Processor::open(&checkpoint, &vision, max_features)?;
        let plan = backend.lower(vision.encoder.clone())?;
        Ok(Encoder { vision, processor, backend, checkpoint, plan, program: None, recent: VecDeque::new() })
    }

    /// What the model sees, and where.
    pub fn vision(&self) -> &Vision {
        &self.vision
    }

    /// Name of what computes.
    pub fn backend(&self) -> &'static str {
        self.backend.name()
    }

    /// How images become rows.
    pub fn processor(&self) -> &Processor {
        &self.processor
    }

    /// What the program takes at most, for the largest image.
    pub fn footprint(&self) -> Footprint {
        let n = self.processor.max_features() * self.n_merged();
        self.backend.footprint(&self.plan, limits(n, self.n_merged()))
    }

    fn n_merged(&self) -> usize {
        self.vision.patches.merge.pow(2)
    }

    /// The features of an image's file, which may be kept from the last time.
    ///
    /// # Errors
    /// As [`Image::decode`] and [`Encoder::encode`].
    pub fn see(&mut self, bytes: &[u8]) -> Result<Arc<Features>, Error> {
        let hash = decode::hash(bytes);
        let kept = self.recent.iter().position(|features| features.hash == hash);
        let features = match kept.and_then(|i| self.recent.remove(i)) {
            Some(features) => features,
            None => Arc::new(self.encode(&Image::decode(bytes)?)?),
        };
        self.recent.push_back(Arc::clone(&features));
        let size = |features: &Arc<Features>| 4 * features.rows.len();
        while self.recent.iter().map(size).sum::<usize>() > MAX_RECENT_BYTES && self.recent.len() > 1 {
            self.recent.pop_front();
        }
        Ok(features)
    }

    /// The features of an image.
    ///
    /// # Errors
    /// Its shape does not fit, memory for its size is not there, or the step fails.
    pub fn encode(&mut self, image: &Image) -> Result<Features, Error> {
        let Rows { rows, places, grid } = self.processor.rows(image)?;
        let (n, n_merged) = (places.len(), self.n_merged());
        if self.program.as_ref().is_none_or(|program| program.limits().max_tokens < n) {
            // Its memory comes first: two programs would not always fit.
            self.program = None;
            let limits = limits(n.max(LEAST_PATCHES).next_multiple_of(LEAST_PATCHES), n_merged);
            self.program = Some(self.backend.compile(&self.plan, Arc::clone(&self.checkpoint), limits)?);
        }
        let Some(program) = &mut self.program else { return Err(Error::NotFinite) };
        let pages: Vec<u32> = (0..n.div_ceil(PAGE) as u32).collect();
        let mut batch = Batch::default();
        let tables = Tables { pages: &pages, ..Tables::default() };
        batch.push(&vec![0; n], 0, tables, (0..n).step_by(n_merged));
        batch.given = GivenRows {
            rows,
            tokens: (0..n as u32).collect(),
            places: places.into_iter().map(|[row, col]| [0, row, col]).collect(),
            spans: std::iter::once(0..n as u32).collect(),
        };
        let rows = program.step(&batch)?.logits.to_vec();
        match rows.iter().all(|v| v.is_finite()) {
            true => Ok(Features { content: content(&rows, grid), rows, grid, hash: image.hash }),
            false => Err(Error::NotFinite),
        }
    }
}

fn content(rows: &[f32], grid: [usize; 2]) -> Hash {
    decode::hash_with(|hash| {
        grid.iter().for_each(|n| hash.update(&n.to_le_bytes()));
        for part in rows.chunks(1 << 12) {
            hash.update(&part.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        }
    })
}

/// Limits of a program for images of up to `n_patches`.
fn limits(n_patches: usize, n_merged: usize) -> Limits {
    Limits {
        max_tokens: n_patches,
        max_outputs: n_patches.div_ceil(n_merged),
        n_pages: n_patches.div_ceil(PAGE),
        max_positions: n_patches,
        n_window_pages: 0,
        n_states: 0,
        max_draft: 0,
    }
}
