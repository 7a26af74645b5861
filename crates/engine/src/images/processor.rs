//! Pixels to rows of patches, as the processors of the original code do it: the size, the scale of numbers, the order
//! of patches. Settings come from `preprocessor_config.json` of a folder, or from the keys of an encoder's GGUF file.

use std::array;

use checkpoint::Checkpoint;
use model::vision::{Patches, PixelOrder, Positions, Sizing, Vision};
use serde_json::{Map, Value};

use super::{Error, Image, resize};
use crate::folder;

/// Files of a folder that may hold the settings: of the image processor alone, or of all of them.
const FILES: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
/// Keys of an encoder's GGUF file.
const MEAN: &str = "clip.vision.image_mean";
const STD: &str = "clip.vision.image_std";
const MIN_PIXELS: &str = "clip.vision.image_min_pixels";
const MAX_PIXELS: &str = "clip.vision.image_max_pixels";
/// Longest side over the shorter one, of images with bounds on their area.
const MAX_ASPECT: usize = 200;

/// How images become rows of an encoder.
#[derive(Clone, Debug)]
pub struct Processor {
    patches: Patches,
    positions: Positions,
    sizing: Sizing,
    /// Factor on bytes.
    scale: f32,
    /// Mean and deviation of each channel, 0 and 1 where numbers are not normalized.
    channels: [[f32; 3]; 2],
    /// The same for bytes, where numbers are normalized.
    mean_std: Option<[[f32; 3]; 2]>,
    is_centered: bool,
    /// The rows of the table of positions.
    table: Vec<f32>,
}

/// The rows that an encoder is given for an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// `[n_patches, n_pixels + d_position]`.
    pub rows: Vec<f32>,
    /// Row and column of every patch, `[n_patches]`.
    pub places: Vec<[u32; 2]>,
    /// Rows and columns of features.
    pub grid: [usize; 2],
}

/// A file of settings.
struct Settings {
    file: String,
    values: Map<String, Value>,
}

impl Settings {
    fn open(checkpoint: &Checkpoint) -> Result<Settings, Error> {
        for name in FILES {
            let (file, mut values) = folder::values(checkpoint, name).map_err(|error| match error {
                folder::Error::Checkpoint(error) => Error::Checkpoint(error),
                folder::Error::File { file, what } => Error::Settings { file, what },
            })?;
            if let Some(Value::Object(inner)) = values.remove("image_processor") {
                values = inner;
            }
            if !values.is_empty() {
                return Ok(Settings { file, values });
            }
        }
        Ok(Settings { file: checkpoint.name().into(), values: Map::new() })
    }

    fn error(&self, key: &str, wanted: &str) -> Error {
        let found = self.values.get(key).map_or("absent".into(), Value::to_string);
        let found: String = checkpoint::visible(&found.chars().take(80).collect::<String>());
        Error::Settings { file: self.file.clone(), what: format!("{key} is {found}, expected {wanted}") }
    }

    /// A count from 1 to `max`, in one of two places.
    fn count(&self, section: &str, key: &str, max: usize) -> Result<Option<usize>, Error> {
        let inner =
            if section.is_empty() { Some(&self.values) } else { self.values.get(section).and_then(Value::as_object) };
        match inner.and_then(|values| values.get(key)).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n))
            {
                Some(n) => Ok(Some(n)),
                None => Err(self.error(if section.is_empty() { key } else { section }, &format!("1 to {max}"))),
            },
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.values.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    fn channels(&self, key: &str) -> Result<Option<[f32; 3]>, Error> {
        let Some(value) = self.values.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let numbers =
            value.as_array().map(|list| list.iter().map(|v| v.as_f64().map(|v| v as f32)).collect::<Option<Vec<_>>>());
        match numbers.flatten().as_deref() {
            Some(&[r, g, b]) if [r, g, b].iter().all(|v| v.is_finite()) => Ok(Some([r, g, b])),
            _ => Err(self.error(key, "three numbers")),
        }
    }
}

