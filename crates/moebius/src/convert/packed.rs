//! Rows of matrices that GPTQ and AWQ have packed into 4 bits ([`Packed`]), as exact products of their integers and
//! scales. Knows no tensor of a GGUF file.

use anyhow::{Context, Result, ensure};
use checkpoint::{Checkpoint, Extent, Packed, Packing};

/// Codes in a word.
const CODES: usize = 8;
/// Where AWQ keeps the code of each of eight rows: its words hold rows 0 2 4 6 1 3 5 7.
const AWQ_PLACE: [usize; CODES] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Rows `first` to `first + n` of a matrix, into `out` `[n, columns]`.
///
/// # Errors
/// They cannot be read, or a column is in a group that is not there.
pub fn rows(checkpoint: &Checkpoint, matrix: &Packed, first: usize, n: usize, out: &mut [f32]) -> Result<()> {
    let [n_rows, n_columns] = matrix.shape;
    let n_groups = matrix.n_groups();
    ensure!(n > 0 && first + n <= n_rows && out.len() == n * n_columns, "a row past the end");
    // Rows that share words with these.
    let (word, n_words) = (first / CODES, (first + n).div_ceil(CODES) - first / CODES);
    let row_words = n_rows.div_ceil(CODES);
    let of_row = |row: usize| match matrix.packing {
        Packing::Columns { .. } => 4 * (row % CODES),
        Packing::Rows => 4 * AWQ_PLACE[row % CODES],
    };

    let each = matrix.scale_type.block_bytes();
    let raw = strided(checkpoint, &matrix.scales, [n_groups, n_rows * each], first * each, n * each)?;
    let mut scales = vec![0.0; n_groups * n];
    quant::decode_row(matrix.scale_type, &raw[..], &mut scales);
    let packed = words(&strided(checkpoint, &matrix.zeros, [n_groups, row_words * 4], word * 4, n_words * 4)?);
    let less = u32::from(matrix.packing == Packing::Columns { less_one: true });
    let zero = |group: usize, i: usize| {
        let row = first + i;
        ((packed[group * n_words + row / CODES - word] >> of_row(row) & 15) + less) & 15
    };
    let zeros: Vec<u8> = (0..n_groups * n).map(|at| zero(at / n, at % n) as u8).collect();
    let groups = groups(checkpoint, matrix)?;

    let codes = match matrix.packing {
        Packing::Columns { .. } => {
            strided(checkpoint, &matrix.codes, [n_columns / CODES, n_rows * 4], first * 4, n * 4)?
        }
        Packing::Rows => strided(checkpoint, &matrix.codes, [n_columns, row_words * 4], word * 4, n_words * 4)?,
    };
    let codes = words(&codes);
    for (i, out) in out.chunks_exact_mut(n_columns).enumerate() {
        let row = first + i;
        for (column, (out, &group)) in out.iter_mut().zip(&groups).enumerate() {
            let code = match matrix.packing {
                Packing::Columns { .. } => codes[column / CODES * n + i] >> (4 * (column % CODES)),
                Packing::Rows => codes[column * n_words + row / CODES - word] >> of_row(row),
            };
            let at = group as usize * n + i;
            *out = ((code & 15) as f32 - f32::from(zeros[at])) * scales[at];
        }
    }
    Ok(())
}

/// The group of each column.
fn groups(checkpoint: &Checkpoint, matrix: &Packed) -> Result<Vec<u32>> {
    let (n_columns, n_groups) = (matrix.shape[1], matrix.n_groups());
    let Some(extent) = &matrix.groups else { return Ok((0..n_columns).map(|i| (i / matrix.group) as u32).collect()) };
    let found = words(&strided(checkpoint, extent, [1, n_columns * 4], 0, n_columns * 4)?);
    // A negative one is a large number here.
    match found.iter().position(|&group| group as usize >= n_groups) {
        None => Ok(found),
        Some(i) => {
            let group = found[i] as i32;
            anyhow::bail!("column {i} of {} is in group {group}, there are {n_groups}", matrix.name)
        }
    }
}

/// Bytes `from` to `from + len` of each row of a plane of `[rows, bytes of a row]`.
fn strided(
    checkpoint: &Checkpoint,
    plane: &Extent,
    [n, stride]: [usize; 2],
    from: usize,
    len: usize,
) -> Result<Vec<u8>> {
    let file = &checkpoint.files()[plane.file];
    ensure!(from + len <= stride && n * stride <= plane.len, "a row past the end");
    let mut out = vec![0; n * len];
    for (i, out) in out.chunks_exact_mut(len).enumerate() {
        let at = plane.offset + i * stride + from;
        match file.bytes() {
            Some(bytes) => out.copy_from_slice(bytes.get(at..at + len).context("a row past the end")?),
            None => file.read_at(at, out)?,
        }
    }
    Ok(out)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}
