//! Importance of columns: mean squares of the activations that each matrix is multiplied with, in llama.cpp's files.
//!
//! Two forms are read, and the newer is written.
//! * GGUF with `general.type` `imatrix`: for each matrix `NAME.in_sum2`, f32 `[n_mat, n]`, sums of squares of every
//!   column, and `NAME.counts`, f32 `[n_mat, 1]`, tokens that were summed; a plain matrix has `n_mat` 1, a stack one
//!   row for each expert. `imatrix.datasets`, `imatrix.chunk_count` and `imatrix.chunk_size` say of what. Ours have
//!   besides, where experts were forced, `NAME.forced`, f32 `[n_mat, 1]`, those of the counted tokens that no router
//!   sent there, and `moebius.imatrix.forced_chunk_count`. Programs that do not know them pass them over.
//! * the older `.dat`: a count of entries; for each the name's length and bytes, the number of calls, the number of
//!   values and the values, mean squares times calls; then the number of chunks and the text's name. All integers are
//!   i32, little endian.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use quant::WeightType;

use crate::input;

/// Longest `.dat` file that is read: more than the matrices of the largest models have columns for.
const MAX_BYTES: u64 = 4 << 30;
/// Tokens' worth of weight that the mean over all experts has in an expert's own: it decides where an expert was seen
/// rarely or never.
const PRIOR_TOKENS: f64 = 16.0;

/// Sums for one matrix or stack.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// Sums of squares of each column, `[n_mat, n]`.
    pub squares: Vec<f32>,
    /// Tokens that were summed, `[n_mat]`.
    pub counts: Vec<f32>,
    /// Those of them that were forced, `[n_mat]`; empty where the file says nothing of it.
    pub forced: Vec<f32>,
}

impl Sums {
    /// Returns whether no router chose matrix `i`: all its tokens, if it has any, were forced.
    pub fn is_unreached(&self, i: usize) -> bool {
        self.counts[i] == self.forced.get(i).copied().unwrap_or(0.0)
    }
}

/// What a file of importances says.
#[derive(Clone, Debug, Default)]
pub struct Importance {
    pub file: String,
    pub datasets: Vec<String>,
    pub n_chunks: u32,
    entries: HashMap<String, Sums>,
}

impl Importance {
    /// Reads a file of either form.
    ///
    /// # Errors
    /// It cannot be read, contradicts itself, or holds numbers that are negative or not finite.
    pub fn read(path: &Path) -> Result<Importance> {
        let mut magic = [0; 4];
        let opened = std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
        opened.with_context(|| format!("failed to read {}", path.display()))?;
        let mut read = if &magic == b"GGUF" { Self::read_gguf(path)? } else { Self::read_dat(path)? };
        read.file = path.display().to_string();
        for (name, sums) in &read.entries {
            let is_bad = |v: &&f32| !v.is_finite() || **v < 0.0;
            if let Some(v) = sums.squares.iter().chain(&sums.counts).chain(&sums.forced).find(is_bad) {
                bail!("failed to read {}: {name} has {v} among its sums, expected 0 or more", read.file);
            }
        }
        ensure!(!read.entries.is_empty(), "failed to read {}: it holds no importances", read.file);
        Ok(read)
    }