impl Processor {
    /// Reads the settings, in `checkpoint`, the encoder's own file or the model's folder. `max_features` of an image
    /// are computed at most, where the model allows more.
    ///
    /// # Errors
    /// Settings that are invalid or contradict the encoder.
    pub fn open(checkpoint: &Checkpoint, vision: &Vision, max_features: usize) -> Result<Processor, Error> {
        let settings = Settings::open(checkpoint)?;
        let Patches { side, merge, .. } = vision.patches;
        for (key, wanted) in [("patch_size", side), ("merge_size", merge), ("pooling_kernel_size", merge)] {
            if settings.count("", key, 1 << 16)?.is_some_and(|n| n != wanted) {
                return Err(settings.error(key, &format!("{wanted}, as the encoder has it")));
            }
        }
        let area = (side * merge).pow(2);
        let pixels = |key: &str| Some(checkpoint.meta().opt_u32(key).ok()?? as usize).filter(|&n| n > 0);
        let sizing = match vision.sizing {
            Sizing::Area { min, max } => {
                let count = |key: &str, old: &str| -> Result<Option<usize>, Error> {
                    Ok(settings.count("size", key, 1 << 40)?.or(settings.count("", old, 1 << 40)?))
                };
                let min = count("shortest_edge", "min_pixels")?.or(pixels(MIN_PIXELS)).unwrap_or(min);
                let max = count("longest_edge", "max_pixels")?.or(pixels(MAX_PIXELS)).unwrap_or(max);
                let max = max.min(max_features.saturating_mul(area));
                Sizing::Area { min: min.min(max), max }
            }
            Sizing::Features { max } => {
                let found = settings.count("", "max_soft_tokens", 1 << 20)?;
                let max = found.or(pixels(MAX_PIXELS).map(|pixels| (pixels / area).max(1))).unwrap_or(max);
                Sizing::Features { max: max.min(max_features) }
            }
        };
        if !settings.flag("do_resize", true)? || !settings.flag("do_rescale", true)? {
            return Err(settings.error("do_resize", "true, and do_rescale too"));
        }
        let scale = match settings.values.get("rescale_factor").and_then(Value::as_f64) {
            Some(scale) if scale > 0.0 && scale.is_finite() => scale,
            Some(_) => return Err(settings.error("rescale_factor", "more than 0")),
            None => 1.0 / 255.0,
        };
        let clip = |key: &str| -> Option<[f32; 3]> { checkpoint.meta().opt_f32s(key).ok()??.try_into().ok() };
        let [mean, std] = vision.mean_std;
        let mean = settings.channels("image_mean")?.or_else(|| clip(MEAN)).unwrap_or([mean; 3]);
        let std = settings.channels("image_std")?.or_else(|| clip(STD)).unwrap_or([std; 3]);
        if std.iter().any(|v| !(v.is_finite() && *v > 0.0)) || mean.iter().any(|v| !v.is_finite()) {
            return Err(settings.error("image_std", "numbers above 0"));
        }
        let is_plain = mean == [0.0; 3] && std == [1.0; 3];
        let is_normalized = settings.flag("do_normalize", !is_plain)? && !is_plain;
        let channels = if is_normalized { [mean, std] } else { [[0.0; 3], [1.0; 3]] };
        // The original scales these instead of the pixels, in f32.
        let stretch = (1.0 / scale) as f32;
        let mean_std = is_normalized.then(|| channels.map(|of| of.map(|v| v * stretch)));
        let (Positions::Interpolated { table, .. } | Positions::ByAxis { table, .. }) = &vision.positions;
        Ok(Processor {
            patches: vision.patches,
            positions: vision.positions.clone(),
            sizing,
            scale: scale as f32,
            channels,
            mean_std,
            is_centered: vision.is_centered,
            table: backend::weights::vector(checkpoint, table)?,
        })
    }

    /// Returns the keys that say in an encoder's GGUF file what the processor does.
    ///
    /// # Errors
    /// No key says it.
    pub fn keys(&self, checkpoint: &Checkpoint) -> Result<Vec<(String, checkpoint::Value)>, Error> {
        const SCALE: f32 = 1.0 / 255.0;
        if self.scale != SCALE {
            let what = format!("rescale_factor is {}, expected 1/255, the one of GGUF files", self.scale);
            return Err(Error::Settings { file: checkpoint.name().into(), what });
        }
        let area = (self.patches.side * self.patches.merge).pow(2);
        let (min, max) = match self.sizing {
            Sizing::Area { min, max } => (Some(min), max),
            Sizing::Features { max } => (None, max.saturating_mul(area)),
        };
        let pixels = |n: usize| checkpoint::Value::from(u32::try_from(n).unwrap_or(u32::MAX));
        let [mean, std] = self.channels.map(|of| checkpoint::Value::from(of.to_vec()));
        let mut keys = vec![(MEAN.into(), mean), (STD.into(), std), (MAX_PIXELS.into(), pixels(max))];
        keys.extend(min.map(|min| (MIN_PIXELS.into(), pixels(min))));
        Ok(keys)
    }

