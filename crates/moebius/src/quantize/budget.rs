//! The mix for a size: bits go where they save most error.
//!
//! What a type costs a matrix is measured: some of its pieces are encoded, and the error is that of its products,
//! squared and relative to them, as far as the importance of the columns tells. What a matrix adds to the stream is one
//! layer's share of it; logits are all that one matrix makes, and its error counts as often as there are layers. The
//! sum over all matrices is made small greedily: all start with the smallest type, and the step up that saves most
//! error for each byte goes first, as long as it fits.

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use quant::WeightType;

use super::mix::{self, FileType};
use super::{Job, Loss, PIECE, Room, Target, parallel};
use crate::machine;

/// The types to choose from.
const LADDER: [WeightType; 7] = [
    WeightType::Q2_K,
    WeightType::Q3_K,
    WeightType::IQ4_XS,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
    WeightType::Q8_0,
];
/// Those that are chosen from too where it is known which columns matter: so few bits want that.
const BY_IMPORTANCE: [WeightType; 4] = [WeightType::IQ2_XXS, WeightType::IQ2_S, WeightType::IQ3_XXS, WeightType::IQ3_S];
/// Pieces of a tensor that are encoded to measure a type.
const SAMPLES: usize = 6;

/// What a type costs a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    dtype: WeightType,
    bytes: usize,
    /// Squared error of the products over their squares, as often as it counts.
    error: f64,
}

/// What the types cost each tensor that may have any of them.
#[derive(Debug)]
pub struct Ladders {
    /// The tensors.
    free: Vec<usize>,
    /// Of each the types worth having, smallest first.
    costs: Vec<Vec<Cost>>,
}

impl Ladders {
    /// Measures all tensors of a job but those in `fixed`, which keep their types.
    ///
    /// # Errors
    /// A tensor cannot be read or encoded.
    pub fn measure(job: &Job, fixed: &[bool], bar: &ProgressBar) -> Result<Ladders> {
        let free: Vec<usize> = (0..job.targets.len()).filter(|&i| !fixed[i]).collect();
        bar.set_length(free.len() as u64);
        let mut ladders = Vec::new();
        for &i in &free {
            ladders.push(hull(costs(job, i)?));
            bar.inc(1);
        }
        Ok(Ladders { free, costs: ladders })
    }

    /// Takes the smallest types; bytes of the file.
    ///
    /// # Errors
    /// See [`Job::file_bytes`].
    pub fn least(&self, job: &mut Job) -> Result<usize> {
        for (&i, ladder) in self.free.iter().zip(&self.costs) {
            job.targets[i].dtype = ladder[0].dtype;
        }
        job.file_bytes()
    }

    /// Chooses the types of the job's targets so that its file has at most `max_bytes`.
    ///
    /// # Errors
    /// Not even the smallest types fit.
    pub fn fit(&self, job: &mut Job, max_bytes: usize) -> Result<()> {
        let least = self.least(job)?;
        ensure!(
            least <= max_bytes,
            "fit the file into {}: the smallest types take {}",
            machine::bytes(max_bytes as u64),
            machine::bytes(least as u64)
        );
        for (at, &step) in climb(&self.costs, max_bytes - least).iter().enumerate() {
            job.targets[self.free[at]].dtype = self.costs[at][step].dtype;
        }
        Ok(())
    }
}

/// Returns the costs of all types of the ladder for tensor `i`, fewest bytes first.
fn costs(job: &Job, i: usize) -> Result<Vec<Cost>> {
    let tensor = &job.source.tensors()[i];
    let small: &[WeightType] = if job.targets[i].importance.is_some() { &BY_IMPORTANCE } else { &[] };
    let mut types: Vec<WeightType> = Vec::new();
    for dtype in small.iter().chain(&LADDER).map(|&t| mix::fitting(t, tensor.n_cols())) {
        if !types.contains(&dtype) {
            types.push(dtype);
        }
    }
    let n_pieces = tensor.len().div_ceil(PIECE);
    let n = n_pieces.min(SAMPLES);
    let pieces: Vec<usize> = (0..n).map(|s| (2 * s + 1) * n_pieces / (2 * n)).collect();
    let mut losses = vec![Loss::default(); types.len()];
    let work = |at: usize, room: &mut Room| {
        let target = Target { dtype: types[at / n], ..job.targets[i].clone() };
        Ok(job.encode_piece(i, &target, pieces[at % n], &[], room)?.1)
    };
    parallel::in_order(job.threads, types.len() * n, work, |at, loss| {
        losses[at / n].add(loss);
        Ok(())
    })?;
    let names = || job.source.tensors().iter().map(|t| t.name.as_str());
    let counts = if mix::makes_logits(&tensor.name, names()) { mix::n_layer(names()) as f64 } else { 1.0 };
    let cost = |(&dtype, loss): (&WeightType, &Loss)| {
        tensor.bytes_as(dtype).map(|bytes| Cost { dtype, bytes, error: counts * loss.relative().powi(2) })
    };
    let mut costs: Vec<Cost> = types.iter().zip(&losses).filter_map(cost).collect();
    costs.sort_by_key(|cost| cost.bytes);
    Ok(costs)
}

