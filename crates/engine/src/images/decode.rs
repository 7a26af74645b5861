//! Files of images to pixels: the formats that people send, with limits that are checked before memory is taken.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, Rgba, RgbaImage};
use ring::digest;

use super::Error;

/// Maximum number of pixels of an image that is decoded.
pub const MAX_PIXELS: u64 = 1 << 26;
/// Longest side of one, in pixels.
const MAX_SIDE: u32 = 1 << 16;
/// Memory that a decoder may take besides the pixels, in bytes.
const MAX_MEMORY: u64 = 512 << 20;

/// Formats that are decoded.
const FORMATS: [ImageFormat; 4] = [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif];

/// The pixels of an image.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `[height, width, 3]`: red, green, blue.
    pub pixels: Vec<u8>,
    /// Hash of the file, which keys caches.
    pub hash: Hash,
}

impl Image {
    /// Decodes a PNG, JPEG, WebP or GIF file, of films the first frame, upright as its EXIF says. What is
    /// transparent shows white, as in the processors of models.
    ///
    /// # Errors
    /// The bytes are something else, broken, or more than [`MAX_PIXELS`]: these are not decoded.
    pub fn decode(bytes: &[u8]) -> Result<Image, Error> {
        let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
        let mut reader = reader.map_err(|error| Error::Decode(error.to_string()))?;
        match reader.format() {
            Some(format) if FORMATS.contains(&format) => {}
            _ => return Err(Error::Decode("it is no PNG, JPEG, WebP or GIF file".into())),
        }
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
        limits.max_alloc = Some(MAX_MEMORY);
        reader.limits(limits);
        let failed = |error: image::ImageError| Error::Decode(error.to_string());
        let mut decoder = reader.into_decoder().map_err(failed)?;
        let (width, height) = decoder.dimensions();
        let n_pixels = u64::from(width) * u64::from(height);
        if n_pixels == 0 || n_pixels > MAX_PIXELS {
            let what = format!("it has {width} by {height} pixels, 1 to {MAX_PIXELS} are allowed");
            return Err(Error::Decode(what));
        }
        let orientation = decoder.orientation().map_err(failed)?;
        let mut image = DynamicImage::from_decoder(decoder).map_err(failed)?;
        image.apply_orientation(orientation);
        let (width, height) = (image.width() as usize, image.height() as usize);
        let pixels = match image.color().has_alpha() {
            true => on_white(&image.into_rgba8()),
            false => image.into_rgb8().into_raw(),
        };
        Ok(Image { width, height, pixels, hash: hash(bytes) })
    }
}

/// Pixels over white, in the f32 of torchvision's processors (`convert_to_rgb` in transformers).
fn on_white(image: &RgbaImage) -> Vec<u8> {
    let blend = |v: u8, alpha: u8| {
        let (v, alpha) = (f32::from(v) / 255.0, f32::from(alpha) / 255.0);
        ((v * alpha + (1.0 - alpha)) * 255.0).round_ties_even() as u8
    };
    image.pixels().flat_map(|&Rgba([r, g, b, alpha])| [r, g, b].map(|v| blend(v, alpha))).collect()
}

/// SHA-256 of a file.
pub type Hash = [u8; 32];

/// Returns the hash of an image's file.
pub(super) fn hash(bytes: &[u8]) -> Hash {
    hash_with(|hash| hash.update(bytes))
}

/// Returns the hash of what `fill` adds.
pub(super) fn hash_with(fill: impl FnOnce(&mut digest::Context)) -> Hash {
    let mut context = digest::Context::new(&digest::SHA256);
    fill(&mut context);
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

#[cfg(test)]
mod tests {
    use image::codecs::jpeg::JpegEncoder;
    use image::{ImageEncoder, Rgb, RgbImage};

    use super::*;

    /// Two pixels wide and three high, the first one red.
    fn small() -> RgbImage {
        let mut image = RgbImage::from_pixel(2, 3, Rgb([10, 20, 30]));
        image.put_pixel(0, 0, Rgb([200, 0, 0]));
        image
    }

    fn file(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).unwrap();
        bytes.into_inner()
    }

    #[test]
    fn every_format_is_decoded() {
        for format in [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Jpeg] {
            let image = Image::decode(&file(&small().into(), format)).unwrap();
            assert_eq!((image.width, image.height, image.pixels.len()), (2, 3, 18), "{format:?}");
            if format != ImageFormat::Jpeg {
                assert_eq!(image.pixels[..6], [200, 0, 0, 10, 20, 30], "{format:?}");
            }
        }
    }

    #[test]
    fn transparency_shows_white() {
        for (alpha, shown) in [(0, [255; 3]), (255, [1, 2, 3]), (51, [204, 204, 205])] {
            let image = RgbaImage::from_pixel(1, 1, Rgba([1, 2, 3, alpha]));
            assert_eq!(Image::decode(&file(&image.into(), ImageFormat::Png)).unwrap().pixels, shown, "{alpha}");
        }
    }

    /// Orientation 6: the file is to be turned by a quarter.
    #[test]
    fn exif_turns_images() {
        let exif = [b"MM\0*\0\0\0\x08\0\x01".as_slice(), &[0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, 6, 0, 0], &[0; 4]].concat();
        let mut bytes = Vec::new();
        let mut encoder = JpegEncoder::new(&mut bytes);
        encoder.set_exif_metadata(exif).unwrap();
        encoder.write_image(&small(), 2, 3, image::ExtendedColorType::Rgb8).unwrap();
        let image = Image::decode(&bytes).unwrap();
        assert_eq!((image.width, image.height), (3, 2));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let png = file(&small().into(), ImageFormat::Png);
        // A header that says 60,000 by 60,000 pixels, with its checksum.
        let mut bomb = png[..16].to_vec();
        bomb.extend([0, 0, 0xea, 0x60, 0, 0, 0xea, 0x60, 8, 2, 0, 0, 0]);
        let crc = bomb[12..].iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
        });
        bomb.extend((!crc).to_be_bytes());
        bomb.extend(&png[33..]);
        let cases: [(&[u8], &str); 4] = [
            (b"", "no PNG"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG"),
            (b"BM\0\0\0\0\0\0\0\0\0\0\0\0", "no PNG"),
            (&bomb, "60000 by 60000"),
        ];
        for (bytes, why) in cases {
            let error = Image::decode(bytes).err().expect("no image").to_string();
            assert!(error.contains(why), "{error}");
        }
        // Cut anywhere, a file is an error or an image, and no panic.
        for format in [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Jpeg] {
            let whole = file(&small().into(), format);
            assert!(Image::decode(&whole[..whole.len() / 2]).is_err(), "{format:?}");
            (0..whole.len()).for_each(|n| drop(Image::decode(&whole[..n])));
            for i in 0..whole.len() {
                let mut changed = whole.clone();
                changed[i] ^= 0x55;
                drop(Image::decode(&changed));
            }
        }
    }
}