    /// Features of the largest image.
    pub fn max_features(&self) -> usize {
        let area = (self.patches.side * self.patches.merge).pow(2);
        match self.sizing {
            Sizing::Area { max, .. } => (max / area).max(1),
            Sizing::Features { max } => max,
        }
    }

    /// The rows of an image.
    ///
    /// # Errors
    /// Its shape cannot be brought to a size that the encoder takes.
    pub fn rows(&self, image: &Image) -> Result<Rows, Error> {
        let shape = |why: String| Error::Shape { width: image.width, height: image.height, why };
        let [height, width] = self.size(image.height, image.width).map_err(shape)?;
        let pixels = resize::resize(image, width, height);
        let Patches { side, merge, order, d_position } = self.patches;
        let [n_rows, n_cols] = [height / side, width / side];
        let (PixelOrder::Channels { n_frames } | PixelOrder::Pixels { n_frames }) = order;
        let n_patches = n_rows * n_cols;
        let numbers: [[f32; 256]; 3] = array::from_fn(|c| array::from_fn(|byte| self.number(byte as u8, c)));
        let mut rows = Vec::with_capacity(n_patches * (3 * n_frames * side * side + d_position));
        let mut places = Vec::with_capacity(n_patches);
        // The patches of a feature follow each other.
        for feature in 0..n_patches / (merge * merge) {
            let (above, left) = (feature / (n_cols / merge) * merge, feature % (n_cols / merge) * merge);
            for patch in 0..merge * merge {
                let (row, col) = (above + patch / merge, left + patch % merge);
                places.push([row as u32, col as u32]);
                let line = |y: usize| {
                    let from = &pixels[((row * side + y) * width + col * side) * 3..][..3 * side];
                    from.as_chunks::<3>().0.iter()
                };
                match order {
                    PixelOrder::Channels { .. } => {
                        for (c, numbers) in numbers.iter().enumerate() {
                            let first = rows.len();
                            for y in 0..side {
                                rows.extend(line(y).map(|pixel| numbers[usize::from(pixel[c])]));
                            }
                            (1..n_frames).for_each(|_| rows.extend_from_within(first..first + side * side));
                        }
                    }
                    PixelOrder::Pixels { .. } => {
                        let first = rows.len();
                        for y in 0..side {
                            let own =
                                |pixel: &[u8; 3]| array::from_fn::<_, 3, _>(|c| numbers[c][usize::from(pixel[c])]);
                            rows.extend(line(y).flat_map(own));
                        }
                        (1..n_frames).for_each(|_| rows.extend_from_within(first..first + 3 * side * side));
                    }
                }
                self.position([row, col], [n_rows, n_cols], &mut rows).map_err(shape)?;
            }
        }
        Ok(Rows { rows, places, grid: [n_rows / merge, n_cols / merge] })
    }

    /// The number of a byte.
    fn number(&self, byte: u8, channel: usize) -> f32 {
        let v = match self.mean_std {
            Some([mean, std]) => (f32::from(byte) - mean[channel]) / std[channel],
            None => f32::from(byte) * self.scale,
        };
        if self.is_centered { 2.0 * (v - 0.5) } else { v }
    }