    fn read_gguf(path: &Path) -> Result<Importance> {
        let file = checkpoint::open_with(path, checkpoint::Open { map: false, ..Default::default() })?;
        let meta = file.meta();
        let kind = meta.opt_str("general.type")?.unwrap_or("model");
        ensure!(kind == "imatrix", "failed to read {}: general.type is {kind}, expected imatrix", path.display());
        let numbers = |name: &str| -> Result<Vec<f32>> {
            let info =
                file.find(name)?.with_context(|| format!("failed to read {}: {name} is missing", path.display()))?;
            ensure!(
                info.dtype == WeightType::F32,
                "failed to read {}: {name} is {}, expected f32",
                path.display(),
                info.dtype
            );
            let mut bytes = vec![0; info.len];
            file.read(&info.extents(), &mut bytes)?;
            Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        };
        let mut entries = HashMap::new();
        for info in file.tensors() {
            let Some(name) = info.name.strip_suffix(".in_sum2") else { continue };
            let forced = format!("{name}.forced");
            let sums = Sums {
                squares: numbers(&info.name)?,
                counts: numbers(&format!("{name}.counts"))?,
                forced: if file.find(&forced)?.is_some() { numbers(&forced)? } else { Vec::new() },
            };
            let (n, n_mat) = (sums.squares.len(), sums.counts.len());
            ensure!(
                n.is_multiple_of(n_mat),
                "failed to read {}: {name} has {n} sums and {n_mat} counts",
                path.display()
            );
            let fits = sums.forced.is_empty()
                || sums.forced.len() == n_mat && sums.forced.iter().zip(&sums.counts).all(|(forced, n)| forced <= n);
            ensure!(fits, "failed to read {}: {forced} does not fit the {n_mat} counts", path.display());
            entries.insert(name.to_string(), sums);
        }
        let datasets = meta.opt_strings("imatrix.datasets")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Importance {
            file: String::new(),
            datasets: datasets.map(|list| list.iter().map(text).collect()).unwrap_or_default(),
            n_chunks: meta.opt_u32("imatrix.chunk_count")?.unwrap_or(0),
            entries,
        })
    }

    fn read_dat(path: &Path) -> Result<Importance> {
        let size = std::fs::metadata(path).map_or(0, |meta| meta.len());
        ensure!(size <= MAX_BYTES, "failed to read {}: {size} bytes are no file of importances", path.display());
        let bytes = input::bytes(path)?;
        let broken = || format!("failed to read {}: it ends early, or is no file of importances", path.display());
        let mut rest = bytes.as_slice();
        let mut take = |n: usize| -> Result<&[u8]> {
            let (head, tail) = rest.split_at_checked(n).with_context(broken)?;
            rest = tail;
            Ok(head)
        };
        let int = |bytes: &[u8]| i32::from_le_bytes(bytes.as_chunks().0[0]);
        let n_entries = int(take(4)?);
        let mut entries = HashMap::new();
        for _ in 0..n_entries {
            let len = usize::try_from(int(take(4)?)).ok().with_context(broken)?;
            let name = String::from_utf8(take(len)?.to_vec()).ok().with_context(broken)?;
            let n_calls = int(take(4)?).max(1) as f32;
            let n = usize::try_from(int(take(4)?)).ok().and_then(|n| n.checked_mul(4)).with_context(broken)?;
            let squares = take(n)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            // How many experts there are does not stand here: whoever looks the entry up knows.
            entries.insert(name, Sums { squares, counts: vec![n_calls], forced: Vec::new() });
        }
        // Older files end here.
        let n_chunks = take(4).map_or(0, |bytes| int(bytes).max(0) as u32);
        let dataset = take(4).and_then(|bytes| Ok(take(int(bytes).max(0) as usize)?.to_vec())).unwrap_or_default();
        let dataset = String::from_utf8_lossy(&dataset).into_owned();
        let datasets = if dataset.is_empty() { Vec::new() } else { vec![dataset] };
        Ok(Importance { file: String::new(), datasets, n_chunks, entries })
    }

    /// Number of matrices and stacks.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Mean square of each column of a matrix, `[n_mat, n_cols]`, for a tensor of this shape, slowest axis first;
    /// `None` where the file says nothing of it. An expert that was seen rarely is drawn towards the mean over all
    /// experts that were chosen; one that was never seen has that mean.
    ///
    /// # Errors
    /// The file's numbers are not as many.
    pub fn of(&self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        let Some(sums) = self.entries.get(name) else { return Ok(None) };
        let (n_mat, n_cols) =
            (shape[..shape.len().saturating_sub(2)].iter().product::<usize>(), shape[shape.len() - 1]);
        let n = n_mat.checked_mul(n_cols).unwrap_or(0);
        let fits = sums.squares.len() == n && (sums.counts.len() == n_mat || sums.counts.len() == 1);
        ensure!(
            fits,
            "failed to read {}: {name} has {} sums, expected {n_mat} x {n_cols}",
            self.file,
            sums.squares.len()
        );
        let count = |i: usize| f64::from(if sums.counts.len() == 1 { sums.counts[0] } else { sums.counts[i] });
        // Tokens that were forced say what their own expert makes of them, not what the layer sees.
        let chosen: Vec<usize> = (0..n_mat).filter(|&i| sums.counts.len() == 1 || !sums.is_unreached(i)).collect();
        let total: f64 = chosen.iter().map(|&i| count(i)).sum();
        if total == 0.0 {
            return Ok(None);
        }
        let sum = |i: usize, c: usize| f64::from(sums.squares[i * n_cols + c]);
        let mean: Vec<f64> = (0..n_cols).map(|c| chosen.iter().map(|&i| sum(i, c)).sum::<f64>() / total).collect();
        let prior = if n_mat > 1 { PRIOR_TOKENS } else { 0.0 };
        let of = |i: usize, c: usize| ((sum(i, c) + prior * mean[c]) / (count(i) + prior)) as f32;
        Ok(Some((0..n_mat).flat_map(|i| (0..n_cols).map(move |c| (i, c))).map(|(i, c)| of(i, c)).collect()))
    }
}
