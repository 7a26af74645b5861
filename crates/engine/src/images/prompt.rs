//! Images in a prompt: which tokens are theirs, and what a step is told of them.

use std::ops::Range;
use std::sync::Arc;

use backend::GivenRows;
use model::vision::{Places, Vision};

use super::decode::hash_with;
use super::{Error, Features};

/// Bit of tokens that stand for features in a sequence: beyond every vocabulary.
const MARK: u32 = 1 << 31;

/// An image in a prompt.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Index of its first token.
    pub first: usize,
    /// Its features, one a token.
    pub features: Arc<Features>,
}

/// The images of a prompt.
#[derive(Clone, Debug)]
pub struct Pictures {
    /// In order, apart.
    images: Vec<Placed>,
    d_features: usize,
    places: Places,
    sees_image: bool,
    /// The token that a step has in place of a feature's.
    filler: u32,
}

impl Pictures {
    /// Places images in the tokens of a prompt, where each run of as many of the model's feature tokens as an image has
    /// features stands for the next image.
    ///
    /// # Errors
    /// There are more runs or fewer than images, or of another length.
    pub fn place(vision: &Vision, feature: u32, tokens: &[u32], images: Vec<Arc<Features>>) -> Result<Pictures, Error> {
        let wrong = |why: String| Err(Error::Prompt(why));
        let (mut placed, mut at) = (Vec::with_capacity(images.len()), 0);
        for (i, features) in images.into_iter().enumerate() {
            let n = features.len();
            let Some(start) = tokens[at..].iter().position(|&token| token == feature) else {
                return wrong(format!("the prompt has no place for image {}", i + 1));
            };
            let first = at + start;
            if tokens.get(first..first + n).is_none_or(|run| run.iter().any(|&token| token != feature)) {
                return wrong(format!("image {} has {n} features, its place in the prompt another number", i + 1));
            }
            if features.rows.len() != n * vision.d_features() {
                return wrong(format!("image {} has features of another model", i + 1));
            }
            at = first + n;
            placed.push(Placed { first, features });
        }
        if tokens[at..].contains(&feature) {
            return wrong(format!("the prompt has more places for images than the {} given", placed.len()));
        }
        Ok(Pictures::at(vision, feature, placed))
    }

    /// Images at known places, in order and apart.
    pub fn at(vision: &Vision, feature: u32, images: Vec<Placed>) -> Pictures {
        Pictures {
            images,
            d_features: vision.d_features(),
            places: vision.places,
            sees_image: vision.sees_image,
            filler: vision.tokens.filler.unwrap_or(feature),
        }
    }

    /// The images.
    pub fn images(&self) -> &[Placed] {
        &self.images
    }

    /// Width of their rows.
    pub fn d_features(&self) -> usize {
        self.d_features
    }

    /// Replaces the tokens of features by such that tell one image from another: cached prefixes are found by tokens.
    /// With a secret no image can be made that passes for another.
    pub fn mark(&self, tokens: &mut [u32], secret: &[u8; 32]) {
        for Placed { first, features } in &self.images {
            let n = features.len();
            for (i, token) in tokens[*first..first + n].iter_mut().enumerate() {
                let hash = hash_with(|hash| {
                    [secret, &features.content].into_iter().for_each(|part| hash.update(part));
                    hash.update(&i.to_le_bytes());
                });
                *token = MARK | u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
            }
        }
    }

    /// The longest chunk of at most `want` tokens from position `start` that does not end inside an image whose tokens
    /// see each other; the whole image where it begins with one.
    pub fn whole(&self, start: usize, want: usize) -> usize {
        let end = start + want;
        let cut = self.spans().find(|span| span.start < end && end < span.end && span.end > start);
        match cut {
            None => want,
            Some(span) if span.start > start => span.start - start,
            Some(span) => span.end - start,
        }
    }

    /// Tokens of the longest image that a step has to hold whole; 0 without such.
    pub fn longest_whole(&self) -> usize {
        self.spans().map(|span| span.len()).max().unwrap_or(0)
    }

    fn spans(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let images = self.images.iter().filter(|_| self.sees_image);
        images.map(|image| image.first..image.first + image.features.len())
    }

    /// Puts a token of the vocabulary in the place of each feature's, in tokens from a position on.
    pub fn hide(&self, position: usize, tokens: &mut [u32]) {
        for Placed { first, features } in &self.images {
            let from = first.saturating_sub(position).min(tokens.len());
            let to = (first + features.len()).saturating_sub(position).min(tokens.len());
            tokens[from..to].fill(self.filler);
        }
    }

    /// Appends to `given` what the chunk at `positions`, whose first token is token `first` of the step, has of images,
    /// and puts a token of the vocabulary in the place of each feature's.
    pub fn fill(&self, positions: Range<usize>, first: usize, tokens: &mut [u32], given: &mut GivenRows) {
        let at = |position: usize| (first + position - positions.start) as u32;
        self.hide(positions.start, &mut tokens[..positions.len()]);
        for Placed { first, features } in &self.images {
            let span = first.max(&positions.start).to_owned()..(first + features.len()).min(positions.end);
            if span.is_empty() {
                continue;
            }
            let d = self.d_features;
            given.rows.extend_from_slice(&features.rows[(span.start - first) * d..(span.end - first) * d]);
            given.tokens.extend(span.clone().map(at));
            if self.sees_image {
                given.spans.push(at(span.start)..at(span.end));
            }
        }
    }

    /// The place of a position in rotary embeddings.
    pub fn place_of(&self, position: usize) -> [u32; 3] {
        let text = |shift: usize| [(position - shift) as u32; 3];
        if self.places == Places::Line {
            return text(0);
        }
        let mut shift = 0;
        for Placed { first, features } in &self.images {
            let ([n_rows, n_cols], n) = (features.grid, features.len());
            if position < *first {
                break;
            }
            if position < first + n {
                let (i, origin) = (position - first, first - shift);
                return [origin, origin + i / n_cols, origin + i % n_cols].map(|place| place as u32);
            }
            shift += n - n_rows.max(n_cols);
        }
        text(shift)
    }
}
