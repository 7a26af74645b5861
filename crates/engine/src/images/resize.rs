//! Scaling as torchvision does it on bytes: bicubic, with antialiasing, one axis after the other, weights in 16-bit
//! fixed point (`UpSampleKernel.cpp` in PyTorch, after Pillow's `Resample.c`).

use super::Image;

/// Parameter of the cubic filter with antialiasing.
const A: f64 = -0.5;
/// Reach of the filter, in source pixels at scale 1.
const REACH: f64 = 2.0;

/// The weights of one output pixel over source pixels from `first` on.
struct Window {
    first: usize,
    weights: Vec<i16>,
}

/// Weights of an axis.
struct Axis {
    windows: Vec<Window>, // [n_out]
    /// Bits after the point.
    precision: u32,
}

/// Returns the pixels `[height, width, 3]` of the image at another size.
pub fn resize(image: &Image, width: usize, height: usize) -> Vec<u8> {
    let wide = match width == image.width {
        true => image.pixels.clone(),
        false => {
            let axis = Axis::new(image.width, width);
            let mut out = Vec::with_capacity(image.height * width * 3);
            for row in image.pixels.chunks_exact(image.width * 3) {
                for window in &axis.windows {
                    for c in 0..3 {
                        let pixels = row[window.first * 3..].iter().skip(c).step_by(3);
                        out.push(axis.sum(window, pixels.copied()));
                    }
                }
            }
            out
        }
    };
    if height == image.height {
        return wide;
    }
    let axis = Axis::new(image.height, height);
    let stride = width * 3;
    let mut out = Vec::with_capacity(height * stride);
    for window in &axis.windows {
        for i in 0..stride {
            let pixels = wide[window.first * stride..].iter().skip(i).step_by(stride);
            out.push(axis.sum(window, pixels.copied()));
        }
    }
    out
}

impl Axis {
    fn new(n_in: usize, n_out: usize) -> Axis {
        let scale = n_in as f64 / n_out as f64;
        let (reach, shrink) = if scale >= 1.0 { (REACH * scale, 1.0 / scale) } else { (REACH, 1.0) };
        let window = |i: usize| {
            let center = scale * (i as f64 + 0.5);
            // Truncated, not rounded down, as the original does.
            let first = ((center - reach + 0.5) as i64).max(0) as usize;
            let end = ((center + reach + 0.5) as i64).clamp(0, n_in as i64) as usize;
            let weights: Vec<f64> = (first..end).map(|j| cubic((j as f64 - center + 0.5) * shrink)).collect();
            let total: f64 = weights.iter().sum();
            let total = if total == 0.0 { 1.0 } else { total };
            (first, weights.into_iter().map(|w| w / total).collect::<Vec<_>>())
        };
        let windows: Vec<(usize, Vec<f64>)> = (0..n_out).map(window).collect();
        let most = windows.iter().flat_map(|(_, weights)| weights).copied().fold(0.0, f64::max);
        let fits = |precision: &u32| 0.5 + most * f64::from(1u32 << (precision + 1)) < f64::from(1 << 15);
        let precision = (0..22).take_while(fits).count() as u32;
        let fixed = |w: f64| (w * f64::from(1u32 << precision) + 0.5f64.copysign(w)) as i16;
        let windows = windows
            .into_iter()
            .map(|(first, weights)| Window { first, weights: weights.into_iter().map(fixed).collect() });
        Axis { windows: windows.collect(), precision }
    }

    fn sum(&self, window: &Window, pixels: impl Iterator<Item = u8>) -> u8 {
        let start = 1i32 << self.precision >> 1;
        let products = window.weights.iter().zip(pixels).map(|(&w, pixel)| i32::from(w) * i32::from(pixel));
        ((start + products.sum::<i32>()) >> self.precision).clamp(0, 255) as u8
    }
}

fn cubic(x: f64) -> f64 {
    let x = x.abs();
    match x {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One row of gray pixels.
    fn row(pixels: &[u8]) -> Image {
        let rgb = pixels.iter().flat_map(|&v| [v; 3]).collect();
        Image { width: pixels.len(), height: 1, pixels: rgb, hash: [0; 32] }
    }

    #[test]
    fn an_even_image_stays_even() {
        for (n, width) in [(1, 7), (7, 1), (5, 5), (13, 40), (40, 13)] {
            let out = resize(&row(&vec![77; n]), width, 3);
            assert_eq!(out, vec![77; 9 * width], "{n} to {width}");
        }
    }

    /// Four pixels become one: the filter at a quarter of the distances of their centers.
    #[test]
    fn weights_follow_the_filter() {
        let axis = Axis::new(4, 1);
        let exact: Vec<f64> = [-0.375, -0.125, 0.125, 0.375].map(cubic).to_vec();
        let total: f64 = exact.iter().sum();
        assert_eq!(axis.windows[0].first, 0);
        for (w, exact) in axis.windows[0].weights.iter().zip(exact) {
            let found = f64::from(*w) / f64::from(1u32 << axis.precision);
            assert!((found - exact / total).abs() < 1e-4, "{found} {exact}");
        }
    }
}