    /// Appends the learned position of a patch.
    fn position(&self, [row, col]: [usize; 2], grid: [usize; 2], out: &mut Vec<f32>) -> Result<(), String> {
        let d = self.patches.d_position;
        let from_table = |i: usize| &self.table[i * d..][..d];
        match self.positions {
            Positions::Interpolated { side, .. } => {
                // The first patch is at the first row, the last at the last.
                let at = |i: usize, n: usize| {
                    let at = (i * (side - 1)) as f32 / (n.max(2) - 1) as f32;
                    let floor = (at as usize).min(side - 1);
                    (floor, (floor + 1).min(side - 1), at - floor as f32)
                };
                let ((y0, y1, dy), (x0, x1, dx)) = (at(row, grid[0]), at(col, grid[1]));
                let corners = [
                    (y0 * side + x0, (1.0 - dy) * (1.0 - dx)),
                    (y0 * side + x1, (1.0 - dy) * dx),
                    (y1 * side + x0, dy * (1.0 - dx)),
                    (y1 * side + x1, dy * dx),
                ];
                let first = out.len();
                out.resize(first + d, 0.0);
                for (i, share) in corners {
                    out[first..].iter_mut().zip(from_table(i)).for_each(|(sum, x)| *sum += x * share);
                }
            }
            Positions::ByAxis { n, .. } => {
                if row >= n || col >= n {
                    return Err(format!(
                        "its patches have more than {n} rows or columns, which the encoder has positions for"
                    ));
                }
                out.extend(from_table(col).iter().zip(from_table(n + row)).map(|(x, y)| x + y));
            }
        }
        Ok(())
    }

    /// Height and width that an image is scaled to.
    fn size(&self, height: usize, width: usize) -> Result<[usize; 2], String> {
        let Patches { side, merge, .. } = self.patches;
        let factor = side * merge;
        let (h, w, f) = (height as f64, width as f64, factor as f64);
        match self.sizing {
            Sizing::Area { min, max } => {
                if height.max(width) > MAX_ASPECT * height.min(width) {
                    return Err(format!("one side is more than {MAX_ASPECT} times as long as the other"));
                }
                Ok(fit_area([h, w], factor, [min, max]))
            }
            // get_aspect_ratio_preserving_size of transformers' Gemma4ImageProcessor.
            Sizing::Features { max } => {
                let target = (max * merge * merge * side * side) as f64;
                let stretch = (target / (h * w)).sqrt();
                let [mut th, mut tw] = [h, w].map(|v| (stretch * v / f).floor() as usize * factor);
                let longest = max * factor;
                match (th, tw) {
                    (0, 0) => return Err("it would have no pixels".into()),
                    (0, _) => (th, tw) = (factor, ((w / h).floor() as usize * factor).min(longest)),
                    (_, 0) => (th, tw) = (((h / w).floor() as usize * factor).min(longest), factor),
                    _ => {}
                }
                match (th * tw) as f64 > target {
                    true => Err(format!("at {tw} by {th} pixels it has more than {max} features")),
                    false => Ok([th, tw]),
                }
            }
        }
    }
}

/// Height and width in multiples of `factor`, of an area within bounds where these leave that: smart_resize of
/// transformers' Qwen2VLImageProcessor. That exceeds a small bound with thin images, whose short side it does not let
/// go below `factor`; here their long side is cut.
fn fit_area([h, w]: [f64; 2], factor: usize, [min, max]: [usize; 2]) -> [usize; 2] {
    let f = factor as f64;
    let size = [h, w].map(|v| (v / f).round_ties_even() as usize * factor);
    let area = size[0] * size[1];
    if area > max {
        let beta = (h * w / max as f64).sqrt();
        let size = [h, w].map(|v| ((v / beta / f).floor() as usize * factor).max(factor));
        let longest = (max / size[0].min(size[1]) / factor).max(1) * factor;
        size.map(|side| side.min(longest))
    } else if area < min {
        let beta = (min as f64 / (h * w)).sqrt();
        [h, w].map(|v| (v * beta / f).ceil() as usize * factor)
    } else {
        size
    }
}

#[cfg(test)]
mod tests {
    use super::fit_area;

    /// Bounds hold for thin images too, and sizes of others are those of the original code.
    #[test]
    fn areas_stay_within_bounds() {
        let max = 64 * 32 * 32;
        assert_eq!(fit_area([480.0, 640.0], 32, [1024, 1 << 24]), [480, 640]);
        assert_eq!(fit_area([1080.0, 1920.0], 32, [1024, max]), [192, 320]);
        assert_eq!(fit_area([10.0, 10.0], 32, [64 * 32 * 32, 1 << 24]), [256, 256]);
        for [h, w] in [[20.0, 4000.0], [4000.0, 20.0], [32.0, 6400.0], [3000.0, 3000.0], [31.0, 33.0]] {
            for tokens in [1, 2, 7, 64, 199] {
                let [height, width] = fit_area([h, w], 32, [0, tokens * 32 * 32]);
                assert!(height * width <= tokens * 32 * 32 && height > 0 && width > 0, "{h} by {w}, {tokens}");
            }
        }
    }
}