/// Returns the costs that no other is better than, and whose steps save less and less error for a byte.
fn hull(costs: Vec<Cost>) -> Vec<Cost> {
    let mut hull: Vec<Cost> = Vec::new();
    for cost in costs {
        if hull.last().is_some_and(|last| cost.error >= last.error || cost.bytes == last.bytes) {
            // More bytes for nothing, or the same for less error.
            match hull.last_mut() {
                Some(last) if cost.bytes == last.bytes && cost.error < last.error => *last = cost,
                _ => continue,
            }
        } else {
            hull.push(cost);
        }
        while let [.., a, b, c] = hull[..]
            && rate(&a, &b) <= rate(&b, &c)
        {
            hull.remove(hull.len() - 2);
        }
    }
    hull
}

/// Error that a step saves for each byte.
fn rate(from: &Cost, to: &Cost) -> f64 {
    (from.error - to.error) / (to.bytes - from.bytes) as f64
}

/// Returns the step of each ladder, reached with at most `room` more bytes than the first steps take.
fn climb(ladders: &[Vec<Cost>], mut room: usize) -> Vec<usize> {
    let mut steps = vec![0; ladders.len()];
    let mut is_done = vec![false; ladders.len()];
    loop {
        let rate_of = |i: usize| Some(rate(&ladders[i][steps[i]], ladders[i].get(steps[i] + 1)?));
        let open = (0..ladders.len()).filter(|&i| !is_done[i]).filter_map(|i| Some((i, rate_of(i)?)));
        // The first of equals.
        let Some((i, _)) = open.reduce(|a, b| if b.1 > a.1 { b } else { a }) else { return steps };
        let bytes = ladders[i][steps[i] + 1].bytes - ladders[i][steps[i]].bytes;
        if bytes <= room {
            steps[i] += 1;
            room -= bytes;
        } else {
            is_done[i] = true;
        }
    }
}

/// Returns the kind that a file of mixed types is said to be: the one of the type that most bytes are in.
pub fn file_type(job: &Job) -> &'static FileType {
    const USUAL: [&str; 11] =
        ["IQ2_XXS", "IQ2_M", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"];
    let bytes = |file: &FileType| -> usize {
        let of = |(tensor, target): (&super::Tensor, &Target)| match target.dtype == file.base {
            true => tensor.bytes_as(target.dtype).unwrap_or(0),
            false => 0,
        };
        job.source.tensors().iter().zip(&job.targets).map(of).sum()
    };
    let usual = mix::FILE_TYPES.iter().filter(|file| USUAL.contains(&file.name));
    usual.max_by_key(|file| bytes(file)).unwrap_or(&mix::FILE_TYPES[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(bytes: usize, error: f64) -> Cost {
        Cost { dtype: WeightType::Q8_0, bytes, error }
    }

    #[test]
    fn ladders_are_convex() {
        let costs =
            [(10, 9.0), (12, 8.9), (14, 4.0), (14, 3.5), (16, 3.6), (20, 3.0), (30, 0.0)].map(|(b, e)| cost(b, e));
        let found: Vec<_> = hull(costs.to_vec()).iter().map(|c| (c.bytes, c.error)).collect();
        assert_eq!(found, [(10, 9.0), (14, 3.5), (30, 0.0)]);
    }

    #[test]
    fn bytes_go_where_they_save_most_and_never_past_the_room() {
        let ladders = [
            vec![cost(10, 10.0), cost(20, 1.0), cost(40, 0.0)],
            vec![cost(100, 10.0), cost(200, 0.0)],
            vec![cost(1, 1.0)],
        ];
        for (room, steps) in
            [(0, [0, 0, 0]), (9, [0, 0, 0]), (10, [1, 0, 0]), (30, [2, 0, 0]), (110, [1, 1, 0]), (500, [2, 1, 0])]
        {
            assert_eq!(climb(&ladders, room), steps, "{room}");
        }
    }
}
